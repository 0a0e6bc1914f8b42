"""One row of results: the measurement (`Cell`), its numbers (`Outcome`), the filter's gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ttapca.support.parsing import finite

Setting = Literal[
    "episodic", "episodic-sorted",
    "online", "correlated", "dirichlet-0.1", "dirichlet-1",
    "continual", "changing", "mixed",
]  # fmt: skip
SETTINGS: tuple[Setting, ...] = get_args(Setting)
EPISODIC = ("episodic", "episodic-sorted")  # settings in which nothing lasts longer than a batch
JOINT = ("continual", "changing", "mixed")  # settings whose corruptions share one adaptation
INTERLEAVED = ("changing", "mixed")  # of these, where a corruption comes again and again
AMONG = ", among "  # in `Cell.corrupted`, before the names of corruptions that share an adaptation
CHANGE_EVERY = 500  # images of one corruption in a row, in `changing`

Status = Literal["done", "failed", "pruned"]

CLEAN = "clean"  # takes the place of a corruption's name for images that are not corrupted


@dataclass(frozen=True, order=True)
class Cell:
    """Everything that leads to one number: two runs with equal cells measure the same thing.

    Attributes:
        model: The network's name as the user gave it.
        weights: The first 16 hexadecimal digits of a SHA-256 over parameters and buffers.
        data: The data set's name, or the last part of its path.
        corrupted: Where the corrupted images come from: `generated, seed 0`, with the table of
            severities if it is not that of CIFAR-C; or a folder's name.
        corruption: One of `ttapca.corruptions.CORRUPTIONS`, or `clean`.
        severity: 1 to 5; 0 for clean images.
        setting: How the images arrive, and when adaptation forgets.
        method: One of `ttapca.METHODS`.
        options: The method's own options as JSON with sorted names, and the kind of the network's
            outputs if the plan says it.
        layer: Where the filter sits, and its name if it was given, or the route of its fit if the
            plan says it; empty without a filter.
        components: How many the filter has; 0 without a filter.
        batch_size: Images per batch.
        steps: Gradient steps on each batch; 0 for a method without gradients.
        lr: Learning rate; 0 for a method without gradients.
        images: How many images were predicted.
        seed: For the order of the images, and for a method's own random numbers.
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
    """The numbers of a measurement, and the machine that made them.

    Attributes:
        status: `done`, `failed`, or `pruned`: `ttapca tune` left it out, because the options did
            badly before. Only `done` has measured values.
        reason: Why it failed or was left out; empty when done.
        error: Share of wrong predictions, in percent.
        calibration_error: Expected distance between confidence and accuracy, in percent.
        entropy: Mean entropy of the predictions, in nats.
        error_stream: The error of each batch, in percent.
        entropy_stream: The mean entropy of each batch.
        updates: Gradient steps taken.
        skipped: Batches whose update was skipped because it was not finite.
        parameters: How many numbers the gradient steps may change.
        seconds: Time spent predicting and adapting, without reading images.
        peak_memory: The most memory that the process held meanwhile, in MB.
        versions: Of ttapca, torch, numpy and Python.
        machine: Processor, cores, threads and operating system.
        finished: When, as ISO time in UTC.
        command: The command that measures it again; empty if there is none.
        correct: Whether each image was predicted right: one bit for each image, in the order of the
            test images and not of the stream, as `numpy.packbits` packs them. Empty if the run
            failed, or an earlier ttapca wrote the row.
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
    """Spectrum, gains and pictures of a filter during one measurement.

    Spectra are standard deviations of the components, largest first.
    """

    cell: Cell
    source_spectrum: tuple[float, ...]
    test_spectrum: tuple[float, ...]  # of the first images of the stream
    gains: tuple[float, ...]  # after the last batch; their mean if every image has its own
    before: tuple[bytes, ...]  # up to six images of the first batch, as PNG
    after: tuple[bytes, ...]  # empty if the filter does not act on images


@dataclass(frozen=True)
class ClassLabels:
    """The true classes of the test images of a data set, in the order of `Outcome.correct`."""

    data: str  # as `Cell.data`
    names: tuple[str, ...]
    numbers: tuple[int, ...]  # of each image: the place of its class in `names`


@dataclass(frozen=True)
class Fingerprint:
    """The content that a name in a `Cell` stands for, in one file of results.

    A `Cell` has the last part of a path. A folder may get other content, or another one may have
    the same name; its numbers would be taken for the measured ones.
    """

    key: str  # the name, with all else by which a `Cell` tells such things apart
    images: int  # 0 if it is no set of images
    digest: str
    # Words for an error: images or filter, the measurements in the file, the thing to rename.
    kind: str
    others: str
    renamed: str
