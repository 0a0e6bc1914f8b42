"""Put a finished training run into the package: float16 weights, a card, the facts as JSON.

    python scripts/pack_checkpoint.py RUN NAME [--data cifar10] [--to src/ttapca/networks/weights]
                                      [--least 90]

Prints the accuracy and the size of what is stored; exits with 1 where they break the rules.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ttapca.cli.arguments import cache_root
from ttapca.datasets import load
from ttapca.networks.packing import pack

MOST_BYTES = 3_000_000
WEIGHTS = Path(__file__).parents[1] / "src" / "ttapca" / "models" / "weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--to", type=Path, default=WEIGHTS)
    parser.add_argument("--least", type=float, default=90.0, help="accuracy in percent")
    options = parser.parse_args()
    test = load(options.data, "test", root=cache_root())
    packed = pack(options.run, options.name, options.to, test)
    size = packed.weights.stat().st_size
    print(f"{packed.weights}: {packed.evaluation.accuracy:.2f} %, {size:,} bytes")
    good = packed.evaluation.accuracy >= options.least and size <= MOST_BYTES
    print(f"at least {options.least} % and at most {MOST_BYTES:,} bytes: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
