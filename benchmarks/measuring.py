"""How the benchmarks measure, and what they leave behind.

Two things that are compared are measured in turns, so that both see the same machine, and their
ratio is taken round by round: a neighbour that slows a whole round slows both. What is reported is
the median over the rounds with its quartiles. A benchmark gives a `Result`, which is printed as
tables and written to a JSON file with the facts of the machine; `report.py` writes README.md from
these files.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttapca.support import process

RESULTS = Path(__file__).parent / "results"

# On a busy machine, processor time of one thread (with OMP_NUM_THREADS=1) says more than the clock
# on the wall; the results tell which it was.
CLOCK_NAME = os.environ.get("TTAPCA_BENCH_CLOCK", "perf_counter")
CLOCK: Callable[[], float] = getattr(time, CLOCK_NAME)

Function = Callable[[], object]
Timed = Callable[..., tuple[float, Any]]  # returns the seconds that count, and a result


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, and their quartiles."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; one value is its own."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """`median (low to high)`."""
        if self.count == 1:
            return f"{self.median * scale:,.{digits}f}"
        low, high = self.low * scale, self.high * scale
        return f"{self.median * scale:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


@dataclass(frozen=True)
class Goal:
    """Something to reach: a number, and the most (or least) that it may be."""

    what: str
    measured: float
    shown: str
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> list[str]:
        """As a row of a table."""
        sense = "at least" if self.at_least else "at most"
        verdict = "reached" if self.reached else "**missed**"
        return [self.what, self.shown, f"{sense} {self.limit:g}{self.unit}", verdict]


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As Markdown."""
        lines = [
            f"| {' | '.join(self.columns)} |",
            f"|{'---|' * len(self.columns)}",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return f"{self.title}\n\n" + "\n".join(lines)

    def text(self) -> str:
        """For a terminal."""
        every = [self.columns, *self.rows]
        widths = [max(len(row[k]) for row in every) for k in range(len(self.columns))]
        lines = [
            "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in every
        ]
        return "\n".join([self.title, *lines])


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        title: Heading of its section.
        text: A paragraph: what was done, in which sizes, with which seed.
        tables: What was measured.
        goals: What it had to reach.
        numbers: The raw measurements, for plots and for the cost model.
    """

    title: str
    text: str
    tables: list[Table]
    goals: list[Goal] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def timed(function: Function) -> tuple[float, object]:
    """Seconds and result."""
    start = CLOCK()
    result = function()
    return CLOCK() - start, result


def interleaved(
    functions: Mapping[str, Function], rounds: int | Mapping[str, int], *, settle: bool = True
) -> dict[str, list[float]]:
    """Seconds of each function in each round; all take their turn in every round.

    Args:
        functions: By name.
        rounds: How many, of all functions or of each; what takes long may stay away from the last.
        settle: Begin every turn with a call that does not count, so that caches and free memory are
            those of the function itself and not of the one before it, as when it runs on a stream.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    each = rounds if isinstance(rounds, Mapping) else dict.fromkeys(functions, rounds)
    for number in range(max(each.values())):
        for name, function in functions.items():
            if number >= each[name]:
                continue
            if settle:
                function()
            seconds[name].append(timed(function)[0])
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round, as long as both take part."""
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=False)])


@dataclass(frozen=True)
class Measured:
    """Seconds that a function took, the peak memory of its process, and what it returned."""

    seconds: float
    peak_gb: float
    result: Any


def in_own_process(function: Timed, *arguments: object) -> Measured:
    """Run a function that times itself in a fresh process, so that its peak memory is its own.

    Args:
        function: Returns the seconds that count, and a result.
        *arguments: Of the function.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (function, arguments))


def _measured(function: Timed, arguments: tuple[object, ...]) -> Measured:
    seconds, result = function(*arguments)
    return Measured(seconds, peak_memory(), result)


def peak_memory() -> float:
    """Highest resident memory of this process so far, in GB."""
    return process.peak_memory() / 1000


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    import torch

    from ttapca.benchmark import measurement  # brings torch, which some do without

    return {
        "processor": measurement.machine()["cpu"],
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "clock": CLOCK_NAME,
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class Progress:
    """What a long benchmark has measured so far, so that it goes on where it was interrupted.

    Args:
        path: Of a file that is there only while the benchmark is under way; a line a measurement.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._done: dict[str, Any] = dict(json.loads(line) for line in lines)

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """What was measured under this key, now or before."""
        if key in self._done:
            print(f"  {key}: measured before the interruption")
        else:
            self._done[key] = measure()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._done[key]]) + "\n")
        return self._done[key]

    def forget(self) -> None:
        """All is done; the next run measures anew."""
        self._path.unlink(missing_ok=True)


def load_average() -> float:
    """Processes that wanted a core in the last minute."""
    return os.getloadavg()[0]


def command(
    name: str, run: Callable[[argparse.Namespace], Result], parser: argparse.ArgumentParser
) -> None:
    """Run a benchmark from the command line, unless its result is there already.

    Args:
        name: Of the JSON file.
        run: Measures.
        parser: Knows the benchmark's own options.
    """
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--again", action="store_true", help="measure even if there is a result")
    options = parser.parse_args()
    path = options.to / f"{name}.json"
    if path.exists() and not options.again:
        print(f"{name}: {path} is there already; --again measures anew")
        return
    before = load_average()
    seconds, result = timed(lambda: run(options))
    if not isinstance(result, Result):
        raise TypeError(f"{name} gave no Result")
    write(path, result, seconds=seconds, load=before)
    print("\n\n".join(table.text() for table in with_goals(result)))
    print(f"\n{name}: {seconds:.0f} s, load before {before:.1f} -> {path}")


def with_goals(result: Result) -> list[Table]:
    """All tables of a result, the goals last."""
    goals = [goal.row() for goal in result.goals]
    if not goals:
        return result.tables
    return [*result.tables, Table("Goals", ["what", "measured", "goal", ""], goals)]


def write(path: Path, result: Result, *, seconds: float, load: float) -> None:
    """Write a result to its JSON file, wholly or not at all."""
    record = {
        **asdict(result),
        "machine": machine(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "load_before": load,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_plain(record), indent=1) + "\n")
    partial.replace(path)


def read(path: Path) -> tuple[Result, dict[str, Any]]:
    """A result, and the facts about its run."""
    record = json.loads(path.read_text())
    result = Result(
        title=record["title"],
        text=record["text"],
        tables=[Table(**table) for table in record["tables"]],
        goals=[Goal(**goal) for goal in record["goals"]],
        numbers=record["numbers"],
    )
    return result, record


def _plain(value: Any) -> Any:
    """JSON has no NaN and few digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
