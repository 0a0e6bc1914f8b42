"""What `import ttapca` takes over `import torch`, in fresh interpreters that take turns.

Two cases count: the package alone, which imports its names lazily, and all its names.

    python benchmarks/imports.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import measuring
from measuring import Goal, Result, Spread, Table, ratio

CASES = {
    "import torch": "import torch",
    "import ttapca": "import ttapca",
    "import ttapca, and all its names": "from ttapca import *",
}


def run(options: argparse.Namespace) -> Result:
    def case(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    seconds = measuring.interleaved(
        {"nothing": lambda: case("")}
        | {name: lambda code=code: case(code) for name, code in CASES.items()},
        options.rounds,
    )
    rows = [
        [name, Spread.of(values).show(), ratio(values, seconds["import torch"]).show()]
        for name, values in seconds.items()
    ]
    all_names = ratio(seconds["import ttapca, and all its names"], seconds["import torch"])
    lazy = ratio(seconds["import ttapca"], seconds["import torch"])
    what = "over `import torch`"
    return Result(
        title="Import",
        text=(
            "A fresh interpreter a time. `import ttapca` imports a name when it is first used, so "
            "the fair comparison is the one with all names."
        ),
        tables=[Table("Import", ["code", "seconds", what], rows)],
        goals=[
            Goal(f"`import ttapca` {what}", lazy.median, lazy.show(), 1.2),
            Goal(f"all names {what}", all_names.median, all_names.show(), 1.2),
        ],
        numbers={"seconds": seconds},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    measuring.command("imports", run, parser)


if __name__ == "__main__":
    main()
