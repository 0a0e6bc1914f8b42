"""One row of results: the measurement (`Cell`), its numbers (`Outcome`), the filter's gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ttapca.support.parsing import finite

Setting = Literal[
    "episodic", "episodic-sorted",
    "online", "real-time", "correlated", "dirichlet-0.1", "dirichlet-1",
    "continual", "continual-correlated", "changing", "recurring", "drifting", "gradual", "mixed",
]  # fmt: skip
SETTINGS: tuple[Setting, ...] = get_args(Setting)
EPISODIC = ("episodic", "episodic-sorted")  # settings in which nothing lasts longer than a batch
# Settings whose corruptions share one adaptation, and those among them with corruptions in turns.
JOINT = (
    "continual", "continual-correlated", "changing", "recurring", "drifting", "gradual", "mixed",
)  # fmt: skip
INTERLEAVED = ("changing", "recurring", "drifting", "gradual", "mixed")
AMONG = ", among "  # in `Cell.corrupted`, before the names of corruptions that share an adaptation
CHANGE_EVERY = 500  # images of one corruption in a row, in `changing`
ROUNDS = 20  # how often the sequence of corruptions comes, in `recurring`

Status = Literal["done", "failed", "pruned"]

CLEAN = "clean"  # takes the place of a corruption's name for images that are not corrupted


@dataclass(frozen=True, order=True)
class Cell:
    """Everything that leads to one number: two runs with equal cells measure the same thing."""

    model: str  # the network's name as the user gave it
    weights: str  # the first 16 digits of a SHA-256 over parameters and buffers
    data: str  # the data set's name, or the last part of its path
    # `generated, seed 0`, with the table of severities if it is not that of CIFAR-C; or the name of
    # a folder.
    corrupted: str
    corruption: str  # of `ttapca.corruptions.CORRUPTIONS`, or `clean`
    severity: int  # 1 to 5; 0 for clean images
    setting: Setting  # how the images arrive, and when adaptation forgets
    method: str  # of `ttapca.METHODS`
    options: str  # the method's own, as JSON with sorted names; and the plan's kind of outputs
    # Of the filter, with its name if it was given, or the route of its fit if the plan says it;
    # empty without a filter.
    layer: str
    components: int  # of the filter; 0 without one
    batch_size: int
    steps: int  # of the gradient on each batch; 0 for a method without gradients
    lr: float  # 0 for a method without gradients
    images: int  # that were predicted
    seed: int  # for the order of the images, and for a method's own random numbers


@dataclass(frozen=True)
class Outcome:
    """The numbers of a measurement, and the machine that made them."""

    status: Status  # only `done` has measured values; `pruned` is of ttapca 0.2
    reason: str  # why it failed or was left out, or how many batches were in time; mostly empty
    error: float | None  # share of wrong predictions, in percent
    calibration_error: float | None  # expected distance of confidence and accuracy, in percent
    entropy: float | None  # mean of the predictions, in nats
    error_stream: tuple[float, ...]  # of each batch
    entropy_stream: tuple[float, ...]
    updates: int  # gradient steps
    skipped: int  # batches whose update was skipped because it was not finite
    parameters: int  # how many numbers the gradient steps may change
    seconds: float  # for predicting and adapting, without reading images
    peak_memory: float  # of the process, in MB
    versions: dict[str, str]  # of ttapca, torch, numpy and Python
    machine: dict[str, str]  # processor, cores, threads and operating system
    finished: str  # ISO time in UTC
    command: str  # that measures it again; empty if there is none
    # Whether each image was predicted right: one bit for each, in the order of the test images and
    # not of the stream, as `numpy.packbits` packs them. Empty if the run failed, or an earlier
    # ttapca wrote the row.
    correct: bytes = b""


@dataclass(frozen=True)
class Row:
    """One row of a file of results: a measurement and its numbers."""

    cell: Cell
    outcome: Outcome

    def record(self) -> dict[str, Any]:
        """Return all fields by name, as JSON can hold them; `correct` in hexadecimal digits."""
        fields = vars(self.cell) | vars(self.outcome) | {"correct": self.outcome.correct.hex()}
        return {name: finite(value) for name, value in fields.items()}


@dataclass(frozen=True)
class Observation:
    """Spectra (standard deviations, largest first), gains and pictures of a filter at work."""

    cell: Cell
    source_spectrum: tuple[float, ...]
    test_spectrum: tuple[float, ...]  # of the first images of the stream
    gains: tuple[float, ...]  # after the last batch; their mean if every image has its own
    before: tuple[bytes, ...]  # up to six images of the first batch, as PNG
    after: tuple[bytes, ...]  # empty if the filter does not act on images


@dataclass(frozen=True)
class Fingerprint:
    """The content that a name in a `Cell`, such as the end of a path, stands for in a file."""

    key: str  # the name, with all else by which a `Cell` tells such things apart
    images: int  # 0 if it is no set of images
    digest: str
    kind: str  # for an error: images, corrupted images or filter
    name: str  # for an error
