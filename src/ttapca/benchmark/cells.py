"""One number of a table, and everything that leads to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Setting = Literal["episodic", "online", "continual", "mixed", "correlated"]
SETTINGS: tuple[Setting, ...] = get_args(Setting)

Status = Literal["done", "failed"]

CLEAN = "clean"
"""The name that stands in the place of a corruption for images as they are."""


@dataclass(frozen=True, order=True)
class Cell:
    """The full key of one row: two runs of the same cell measure the same thing.

    Attributes:
        model: The network's name as the user gave it.
        weights: The first 16 hexadecimal digits of a SHA-256 over its state dict.
        data: The data set's name, or the name of a path.
        corrupted: Where the corrupted images come from: `generated, seed 0`, or a folder's name.
        corruption: One of `ttapca.corruptions.CORRUPTIONS`, or `clean`.
        severity: 1 to 5; 0 for clean images.
        setting: What the stream is like, and when adaptation forgets.
        method: One of `ttapca.RECIPES`.
        options: The method's own options as canonical JSON.
        layer: Where the filter sits, and its name where the user brought it; empty without one.
        components: Of the filter; 0 without one.
        batch_size: Images a batch.
        steps: Gradient steps on each batch; 0 for a method without gradients.
        lr: Learning rate; 0 for a method without gradients.
        images: Images of the stream that the row is about.
        seed: Of the order of the stream, and of a method's own chance.
    """

    model: str
    weights: str
    data: str
    corrupted: str
    corruption: str
    severity: int
    setting: Setting
    method: str
    options: str
    layer: str
    components: int
    batch_size: int
    steps: int
    lr: float
    images: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What was measured, with what, on which machine.

    Attributes:
        status: `done`, or `failed`; then nothing was measured.
        reason: Of the failure; empty when done.
        error: Share of wrong predictions, in percent.
        calibration_error: Expected distance between confidence and accuracy, in percent.
        entropy: Mean of the predictions' entropy over the stream, in nats.
        error_stream: In percent, one value a batch.
        entropy_stream: One value a batch.
        updates: Gradient steps taken.
        skipped: Batches whose update was skipped because it was not finite.
        parameters: Numbers that gradient steps move.
        seconds: Spent predicting and adapting; reading is not counted.
        peak_memory: In MB: the highest resident memory of the process while the cell ran.
        versions: Of ttapca, torch, numpy and python.
        machine: Processor, cores, threads and system.
        finished: ISO time, UTC.
        command: What reproduces it.
    """

    status: Status
    reason: str
    error: float | None
    calibration_error: float | None
    entropy: float | None
    error_stream: tuple[float, ...]
    entropy_stream: tuple[float, ...]
    updates: int
    skipped: int
    parameters: int
    seconds: float
    peak_memory: float
    versions: dict[str, str]
    machine: dict[str, str]
    finished: str
    command: str


@dataclass(frozen=True)
class Row:
    """A cell and its outcome."""

    cell: Cell
    outcome: Outcome


@dataclass(frozen=True)
class Observation:
    """One look at what a filter did in one cell.

    Attributes:
        cell: Which one; its method has a filter.
        source_spectrum: Standard deviations of the components on source data, falling.
        test_spectrum: Of the same components at the start of the stream, up to 1,000 images.
        gains: After the last batch; the mean over images where every image has its own.
        before: Images of the first batch, up to six, as PNG.
        after: The same after the filter; empty where the filter does not act on images.
    """

    cell: Cell
    source_spectrum: tuple[float, ...]
    test_spectrum: tuple[float, ...]
    gains: tuple[float, ...]
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


def canonical(options: Mapping[str, object]) -> str:
    """Options as the one text that stands for them.

    Example:
        >>> canonical({"threshold": 0.5, "alpha": 1})
        '{"alpha": 1, "threshold": 0.5}'
    """
    return json.dumps(dict(options), sort_keys=True)
