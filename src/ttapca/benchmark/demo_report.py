"""The output of `ttapca demo`: three tables, one line to remember, and repaired images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn

from ttapca.benchmark.comparisons import SOURCE, Measurements, frame
from ttapca.benchmark.measurement import adapted, as_png, undo_normalisation
from ttapca.benchmark.plan import RECOMMENDED
from ttapca.benchmark.rows import CLEAN, Cell
from ttapca.benchmark.streams import segments
from ttapca.benchmark.subject import Subject
from ttapca.benchmark.tables import ResultTable, Value, error_tables, full_name, number_value
from ttapca.corruptions.catalogue import find
from ttapca.datasets import to_tensor
from ttapca.support.modules import find_layer
from ttapca.support.wrapping import temporary_patches

IN_BATCHES, ONE_BY_ONE = "episodic", "correlated"  # settings
STREAMS = {IN_BATCHES: "in batches", ONE_BY_ONE: "one by one"}
MOST_REPAIRED = 2  # images of a corruption


def demo_tables(rows: Measurements) -> list[ResultTable]:
    """Return a table for corrupted images in batches, one for single images, one for clean ones."""
    every = frame(rows)
    means = mean_errors(every).xs(True, level="clean").reindex(list(STREAMS))
    lines = []
    for setting, errors in means.iterrows():
        lowest = errors.min()
        values = (number_value(error, ".1f", best=error == lowest) for error in errors.tolist())
        lines.append((Value(STREAMS[str(setting)]), *values))
    first = every.iloc[0]
    title = f"{first.model} on {first.data}, clean images, {first.images:,} images"
    clean = ResultTable(title, ("", *means.columns), tuple(lines))
    return [*error_tables(every[every.corruption != CLEAN]), clean]


def mean_errors(rows: Measurements) -> DataFrame:
    """Return the mean error of each method in percent; the index is `(setting, is clean)`."""
    every = frame(rows)
    clean = (every.corruption == CLEAN).rename("clean")
    means = every.groupby(["setting", clean, "method"]).error.mean().unstack("method")
    return means[every.method.unique()].sort_index(ascending=[False, True])


def line_to_remember(rows: Measurements) -> str:
    """Return the finding of the demo in one sentence."""
    means = mean_errors(rows).round(1)
    clean, batches = means.loc[IN_BATCHES, True], means.loc[IN_BATCHES, False]
    single = means.loc[ONE_BY_ONE, False]
    every = frame(rows)
    names = every.corruption[(every.setting == ONE_BY_ONE) & (every.corruption != CLEAN)].unique()
    under = ", ".join(map(full_name, names))
    return (
        f"To remember: corruption takes the error of the untouched network from {clean[SOURCE]} % "
        f"to {batches[SOURCE]} %; with {RECOMMENDED} it is {batches[RECOMMENDED]} % (bn "
        f"{batches['bn']} %). One photograph at a time, sorted by class ({under}), it is "
        f"{single[RECOMMENDED]} % instead of {single[SOURCE]} % (bn {single['bn']} %). No label, "
        "no gradient, no weight touched."
    )


@dataclass(frozen=True)
class RepairedImage:
    """An image turned from wrong to right: PNGs as it came, and as the filter hands it on."""

    corruption: str
    method: str
    wrong: str
    right: str
    before: bytes
    after: bytes


def repaired_images(cells: Iterable[Cell], subject: Subject) -> list[RepairedImage]:
    """Return images that a method repairs, of the first corruption of each family."""
    chosen: dict[str, Cell] = {}
    for cell in cells:
        if cell.corruption != CLEAN:
            chosen.setdefault(find(cell.corruption).family, cell)
    return [each for cell in chosen.values() for each in _first_repaired(cell, subject)]


def _first_repaired(cell: Cell, subject: Subject) -> list[RepairedImage]:
    images = subject.source.images([(cell.corruption, cell.severity)])
    order = segments(cell.setting, images.labels, 1, cell.seed)[0]
    first = images.subset(order[: cell.batch_size])
    labels, pixels = torch.from_numpy(first.labels), to_tensor(first.images)
    layer = find_layer(subject.network, cell.layer.partition(", ")[0])
    inputs: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Any, ...], _named: dict[str, Any]) -> None:
        inputs[:] = [given[0].detach().clone()]  # after the filter, whose hook came first

    with adapted(cell, subject) as adapter, torch.no_grad(), temporary_patches() as patches:
        patches.hook_input(layer, keep)
        with adapter.disabled():
            plain = adapter(pixels).argmax(1)
        undone = undo_normalisation(subject, pixels, inputs[0])
        found = adapter(pixels).argmax(1)
    if undone is None:
        return []
    repaired = ((plain != labels) & (found == labels)).nonzero().flatten().tolist()
    names, filtered = first.class_names, undone(inputs[0])
    return [
        RepairedImage(
            cell.corruption,
            cell.method,
            names[int(plain[row])],
            names[int(labels[row])],
            as_png(first.images[row]),
            as_png(filtered[row]),
        )
        for row in repaired[:MOST_REPAIRED]
    ]
