"""One unit of work: put its method on the network, send the images through it, and measure."""

from __future__ import annotations

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import CLEAN, Cell, Observation, Outcome, Row, Status
from ttapca.benchmark.inspection import machine, observe, versions
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.subject import FORGETTING, Subject, segments
from ttapca.datasets import Images, TensorBatches, to_tensor
from ttapca.errors import BasisWarning
from ttapca.methods import MethodName
from ttapca.methods.adapt import adapt
from ttapca.methods.method import registration
from ttapca.networks.evaluation import Watch, predict_all
from ttapca.support.process import forget_peak_memory, peak_memory

Measured = tuple[dict[str, Any], Observation | None]
Written = tuple[list[Row], list[Observation]]
LONGEST_REASON = 1000  # letters

# What an evaluation finds, and what stands there after a failure.
EVALUATED: dict[str, Any] = {
    "error": None, "calibration_error": None, "entropy": None,
    "error_stream": (), "entropy_stream": (), "seconds": 0.0,
}  # fmt: skip
NOTHING = EVALUATED | {"updates": 0, "skipped": 0, "parameters": 0}


def run_unit(
    unit: Unit, subject: Subject, images: Images, command: str, watch: Watch | None = None
) -> Written:
    """Run a unit, and return what is written of it.

    A method that fails is a finding too, and no reason to stop.
    """
    forget_peak_memory()
    try:
        found = measure(unit, subject, images, watch)
    except Exception as error:  # whatever a method or a network may raise
        return failure(unit, _in_words(error), command)
    rows = _rows(unit, [values for values, _ in found], "done", "", command)
    return rows, [observation for _, observation in found if observation is not None]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def failure(unit: Unit, reason: str, command: str) -> Written:
    """Return what is written of a unit that failed."""
    return not_measured(unit, "failed", reason, command), []


def not_measured(unit: Unit, status: Status, reason: str, command: str) -> list[Row]:
    """Return the rows of a unit without measured values."""
    return _rows(unit, [NOTHING] * len(unit.cells), status, reason[:LONGEST_REASON], command)


def _rows(
    unit: Unit, found: Sequence[dict[str, Any]], status: Status, reason: str, command: str
) -> list[Row]:
    facts: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "peak_memory": peak_memory(),
        "versions": versions(),
        "machine": machine(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }
    return [
        Row(cell, Outcome(**facts, **values))
        for cell, values in zip(unit.cells, found, strict=True)
    ]


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
                    "correct": _packed(predictions.correct.numpy()[own], segment[own], len(labels)),
                    "updates": adapter.updates - updates,
                    "skipped": adapter.skipped - skipped,
                    "parameters": adapter.n_parameters,
                }
                seen = None
                if cell.setting != "changing" or number == corruption[-1]:
                    seen = observe(unit.cells[number], adapter, subject, images, segment[own])
                found.append((values, seen))
    return found


def _packed(correct: NDArray[np.bool_], numbers: NDArray[np.int64], images: int) -> bytes:
    """Return which images were predicted right, in the order of the images, as packed bits.

    Args:
        correct: In the order of the stream, shape (images,).
        numbers: The images in that order; those of another corruption are `images` further on.
        images: How many there are of each corruption.
    """
    in_order = np.zeros(images, dtype=bool)
    in_order[numbers % images] = correct
    return np.packbits(in_order).tobytes()


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BasisWarning)  # said once, before the run
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


def estimate_seconds(units: Sequence[Unit], subject: Subject) -> tuple[float, dict[str, str]]:
    """Estimate how long the methods of these units will take, without making the images.

    Returns:
        The seconds of those that run; and for each method that fails, why.
    """
    images: dict[Cell, int] = defaultdict(int)
    for unit in units:  # without what hardly changes the speed
        images[replace(unit.cells[0], corruption=CLEAN, severity=0, seed=0)] += unit.images
    seconds, failures = 0.0, dict[str, str]()
    for cell, count in images.items():
        try:
            seconds += count * _seconds_an_image(cell, subject)
        except Exception as error:  # whatever it raises, the run finds it again and goes on
            failures[cell.method] = _in_words(error)
    return seconds, failures


def _seconds_an_image(cell: Cell, subject: Subject) -> float:
    batch = to_tensor(subject.source.clean.images[: cell.batch_size])
    with adapted(cell, subject) as adapter:
        adapter(batch[:2])  # the first call allocates and loads
        start = time.perf_counter()
        adapter(batch)
        return (time.perf_counter() - start) / len(batch)
