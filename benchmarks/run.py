"""Run all benchmarks that have no result yet, then write README.md from the results.

    python benchmarks/run.py [--again] [--only fit imports]
    python benchmarks/run.py --network FILE --train DIR --corrupted DIR

Every benchmark runs in an interpreter of its own, and one that fails does not stop the others. A
run that is interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
DATA = Path("~/.cache/ttapca/cifar-10-batches-bin").expanduser()

# Short ones first; the large network last.
BENCHMARKS: dict[str, list[str]] = {
    "imports": ["imports.py"],
    "corruptions": ["corruptions.py"],
    "large-corruptions": ["large_corruptions.py"],
    "forward": ["forward.py"],
    "storage": ["storage.py"],
    "structured": ["structured.py"],
    "inference-resnet20": ["inference.py", "--network", "resnet20"],
    "large-inference": ["large_inference.py"],
    "serving": ["serving.py"],
    "http-serving": ["http_serving.py"],
    "harness": ["harness.py"],
    "engines": ["engines.py"],
    "detector": ["detector.py"],
    "fit": ["fit.py"],
    "sharded-fit": ["sharded_fit.py"],
    "long-layer": ["long_layer.py"],
    "scaling": ["scaling.py"],
    "inference-wrn-28-10": ["inference.py", "--network", "wrn-28-10", "--rounds", "3"],
}

# They need CIFAR-10, which is not part of this repository.
ON_CIFAR = ("detector", "inference-resnet20", "inference-wrn-28-10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="measure what has a result as well")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="these benchmarks")
    parser.add_argument("--network", help="of a CIFAR-10 network, for errors")
    parser.add_argument("--normalise", help="what it expects")
    parser.add_argument("--train", help="a folder of CIFAR-10")
    parser.add_argument("--corrupted", help="a folder of CIFAR-10-C")
    options = parser.parse_args()
    trained = [
        word
        for name in ("network", "normalise", "train", "corrupted")
        if (value := getattr(options, name)) is not None
        for word in (f"--{name}", value)
    ]
    failed = []
    for name in options.only or BENCHMARKS:
        if name == "long-layer" and not (options.network and options.train):
            continue  # it is about a trained network only
        if name in ON_CIFAR and not DATA.exists():
            continue
        script, *arguments = BENCHMARKS[name]
        arguments += ["--again"] if options.again else []
        arguments += trained if name in ("storage", "structured", "long-layer") else []
        print(f"--- {name}", flush=True)
        if subprocess.run([sys.executable, FOLDER / script, *arguments], check=False).returncode:
            failed.append(name)
    subprocess.run([sys.executable, FOLDER / "report.py"], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
