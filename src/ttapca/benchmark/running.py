"""Run units of work: what is finished is skipped, what fails is written down, the rest goes on."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import torch

from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import CLEAN, Cell, Observation, Outcome, Row
from ttapca.benchmark.image_source import FORGETTING, segments
from ttapca.benchmark.inspection import observe
from ttapca.benchmark.machine import machine, versions
from ttapca.benchmark.plan import PAPERS_BATCH, Unit
from ttapca.benchmark.results import Results
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images, TensorBatches, to_tensor
from ttapca.methods.adapt import MethodName, adapt
from ttapca.methods.method import registration
from ttapca.networks.evaluation import Watch, predict_all
from ttapca.support.progress import Reporter, Silent, forget_peak_memory, peak_memory

Command = Callable[[Unit], Sequence[str]]
LONGEST_REASON = 1000  # letters

EVALUATED = (
    "error", "calibration_error", "entropy", "error_stream", "entropy_stream", "seconds",
)  # fmt: skip
NOTHING: dict[str, Any] = {
    "error": None, "calibration_error": None, "entropy": None, "error_stream": (),
    "entropy_stream": (), "seconds": 0.0, "updates": 0, "skipped": 0, "parameters": 0,
}  # fmt: skip


def run(
    units: Sequence[Unit],
    subject: Subject,
    results: Results,
    *,
    reporter: Reporter | None = None,
    retry_failed: bool = False,
    command: Command | None = None,
) -> None:
    """Run what is not in the file yet.

    A unit is written in one transaction when it is done: a run that was killed at any moment goes
    on where it was, and ends with the file that it would have ended with.

    Args:
        units: What `expand` gives.
        subject: What they are run on.
        results: Where finished results are found and put.
        reporter: Told how it goes. Every unit is a task of its own, which is finished when its rows
            are in the file.
        retry_failed: Whether to run again what has failed before.
        command: Gives the words that reproduce a unit, to be kept with it.

    Raises:
        StorageError: The disk is full or refuses; what was finished is in the file.
        DataNotFoundError: Corrupted images cannot be made or read.
    """
    reporter = reporter or Silent()

    def waiting(holder: str) -> None:
        reporter.note(f"another run fills the file of results ({holder}); waiting for it to end")

    with results.reserved(waiting):
        todo = unfinished(units, results, retry_failed=retry_failed)
        subject.source.check([condition for unit in todo for condition in unit.conditions])
        told = _RunReport(reporter, todo, len(units))
        for unit in todo:
            images = subject.source.images(unit.conditions)  # without them there is no finding
            told.starts(unit)
            words = shlex.join(command(unit)) if command else ""
            rows, observations = _finished(unit, subject, images, told.batch, words)
            results.add(rows, observations)
            told.ends(unit, rows)


def unfinished(
    units: Iterable[Unit], results: Results, *, retry_failed: bool = False
) -> list[Unit]:
    """The units that have results to come."""
    statuses = results.statuses()
    over = {"done"} if retry_failed else {"done", "failed"}
    return [unit for unit in units if not all(statuses.get(cell) in over for cell in unit.cells)]


def title(unit: Unit) -> str:
    """A unit in a few words: what differs from the usual is named."""
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


class Pace:
    """How long the rest will take. Methods differ in speed a hundredfold, so each has its own.

    Example:
        >>> pace = Pace()
        >>> pace.left([]) is None
        True
    """

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, int]] = {}

    def add(self, method: str, images: int, seconds: float) -> None:
        """A method took so long for so many images."""
        before, count = self._spent.get(method, (0.0, 0))
        self._spent[method] = (before + seconds, count + images)

    def left(self, units: Iterable[Unit]) -> float | None:
        """Seconds for these units; None as long as nothing is known."""
        known = {method: seconds / images for method, (seconds, images) in self._spent.items()}
        if not known:
            return None
        typical = sum(known.values()) / len(known)
        return sum(unit.images * known.get(unit.cells[0].method, typical) for unit in units)


class _RunReport:
    """Tells a reporter how a run goes."""

    def __init__(self, reporter: Reporter, todo: Sequence[Unit], units: int) -> None:
        self._reporter, self._todo = reporter, list(todo)
        self._number, self._units = units - len(todo), units
        self._pace = Pace()
        count = sum(len(unit.cells) for unit in todo)
        before = f"; {self._number:,} runs were finished before" if self._number else ""
        runs = "" if count == len(todo) else f" in {len(todo):,} runs"
        images = sum(unit.images for unit in todo)
        reporter.note(f"{count:,} measurements to make{runs}, {images:,} images{before}")

    def starts(self, unit: Unit) -> None:
        self._number += 1
        self._label = f"{self._number}/{self._units}  {title(unit)}"
        self._total, self._images, self._wrong = unit.images, 0, 0
        self._start = time.monotonic()
        self._reporter.advance(self._label, 0, self._total)

    def batch(self, images: int, wrong: int) -> None:
        self._images += images
        self._wrong += wrong
        if self._images < self._total:  # a unit is finished when its rows are in the file
            self._reporter.advance(self._label, self._images, self._total, self._facts())

    def ends(self, unit: Unit, rows: Sequence[Row]) -> None:
        self._todo.pop(0)
        reasons = [row.outcome.reason for row in rows if row.outcome.status == "failed"]
        if reasons:
            self._reporter.note(f"{self._label}  FAILED: {reasons[0]}")
            self._reporter.advance(self._label, self._total, self._total)
            return
        self._pace.add(unit.cells[0].method, unit.images, time.monotonic() - self._start)
        self._reporter.advance(self._label, self._total, self._total, self._facts())

    def _facts(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        error, speed = 100 * self._wrong / self._images, self._images / elapsed
        facts = [f"error {error:.1f} %", f"{speed:,.0f} images/s"]
        left = self._pace.left(self._todo)
        if left is not None and self._todo:
            facts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(facts)


def _finished(
    unit: Unit, subject: Subject, images: Images, watch: Watch, command: str
) -> tuple[list[Row], list[Observation]]:
    """Run a unit. A method that fails is a finding too, and no reason to stop."""
    forget_peak_memory()
    reason = ""
    try:
        found = measure(unit, subject, images, watch)
    except Exception as error:  # whatever a method or a network may raise
        found = [(NOTHING, None)] * len(unit.cells)
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    facts: dict[str, Any] = {
        "status": "failed" if reason else "done",
        "reason": reason,
        "peak_memory": peak_memory(),
        "versions": versions(),
        "machine": machine(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }
    rows = [
        Row(cell, Outcome(**facts, **values))
        for cell, (values, _) in zip(unit.cells, found, strict=True)
    ]
    return rows, [observation for _, observation in found if observation is not None]


def measure(
    unit: Unit, subject: Subject, images: Images, watch: Watch | None = None
) -> list[tuple[dict[str, Any], Observation | None]]:
    """Put a unit's method on the network, send the stream through it, and measure.

    Args:
        unit: What to run.
        subject: On what; its network is afterwards as it was.
        images: What `subject.source` gives for the conditions of the unit.
        watch: Told after each batch how many images it had and how many predictions were wrong.

    Returns:
        For each result its numbers, as `Outcome` names them, and what the filter did. In a mixed
        stream the updates are those of the whole stream.
    """
    cell = unit.cells[0]
    labels = subject.source.clean.labels
    found = []
    with adapted(cell, subject) as adapter:
        for segment in segments(cell.setting, labels, len(unit.cells), cell.seed):
            adapter.start_condition()
            updates, skipped = adapter.updates, adapter.skipped
            batches = TensorBatches(images, cell.batch_size, segment)
            predictions = predict_all(adapter, batches, watch=watch)
            corruption = segment // len(labels)  # of every image, by its number
            for number in sorted(set(corruption.tolist())):
                own = corruption == number
                evaluation = predictions.evaluation(torch.from_numpy(own))
                values = {name: getattr(evaluation, name) for name in EVALUATED}
                values |= {
                    "updates": adapter.updates - updates,
                    "skipped": adapter.skipped - skipped,
                    "parameters": adapter.n_parameters,
                }
                seen = observe(unit.cells[number], adapter, subject, images, segment[own])
                found.append((values, seen))
    return found


@contextmanager
def adapted(cell: Cell, subject: Subject) -> Iterator[Adapter]:
    """The network with the method of a result on it, and as it was afterwards."""
    own = {**json.loads(cell.options), **subject.provided.get(cell.method, {})}
    # `ttt` refuses a seed unless its rotations are random.
    draws = cell.method != "ttt" or own.get("rotations") == "random"
    if draws and "seed" in registration(cell.method).options:
        own["seed"] = cell.seed
    forgetting = FORGETTING[cell.setting]
    if forgetting == "episodic":
        own.pop("guard", None)  # one plan has several settings, and a guard watches streams
    adapter = adapt(
        subject.network,
        cast(MethodName, cell.method),  # which `adapt` checks
        filter=subject.filter(cell.components) if cell.components else None,
        forgetting=forgetting,
        steps=cell.steps or None,
        lr=cell.lr or None,
        **own,
    )
    try:
        yield adapter
    finally:
        adapter.detach()


def estimate_seconds(units: Sequence[Unit], subject: Subject) -> float:
    """Estimate how long the methods of these units will take; making images is not counted.

    Args:
        units: What `expand` gives.
        subject: What they are run on.

    Returns:
        Seconds. For each way to run a method one batch is timed, and stands for all.
    """
    pace: dict[Cell, float] = {}
    seconds = 0.0
    for unit in units:
        # without what hardly changes the speed
        way = replace(unit.cells[0], corruption=CLEAN, severity=0, seed=0)
        if way not in pace:
            pace[way] = _seconds_per_image(way, subject)
        seconds += unit.images * pace[way]
    return seconds


def _seconds_per_image(cell: Cell, subject: Subject) -> float:
    batch = to_tensor(subject.source.clean.images[: cell.batch_size])
    with adapted(cell, subject) as adapter:
        adapter(batch[:2])  # the first call of all allocates and loads
        start = time.perf_counter()
        adapter(batch)
        return (time.perf_counter() - start) / len(batch)
