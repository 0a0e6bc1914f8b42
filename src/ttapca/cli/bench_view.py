"""Show a run of `ttapca bench` on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ttapca.benchmark.cells import Row
from ttapca.benchmark.grid import Unit
from ttapca.benchmark.plan import PAPERS_BATCH
from ttapca.benchmark.running import Watcher
from ttapca.cli.reporting import Drawn


class Pace:
    """How long the rest will take: methods differ in speed a hundredfold, so each has its own.

    Example:
        >>> pace = Pace()
        >>> pace.left([]) is None
        True
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._images: dict[str, int] = {}

    def add(self, method: str, images: int, seconds: float) -> None:
        """A method took so long for so many images."""
        self._seconds[method] = self._seconds.get(method, 0.0) + seconds
        self._images[method] = self._images.get(method, 0) + images

    def left(self, units: Iterable[Unit]) -> float | None:
        """Seconds for these units; None as long as nothing is known."""
        known = {method: self._seconds[method] / count for method, count in self._images.items()}
        if not known:
            return None
        typical = sum(known.values()) / len(known)
        return sum(unit.images * known.get(unit.cells[0].method, typical) for unit in units)


class RunView(Drawn, Watcher):
    """A `Watcher` for people.

    Args:
        console: Where to write; standard error by default.
        lines: Whether each finished unit leaves a line; a failure always does.
    """

    def __init__(self, console: Console | None = None, *, lines: bool = True) -> None:
        self._lines = lines
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, facts="", visible=False)
        self._pace = Pace()
        self._todo: list[Unit] = []
        self._finished = self._all = self._images = self._wrong = 0
        self._start = 0.0

    def note(self, text: str) -> None:
        """Write one sentence above the bar."""
        self._print(f"bench: {text}")

    def waits(self, holder: str) -> None:
        """Say whom we wait for."""
        self.note(f"another run fills the file of results ({holder}); waiting for it to end")

    def starts(self, todo: Sequence[Unit], finished: int) -> None:
        """Say how much there is to do."""
        self._todo, self._finished, self._all = list(todo), finished, finished + len(todo)
        cells = sum(len(unit.cells) for unit in todo)
        images = sum(unit.images for unit in todo)
        before = f"; {finished:,} units were finished before" if finished else ""
        units = "" if cells == len(todo) else f" in {len(todo):,} units"
        self.note(f"{cells:,} cells to run{units}, {images:,} images{before}")

    def unit_starts(self, unit: Unit) -> None:
        """Show the unit."""
        self._images = self._wrong = 0
        self._start = time.monotonic()
        self._progress.update(
            self._task,
            description=title(unit),
            total=unit.images,
            completed=0,
            facts="",
            visible=True,
        )

    def batch(self, images: int, wrong: int) -> None:
        """Show the error so far."""
        self._images += images
        self._wrong += wrong
        if not self._progress.disable:
            self._progress.update(self._task, completed=self._images, facts=self._facts())

    def unit_ends(self, rows: Sequence[Row]) -> None:
        """Leave one line for the unit."""
        unit = self._todo.pop(0)
        self._finished += 1
        failed = [row for row in rows if row.outcome.status == "failed"]
        if not failed:
            elapsed = time.monotonic() - self._start
            self._pace.add(unit.cells[0].method, unit.images, elapsed)
        facts = f"FAILED: {failed[0].outcome.reason}" if failed else self._facts()
        if self._lines or failed:
            self._print(f"{self._finished}/{self._all}  {title(unit)}  {facts}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def _facts(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        facts = [
            f"error {100 * self._wrong / max(self._images, 1):.1f} %",
            f"{self._images / elapsed:,.0f} images/s",
        ]
        left = self._pace.left(self._todo)
        if left is not None and self._todo:
            facts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(facts)


def title(unit: Unit) -> str:
    """A unit in a few words."""
    cell = unit.cells[0]
    what = f"{cell.corruption} {cell.severity}"
    if len(unit.cells) > 1:
        what = f"{len(unit.cells)} corruptions {max(cell.severity for cell in unit.cells)}"
    extras = [
        f"{name} {value}"
        for name, value, usual in (
            ("rank", cell.components, 0),
            ("steps", max(cell.steps, 1), 1),
            ("batch", cell.batch_size, PAPERS_BATCH),
            ("seed", cell.seed, 0),
        )
        if value != usual
    ]
    return "  ".join([what, cell.setting, cell.method, *extras])
