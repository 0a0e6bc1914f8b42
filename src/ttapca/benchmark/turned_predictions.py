"""Images whose prediction turns from wrong to right, before and after the filter.

They are chosen by one rule: of the first corruption of each family, the first images of the stream
that the untouched network gets wrong and the method gets right, within the first batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.benchmark.cells import CLEAN, Cell
from ttapca.benchmark.inspection import as_png, undo_normalisation
from ttapca.benchmark.measurement import adapted
from ttapca.benchmark.subject import Subject, segments
from ttapca.corruptions.catalogue import find
from ttapca.datasets import to_tensor
from ttapca.support.modules import find_layer
from ttapca.support.wrapping import temporary_patches

SHOWN = 2  # images of a corruption


@dataclass(frozen=True)
class TurnedPrediction:
    """One image that a method turned.

    Attributes:
        corruption: What was done to the image.
        method: What turned its prediction.
        wrong: The class that the untouched network sees.
        right: The class that the method sees, which is the true one.
        before: The image as it came, as PNG.
        after: The same image as the filter hands it to the rest of the network.
    """

    corruption: str
    method: str
    wrong: str
    right: str
    before: bytes
    after: bytes


def turned_predictions(cells: Iterable[Cell], subject: Subject) -> list[TurnedPrediction]:
    """Find images by the rule of this module.

    Args:
        cells: Measurements of one corruption each, by a method with a filter that acts on images.
        subject: What they were measured on.
    """
    chosen: dict[str, Cell] = {}
    for cell in cells:
        if cell.corruption != CLEAN:
            chosen.setdefault(find(cell.corruption).family, cell)
    return [each for cell in chosen.values() for each in _first_turned(cell, subject)]


def _first_turned(cell: Cell, subject: Subject) -> list[TurnedPrediction]:
    images = subject.source.images([(cell.corruption, cell.severity)])
    order = segments(cell.setting, images.labels, 1, cell.seed)[0]
    first = images.subset(order[: cell.batch_size])
    labels, pixels = torch.from_numpy(first.labels), to_tensor(first.images)
    layer = find_layer(subject.network, cell.layer.partition(", ")[0])
    with adapted(cell, subject) as adapter, torch.no_grad(), _last_input(layer) as seen:
        with adapter.disabled():
            plain = adapter(pixels).argmax(1)
        undone = undo_normalisation(subject, pixels, seen[0])
        found = adapter(pixels).argmax(1)
    turned = ((plain != labels) & (found == labels)).nonzero().flatten().tolist()
    if undone is None:
        return []
    names, filtered = first.class_names, undone(seen[0])
    return [
        TurnedPrediction(
            cell.corruption,
            cell.method,
            names[int(plain[row])],
            names[int(labels[row])],
            as_png(first.images[row]),
            as_png(filtered[row]),
        )
        for row in turned[:SHOWN]
    ]


@contextmanager
def _last_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Give what a layer was called with last: after the filter, whose hook came first."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], _named: dict[str, Any]) -> None:
        seen[:] = [given[0].detach().clone()]

    with temporary_patches() as patches:
        patches.hook_input(layer, keep)
        yield seen
