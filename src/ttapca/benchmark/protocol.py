"""One unit of work: put the method on the network, send the stream through it, measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch

from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import Cell, Observation
from ttapca.benchmark.grid import Unit
from ttapca.benchmark.inspection import observe
from ttapca.benchmark.orders import FORGETTING, segments
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images, TensorBatches
from ttapca.methods.adapt import MethodName, adapt
from ttapca.methods.method import registration
from ttapca.networks.evaluation import Evaluation, Watch, predict_all


@dataclass(frozen=True)
class Measured:
    """Of one cell.

    Attributes:
        evaluation: Error, calibration, entropy, seconds.
        updates: Gradient steps; of the whole stream where corruptions are mixed.
        skipped: Steps that were skipped; likewise.
        parameters: Numbers that gradient steps move.
        observation: What the filter did, where there is one.
    """

    evaluation: Evaluation
    updates: int
    skipped: int
    parameters: int
    observation: Observation | None


def measure(
    unit: Unit, subject: Subject, images: Images, watch: Watch | None = None
) -> list[Measured]:
    """Run a unit of work.

    Args:
        unit: What to run.
        subject: On what; its network is afterwards as it was.
        images: What `subject.source` gives for the conditions of the unit.
        watch: Told after each batch how many images it had and how many predictions were wrong.

    Returns:
        What was measured for each cell of the unit, in their order.
    """
    cell = unit.cells[0]
    labels = subject.source.clean.labels
    found: list[Measured] = []
    with adapted(cell, subject) as adapter:
        for segment in segments(cell.setting, labels, len(unit.cells), cell.seed):
            adapter.start_condition()
            updates, skipped = adapter.updates, adapter.skipped
            batches = TensorBatches(images, cell.batch_size, segment)
            predictions = predict_all(adapter, batches, watch=watch)
            corruption = segment // len(labels)  # of every image, by its number
            for number in sorted(set(corruption.tolist())):
                own = corruption == number
                found.append(
                    Measured(
                        predictions.evaluation(torch.from_numpy(own)),
                        adapter.updates - updates,
                        adapter.skipped - skipped,
                        adapter.n_parameters,
                        observe(unit.cells[number], adapter, subject, images, segment[own]),
                    )
                )
    return found


@contextmanager
def adapted(cell: Cell, subject: Subject) -> Iterator[Adapter]:
    """The network with the method of a cell on it, and as it was afterwards."""
    own = {**json.loads(cell.options), **subject.provided.get(cell.method, {})}
    if "seed" in registration(cell.method).options:
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
