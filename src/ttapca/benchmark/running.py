"""Run units of work: skip what is finished, write down what fails, and go on with the rest."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta

from ttapca.benchmark.cells import ClassLabels, Row
from ttapca.benchmark.elsewhere import Assignment, interleaved, packed
from ttapca.benchmark.measurement import Written, failure, run_unit
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.results import Results
from ttapca.benchmark.subject import Subject
from ttapca.engines import Engine, Finished, Lost, SerialEngine
from ttapca.support.progress import Reporter, Silent, counted

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
    """Run what is not in the file yet.

    A finished unit is written in one transaction. So a run that was killed at any moment can be
    started again, and ends with the same file as if nothing had happened. Only this process
    writes, wherever units are run. A unit whose worker dies is tried again, and has failed after
    that.

    Args:
        units: As `expand` returns them.
        subject: What they are run on.
        results: Where finished measurements are looked up and written.
        reporter: Told how it goes. Each unit is one task, finished when its rows are in the file.
        retry_failed: Whether to run again what has failed before.
        command: Returns the words of the command that reproduces a unit, to be kept with it.
        engine: Where they are run; by default one after the other in this process. Anywhere else
            the same rows come in another order.
        announce: Whether to say how much there is to do.

    Raises:
        OptionError: The file has measurements on something else of the same name.
        StorageError: The disk is full or refuses; what was finished is in the file.
        DataNotFoundError: Corrupted images cannot be made or read.
        EngineError: The engine has no workers that can do it, or the network cannot be sent.
    """
    reporter = reporter or Silent()

    def waiting(holder: str) -> None:
        reporter.note(f"another run fills the file of results ({holder}); waiting for it to end")

    with results.reserved(waiting):
        if subject.claims:
            results.claim(subject.claims)
        todo = unfinished(units, results, retry_failed=retry_failed)
        subject.source.check([condition for unit in todo for condition in unit.conditions])
        if todo:
            clean = subject.source.clean
            classes = tuple(clean.labels.tolist())
            results.add_labels(ClassLabels(todo[0].cells[0].data, clean.class_names, classes))
        engine = engine or SerialEngine()
        elsewhere = engine.remote and bool(todo)
        if announce:
            _announce(reporter, todo, units, results)
        if elsewhere:
            todo = interleaved(todo, engine.workers)
        orders = [Assignment(unit, shlex.join(command(unit)) if command else "") for unit in todo]
        if not elsewhere:
            one = _Progress(reporter, todo, len(units))
            _write(engine.run(orders, _work_here(subject, one)), results, one)
            return
        folder = results.path.with_name(f"{results.path.name}-scratch")
        with packed(subject, todo, folder) as work:
            several = _SeveralAtOnce(reporter, todo, len(units), engine.workers)
            needs = (work.images, work.subject)
            ended = engine.run(orders, work, needs=needs, ready=work.check, tell=reporter.note)
            _write(ended, results, several)


def _work_here(subject: Subject, progress: _Progress) -> Callable[[Assignment], Written]:
    def work(assignment: Assignment) -> Written:
        unit, command = assignment
        # Missing images stop the run: that says nothing about the method.
        images = subject.source.images(unit.conditions)
        progress.start(unit)
        return run_unit(unit, subject, images, command, progress.batch)

    return work


def _write(ended: Endings, results: Results, progress: _Progress | _SeveralAtOnce) -> None:
    """Write down how each unit ended, as soon as it has."""
    with closing(ended):  # a full disk stops the workers as well
        for ending in ended:
            unit, command = ending.task
            if isinstance(ending, Finished):
                rows, observations = ending.result
            else:
                rows, observations = failure(unit, ending.reason, command)
            results.add(rows, observations)
            progress.end(unit, rows)


def unfinished(
    units: Iterable[Unit], results: Results, *, retry_failed: bool = False
) -> list[Unit]:
    """Return the units of which some measurement is not in the file."""
    statuses = results.statuses()
    over = {"done"} if retry_failed else {"done", "failed"}
    return [unit for unit in units if not all(statuses.get(cell) in over for cell in unit.cells)]


def seconds_left(
    units: Iterable[Unit], seconds: Mapping[str, float], images: Mapping[str, int]
) -> float:
    """Estimate how long units will take from seconds spent and images done, by method."""
    pace = {method: seconds[method] / images[method] for method in seconds}
    typical = sum(pace.values()) / len(pace)  # methods differ in speed a hundredfold
    return sum(unit.images * pace.get(unit.cells[0].method, typical) for unit in units)


def _announce(
    reporter: Reporter, todo: Sequence[Unit], units: Sequence[Unit], results: Results
) -> None:
    """Say how much there is to do, and how what is not done again ended."""
    count, before = sum(len(unit.cells) for unit in todo), len(units) - len(todo)
    were = "was" if before == 1 else "were"
    failed = len(unfinished(units, results, retry_failed=True)) - len(todo)
    lost = f", {failed:,} of them failed" if failed else ""
    finished = f"; {counted(before, 'run')} {were} finished before{lost}" if before else ""
    runs = "" if count == len(todo) else f" in {counted(len(todo), 'run')}"
    images = counted(sum(unit.images for unit in todo), "image")
    reporter.note(f"{counted(count, 'measurement')} to make{runs}, {images}{finished}")


class _Remaining:
    """What is left to do, and how long it will take."""

    def __init__(self, todo: Sequence[Unit], units: int) -> None:
        self._todo = dict.fromkeys(todo)
        self._spent: dict[str, float] = defaultdict(float)  # seconds by method
        self._done: dict[str, int] = defaultdict(int)  # images by method
        self._number, self._units = units - len(todo), units

    def next_label(self, unit: Unit) -> str:
        self._number += 1
        return f"{self._number}/{self._units}  {unit.title}"

    def over(self, unit: Unit) -> None:
        self._todo.pop(unit)

    def learn(self, unit: Unit, seconds: float) -> None:
        method = unit.cells[0].method
        self._spent[method] += seconds
        self._done[method] += unit.images

    def facts(self, error: float, speed: float, workers: int = 1) -> str:
        facts = [f"error {error:.1f} %", f"{speed:,.0f} images/s"]
        if self._spent and self._todo:
            left = seconds_left(self._todo, self._spent, self._done) / workers
            facts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(facts)


class _Progress:
    """Tells a reporter how a run goes that does one unit after the other."""

    def __init__(self, reporter: Reporter, todo: Sequence[Unit], units: int) -> None:
        self._reporter, self._remaining = reporter, _Remaining(todo, units)

    def start(self, unit: Unit) -> None:
        self._label = self._remaining.next_label(unit)
        self._total, self._images, self._wrong = unit.images, 0, 0
        self._start = time.monotonic()
        self._reporter.advance(self._label, 0, self._total)

    def batch(self, images: int, wrong: int) -> None:
        self._images += images
        self._wrong += wrong
        if self._images < self._total:  # a unit is finished when its rows are in the file
            self._reporter.advance(self._label, self._images, self._total, self._facts())

    def end(self, unit: Unit, rows: Sequence[Row]) -> None:
        self._remaining.over(unit)
        facts = ""
        if reason := rows[0].outcome.reason:
            self._reporter.note(f"{self._label}  FAILED: {reason}")
        else:
            self._remaining.learn(unit, time.monotonic() - self._start)
            facts = self._facts()
        self._reporter.advance(self._label, self._total, self._total, facts)

    def _facts(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        return self._remaining.facts(100 * self._wrong / self._images, self._images / elapsed)


class _SeveralAtOnce:
    """Tells a reporter how a run goes whose units are done elsewhere: when each has ended."""

    def __init__(self, reporter: Reporter, todo: Sequence[Unit], units: int, workers: int) -> None:
        self._reporter, self._remaining = reporter, _Remaining(todo, units)
        self._workers, self._ended, self._count = workers, 0, len(todo)
        self._task = f"{workers} at a time"
        reporter.advance(self._task, 0, self._count)

    def end(self, unit: Unit, rows: Sequence[Row]) -> None:
        label, facts = self._remaining.next_label(unit), ""
        self._remaining.over(unit)
        if reason := rows[0].outcome.reason:
            self._reporter.note(f"{label}  FAILED: {reason}")
        else:
            seconds = max(sum(row.outcome.seconds for row in rows), 1e-9)
            wrong = sum((row.outcome.error or 0) * row.cell.images for row in rows)
            self._remaining.learn(unit, seconds)
            error, speed = wrong / unit.images, unit.images / seconds
            facts = self._remaining.facts(error, speed, self._workers)
        self._reporter.advance(label, unit.images, unit.images, facts)
        self._ended += 1
        self._reporter.advance(self._task, self._ended, self._count)
