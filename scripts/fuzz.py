"""Damage files of every kind at random, read them, and say how the library dealt with them.

    python scripts/fuzz.py --count 20000 --keep /tmp/fuzz

Exits with 1 if any file led to an error that is not the library's or does not name the file, took
more than 10 seconds or 1.5 GB, or ended the process. `--keep` saves those files and tracebacks;
`--seed` chooses other files. `--only npz --number 17` reads one file again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzz.runner import BAD, GOOD, Outcome, Runner, all_targets


def main() -> int:
    options = _options()
    names = [
        name for name in all_targets() if not options.only or any(o in name for o in options.only)
    ]
    console = Console()
    jobs = [(names[job % len(names)], job // len(names)) for job in range(options.count)]
    if options.number is not None:
        jobs = [(name, options.number) for name in names]
    outcomes: list[Outcome] = []
    with Runner(options.keep) as runner:
        for name, number in track(jobs, "reading damaged files", console=console):
            # The suite has the seeds without a prefix: this campaign begins with the same files.
            prefix = f"{options.seed}:" if options.seed else ""
            outcomes.append(runner.run(name, f"{prefix}{name}:{number}"))
    console.print(_table(outcomes))
    bad = [outcome for outcome in outcomes if outcome.kind in BAD]
    for outcome in bad[: options.show]:
        console.print(f"{outcome.seed} {outcome.kind}: {outcome.headline}", markup=False)
    if options.number is not None:
        for outcome in outcomes:
            console.print(f"\n{outcome.seed} {outcome.kind}\n{outcome.detail}", markup=False)
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="how many files in all")
    parser.add_argument("--seed", type=int, default=0, help="which files")
    parser.add_argument("--only", action="append", help="targets whose name contains this")
    parser.add_argument("--number", type=int, help="this one file of each target, with tracebacks")
    parser.add_argument("--keep", type=Path, help="a folder for files that were badly dealt with")
    parser.add_argument("--show", type=int, default=40, help="how many of these to list")
    return parser.parse_args()


def _table(outcomes: list[Outcome]) -> Table:
    counts = Counter((outcome.target, outcome.kind) for outcome in outcomes)
    columns = [Column(name, justify="right", no_wrap=True) for name in ("files", *GOOD, *BAD)]
    columns.insert(0, Column("target", no_wrap=True))
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for target in dict.fromkeys(outcome.target for outcome in outcomes):
        row = [counts[target, kind] for kind in (*GOOD, *BAD)]
        table.add_row(target, *(str(count or "") for count in (sum(row), *row)))
    totals = Counter(outcome.kind for outcome in outcomes)
    row = [len(outcomes), *(totals[kind] for kind in (*GOOD, *BAD))]
    table.add_row("all", *map(str, row), style="bold")
    return table


if __name__ == "__main__":
    sys.exit(main())
