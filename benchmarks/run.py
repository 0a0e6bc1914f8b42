"""Run all benchmarks that have no result yet, then write README.md from the results.

    python benchmarks/run.py [--again] [--only fit imports] [storage options]

Every benchmark runs in an interpreter of its own, and one that fails does not stop the others. A
run that is interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent

# Short ones first; the large network last.
BENCHMARKS: dict[str, list[str]] = {
    "imports": ["imports.py"],
    "corruptions": ["corruptions.py"],
    "forward": ["forward.py"],
    "storage": ["storage.py"],
    "structured": ["structured.py"],
    "inference-resnet20": ["inference.py", "--network", "resnet20"],
    "harness": ["harness.py"],
    "fit": ["fit.py"],
    "scaling": ["scaling.py"],
    "inference-wrn-28-10": ["inference.py", "--network", "wrn-28-10", "--rounds", "3"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="measure what has a result as well")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, help="these benchmarks")
    parser.add_argument("--storage", nargs=argparse.REMAINDER, default=[], help="its options")
    options = parser.parse_args()
    failed = []
    for name in options.only or BENCHMARKS:
        script, *arguments = BENCHMARKS[name]
        arguments += ["--again"] if options.again else []
        arguments += options.storage if name == "storage" else []
        print(f"--- {name}", flush=True)
        if subprocess.run([sys.executable, FOLDER / script, *arguments], check=False).returncode:
            failed.append(name)
    subprocess.run([sys.executable, FOLDER / "report.py"], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
