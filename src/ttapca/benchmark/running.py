"""Run units of work: skip what is finished, write down what fails, and go on with the rest."""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import torch

from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import CLEAN, Cell, Observation, Outcome, Row
from ttapca.benchmark.inspection import machine, observe, versions
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.results import Results
from ttapca.benchmark.subject import FORGETTING, Subject, segments
from ttapca.datasets import Images, TensorBatches, to_tensor
from ttapca.methods.adapt import MethodName, adapt
from ttapca.methods.method import registration
from ttapca.networks.evaluation import Watch, predict_all
from ttapca.support.machine_memory import forget_peak_memory, peak_memory
from ttapca.support.progress import Reporter, Silent

Measured = tuple[dict[str, Any], Observation | None]
LONGEST_REASON = 1000  # letters

# What an evaluation finds, and what stands there after a failure.
EVALUATED: dict[str, Any] = {
    "error": None, "calibration_error": None, "entropy": None,
    "error_stream": (), "entropy_stream": (), "seconds": 0.0,
}  # fmt: skip
NOTHING = EVALUATED | {"updates": 0, "skipped": 0, "parameters": 0}


def run(
    units: Sequence[Unit],
    subject: Subject,
    results: Results,
    *,
    reporter: Reporter | None = None,
    retry_failed: bool = False,
    command: Callable[[Unit], Sequence[str]] | None = None,
) -> None:
    """Run what is not in the file yet.

    A finished unit is written in one transaction. So a run that was killed at any moment can be
    started again, and ends with the same file as if nothing had happened.

    Args:
        units: As `expand` returns them.
        subject: What they are run on.
        results: Where finished measurements are looked up and written.
        reporter: Told how it goes. Each unit is one task, finished when its rows are in the file.
        retry_failed: Whether to run again what has failed before.
        command: Returns the words of the command that reproduces a unit, to be kept with it.

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
        progress = _Progress(reporter, todo, len(units))
        for unit in todo:
            # Missing images stop the run: that says nothing about the method.
            images = subject.source.images(unit.conditions)
            progress.start(unit)
            words = shlex.join(command(unit)) if command else ""
            rows, observations = _run_unit(unit, subject, images, progress.batch, words)
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


class _Progress:
    """Tells a reporter how a run goes."""

    def __init__(self, reporter: Reporter, todo: Sequence[Unit], units: int) -> None:
        self._reporter, self._todo = reporter, list(todo)
        self._number, self._units = units - len(todo), units
        self._spent: dict[str, float] = defaultdict(float)  # seconds by method
        self._done: dict[str, int] = defaultdict(int)  # images by method
        count = sum(len(unit.cells) for unit in todo)
        before = f"; {self._number:,} runs were finished before" if self._number else ""
        runs = "" if count == len(todo) else f" in {len(todo):,} runs"
        images = sum(unit.images for unit in todo)
        reporter.note(f"{count:,} measurements to make{runs}, {images:,} images{before}")

    def start(self, unit: Unit) -> None:
        self._number += 1
        self._label = f"{self._number}/{self._units}  {unit.title}"
        self._total, self._images, self._wrong = unit.images, 0, 0
        self._start = time.monotonic()
        self._reporter.advance(self._label, 0, self._total)

    def batch(self, images: int, wrong: int) -> None:
        self._images += images
        self._wrong += wrong
        if self._images < self._total:  # a unit is finished when its rows are in the file
            self._reporter.advance(self._label, self._images, self._total, self._facts())

    def end(self, unit: Unit, rows: Sequence[Row]) -> None:
        self._todo.pop(0)
        facts = ""
        if reason := rows[0].outcome.reason:
            self._reporter.note(f"{self._label}  FAILED: {reason}")
        else:
            method = unit.cells[0].method
            self._spent[method] += time.monotonic() - self._start
            self._done[method] += unit.images
            facts = self._facts()
        self._reporter.advance(self._label, self._total, self._total, facts)

    def _facts(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        error, speed = 100 * self._wrong / self._images, self._images / elapsed
        facts = [f"error {error:.1f} %", f"{speed:,.0f} images/s"]
        if self._spent and self._todo:
            left = seconds_left(self._todo, self._spent, self._done)
            facts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(facts)


def _run_unit(
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
) -> list[Measured]:
    """Put a unit's method on the network, send the images through it, and measure.

    Returns:
        For each cell its numbers, named as in `Outcome`, and what the filter did. Where corruptions
        take turns in one stream, the updates are those of the whole stream; and where they change
        from time to time, the filter is looked at for the last one only, which its gains are for.
    """
    cell = unit.cells[0]
    labels = subject.source.clean.labels
    outputs = json.loads(cell.options).get("outputs")
    found: list[Measured] = []
    with adapted(cell, subject) as adapter:
        for segment in segments(cell.setting, labels, len(unit.cells), cell.seed):
            adapter.start_condition()
            updates, skipped = adapter.updates, adapter.skipped
            batches = TensorBatches(images, cell.batch_size, segment)
            predictions = predict_all(adapter, batches, outputs=outputs, watch=watch)
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
                seen = None
                if cell.setting != "changing" or number == corruption[-1]:
                    seen = observe(unit.cells[number], adapter, subject, images, segment[own])
                found.append((values, seen))
    return found


@contextmanager
def adapted(cell: Cell, subject: Subject) -> Iterator[Adapter]:
    """Put a cell's method on the network, and take it off afterwards."""
    own = {**json.loads(cell.options), **subject.provided.get(cell.method, {})}
    # These two refuse a seed where they draw nothing.
    draws = {"ttt": own.get("rotations") == "random", "roid": own.get("consistency", True)}
    if draws.get(cell.method, True) and "seed" in registration(cell.method).options:
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
    """Estimate how long the methods of these units will take, without making the images."""
    images: dict[Cell, int] = defaultdict(int)
    for unit in units:  # without what hardly changes the speed
        images[replace(unit.cells[0], corruption=CLEAN, severity=0, seed=0)] += unit.images
    seconds = 0.0
    for cell, count in images.items():
        batch = to_tensor(subject.source.clean.images[: cell.batch_size])
        with adapted(cell, subject) as adapter:
            adapter(batch[:2])  # the first call allocates and loads
            start = time.perf_counter()
            adapter(batch)
            seconds += count * (time.perf_counter() - start) / len(batch)
    return seconds
