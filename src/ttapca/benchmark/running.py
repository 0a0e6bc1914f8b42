"""Run units of work: skip finished ones, write down failures, and go on with the rest.

Units are run here, or by the workers of an engine; only this process writes the file of results.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, islice, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from ttapca.benchmark.measurement import Written, not_measured, run_unit
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.results import Results
from ttapca.benchmark.rows import Row
from ttapca.benchmark.subject import Condition, ImageCache, Subject
from ttapca.engines import Engine, Finished, Lost, SerialEngine
from ttapca.engines.artifacts import Artifact, folder_beside, write_artifact
from ttapca.support.disk import make_folder
from ttapca.support.progress import Reporter, counted

MOST_INTERLEAVED = 8  # conditions; the images of two more are kept, on the disk of the workers
_one_at_a_time = Lock()  # a network has one method on it; a worker of dask may have many threads


class Assignment(NamedTuple):
    """A unit, and the command that runs it again."""

    unit: Unit
    command: str


Endings = Generator[Finished[Assignment, Written] | Lost[Assignment], None, None]


def run(
    units: Sequence[Unit],
    subject: Subject,
    results: Results,
    *,
    reporter: Reporter | None = None,
    retry_failed: bool = False,
    command: Callable[[Unit], Sequence[str]] | None = None,
    engine: Engine | None = None,
    announce: bool = True,
) -> None:
    """Run the units that are not in the file yet; `command` returns the words that reproduce one.

    A finished unit is written in one transaction, so that a killed run goes on. A unit whose worker
    dies is tried again, and has failed after that. On other engines rows come in another order.
    """
    reporter, engine = reporter or Reporter(), engine or SerialEngine()

    def waiting(holder: str) -> None:
        reporter.note(f"another run fills the file of results ({holder}); waiting for it to end")

    with results.reserved(waiting):
        if subject.fingerprints:
            results.check_fingerprints(subject.fingerprints)
        todo = unfinished(units, results, retry_failed=retry_failed)
        subject.source.check([condition for unit in todo for condition in unit.conditions])
        if announce:
            reporter.note(_announcement(todo, units, results))
        if not todo:
            return
        if engine.remote:
            todo = interleaved(todo, engine.workers)
        tasks = [Assignment(unit, shlex.join(command(unit)) if command else "") for unit in todo]
        if not engine.remote:
            progress = _Progress(reporter, todo, len(units))

            def local_work(assignment: Assignment) -> Written:
                unit, command = assignment
                # Missing images stop the run: that says nothing about the method.
                images = subject.source.images(unit.conditions)
                progress.start(unit)
                return run_unit(unit, subject, images, command, progress.batch)

            _write(engine.run(tasks, local_work), results, progress)
            return
        folder = results.path.with_name(f"{results.path.name}-scratch")
        with _remote_work(subject, todo, folder) as work:
            progress = _Progress(reporter, todo, len(units), engine.workers)
            needs = (work.images, work.subject)
            ended = engine.run(tasks, work, needs=needs, ready=work.check, tell=reporter.note)
            _write(ended, results, progress)


def _write(ended: Endings, results: Results, progress: _Progress) -> None:
    """Write down how each unit ended, as soon as it has."""
    with closing(ended):  # a full disk stops the workers as well
        for ending in ended:
            unit, command = ending.task
            if isinstance(ending, Finished):
                rows, observations = ending.result
            else:
                rows, observations = not_measured(unit, ending.reason, command), []
            results.add(rows, observations)
            progress.end(unit, rows)


def unfinished(
    units: Iterable[Unit], results: Results, *, retry_failed: bool = False
) -> list[Unit]:
    """Return the units of which some measurement is not in the file."""
    statuses = results.statuses()
    over = {"done"} if retry_failed else {"done", "failed"}
    return [unit for unit in units if not all(statuses.get(cell) in over for cell in unit.cells)]


@dataclass(frozen=True)
class RemoteWork:
    """Runs units in other processes; it is small, and opens its artifacts there."""

    subject: Artifact[Subject]
    images: Artifact[Any]
    conditions: tuple[Condition, ...]  # of all units

    def __call__(self, assignment: Assignment) -> Written:
        """Run a unit, and return its rows."""
        with _one_at_a_time:
            subject, unit = self._opened(), assignment.unit
            images = subject.source.images(unit.conditions)
            return run_unit(unit, subject, images, assignment.command)

    def check(self) -> None:
        """Raise now if this worker lacks an artifact or a file: a run would stop hours later."""
        with _one_at_a_time:
            self._opened().source.check(self.conditions)

    def _opened(self) -> Subject:
        subject = self.subject.open()
        if subject.source.cache is None:
            subject.source.cache = ImageCache(folder_beside(self.subject), MOST_INTERLEAVED + 2)
        return subject


@contextmanager
def _remote_work(subject: Subject, units: Sequence[Unit], folder: Path) -> Iterator[RemoteWork]:
    """Write the artifacts of workers into a folder, which is there as long as the block."""
    shutil.rmtree(folder, ignore_errors=True)  # a killed run has left it
    make_folder(folder)
    try:
        source = subject.source
        images = write_artifact(source.clean, folder, "the images")
        corrupted, textures = (
            each and each.absolute() for each in (source.folder, source.textures)
        )
        bare = replace(source, folder=corrupted, textures=textures, cache=None)
        whole = write_artifact(
            replace(subject, source=bare),
            folder,
            "network and filter",
            parts={id(source.clean): images},
        )
        conditions = dict.fromkeys(each for unit in units for each in unit.conditions)
        yield RemoteWork(whole, images, tuple(conditions))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interleaved(units: Iterable[Unit], workers: int) -> list[Unit]:
    """Return the units so that workers begin with different images, and none waits for another."""
    groups: dict[tuple[Condition, ...], list[Unit]] = {}
    for unit in units:
        groups.setdefault(tuple(unit.conditions), []).append(unit)
    remaining, order = iter(groups.values()), list[Unit]()
    while some := list(islice(remaining, min(workers, MOST_INTERLEAVED))):
        order += filter(None, chain.from_iterable(zip_longest(*some)))
    return order


def _announcement(todo: Sequence[Unit], units: Sequence[Unit], results: Results) -> str:
    """Return how much there is to do, and how many of the finished runs failed."""
    count, before = sum(len(unit.cells) for unit in todo), len(units) - len(todo)
    failed = len(unfinished(units, results, retry_failed=True)) - len(todo)
    images = counted(sum(unit.images for unit in todo), "sample")
    runs = "" if count == len(todo) else f" in {counted(len(todo), 'run')}"
    text = f"{counted(count, 'measurement')} to make{runs}, {images}"
    if before:
        were = "was" if before == 1 else "were"
        text += f"; {counted(before, 'run')} {were} finished before"
        text += f", {failed:,} of them failed" if failed else ""
    return text


def seconds_left(
    units: Iterable[Unit], seconds: Mapping[str, float], images: Mapping[str, int]
) -> float:
    """Estimate how long units will take from seconds spent and images done, by method."""
    pace = {method: seconds[method] / images[method] for method in seconds}
    typical = sum(pace.values()) / len(pace)  # methods differ in speed a hundredfold
    return sum(unit.images * pace.get(unit.cells[0].method, typical) for unit in units)


class _Progress:
    """Tells a reporter of each unit, here also of each batch, and of the time that is left."""

    def __init__(
        self, reporter: Reporter, todo: Sequence[Unit], units: int, workers: int = 0
    ) -> None:
        self._reporter, self._workers = reporter, workers
        self._todo, self._count = dict.fromkeys(todo), len(todo)
        self._number, self._units = units - len(todo), units
        self._seconds: dict[str, float] = defaultdict(float)  # by method
        self._images: dict[str, int] = defaultdict(int)  # by method
        self._all_tasks = f"{workers} at a time"
        if workers:
            reporter.advance(self._all_tasks, 0, self._count)

    def start(self, unit: Unit) -> None:
        """Begin a unit in this process."""
        self._name(unit)
        self._total, self._done, self._wrong = unit.images, 0, 0
        self._began = time.monotonic()
        self._reporter.advance(self._label, 0, self._total)

    def batch(self, images: int, wrong: int) -> None:
        """Count a batch of the unit that was started."""
        self._done += images
        self._wrong += wrong
        if self._done < self._total:  # a unit is finished when its rows are in the file
            seconds = time.monotonic() - self._began
            facts = self._facts(100 * self._wrong / self._done, self._done, seconds)
            self._reporter.advance(self._label, self._done, self._total, facts)

    def end(self, unit: Unit, rows: Sequence[Row]) -> None:
        """End a unit whose rows are in the file."""
        if self._workers:
            self._name(unit)
        del self._todo[unit]
        facts, images, outcome = "", unit.images, rows[0].outcome
        if outcome.reason:
            failed = "" if outcome.status == "done" else "FAILED: "
            self._reporter.note(f"{self._label}  {failed}{outcome.reason}")
        if outcome.status == "done":
            spent = sum(row.outcome.seconds for row in rows)
            seconds = spent if self._workers else time.monotonic() - self._began
            self._seconds[unit.cells[0].method] += seconds
            self._images[unit.cells[0].method] += images
            wrong = sum((row.outcome.error or 0) * row.cell.images for row in rows)
            facts = self._facts(wrong / images, images, seconds)
        self._reporter.advance(self._label, images, images, facts)
        if self._workers:
            self._reporter.advance(self._all_tasks, self._count - len(self._todo), self._count)

    def _name(self, unit: Unit) -> None:
        self._number += 1
        self._label = f"{self._number}/{self._units}  {unit.title}"

    def _facts(self, error: float, images: int, seconds: float) -> str:
        facts = [f"error {error:.1f} %", f"{images / max(seconds, 1e-9):,.0f} samples/s"]
        if self._seconds and self._todo:
            left = seconds_left(self._todo, self._seconds, self._images) / max(self._workers, 1)
            facts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(facts)
