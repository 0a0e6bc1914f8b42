"""One result of a comparison, and everything that leads to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Setting = Literal["episodic", "online", "continual", "mixed", "correlated"]
SETTINGS: tuple[Setting, ...] = get_args(Setting)

Status = Literal["done", "failed"]

CLEAN = "clean"
"""Stands in the place of a corruption for images that are not corrupted."""


@dataclass(frozen=True, order=True)
class Cell:
    """The full key of one result: two runs with the same key measure the same thing.

    Attributes:
        model: The network's name as the user gave it.
        weights: The first 16 hexadecimal digits of a SHA-256 over its state dict.
        data: The data set's name, or the name of a path.
        corrupted: Where the corrupted images come from: `generated, seed 0`, or a folder's name.
        corruption: One of `ttapca.corruptions.CORRUPTIONS`, or `clean`.
        severity: 1 to 5; 0 for clean images.
        setting: What the stream is like, and when adaptation forgets.
        method: One of `ttapca.METHODS`.
        options: The method's own options as canonical JSON.
        layer: Where the filter sits, and its name where the user brought it; empty without one.
        components: Of the filter; 0 without one.
        batch_size: How many images make a batch.
        steps: Gradient steps on each batch; 0 for a method without gradients.
        lr: Learning rate; 0 for a method without gradients.
        images: How many images the result is about.
        seed: Of the order of the images, and of a method's own random numbers.
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
        entropy: Mean entropy of the predictions, in nats.
        error_stream: The error of each batch, in percent.
        entropy_stream: The mean entropy of each batch.
        updates: Gradient steps taken.
        skipped: Batches whose update was skipped because it was not finite.
        parameters: How many numbers gradient steps may change.
        seconds: Time spent predicting and adapting, without reading images.
        peak_memory: The most memory that the process held meanwhile, in MB.
        versions: Of ttapca, torch, numpy and python.
        machine: Processor, cores, threads and system.
        finished: ISO time, UTC.
        command: What measures it again; empty where no command can.
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
    """One row of a file of results: what was run, and what came of it."""

    cell: Cell
    outcome: Outcome


@dataclass(frozen=True)
class Observation:
    """What a filter did while one result was measured.

    Attributes:
        cell: The key of that result; its method has a filter.
        source_spectrum: Standard deviations of the components on source data, largest first.
        test_spectrum: Those of the same components on the first images of the stream.
        gains: After the last batch; their mean where every image has its own.
        before: Up to six images of the first batch, as PNG.
        after: The same images after the filter; empty where it does not act on images.
    """

    cell: Cell
    source_spectrum: tuple[float, ...]
    test_spectrum: tuple[float, ...]
    gains: tuple[float, ...]
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


def canonical(options: Mapping[str, object]) -> str:
    """Options as one text, the same whatever their order.

    Example:
        >>> canonical({"threshold": 0.5, "alpha": 1})
        '{"alpha": 1, "threshold": 0.5}'
    """
    return json.dumps(dict(options), sort_keys=True)
