"""The statistics that one pass over source data collects, for all of the data or a part of them.

Everything here is a sum, or a choice by position. So the statistics of parts merge, in any order,
into those of one pass over all parts, up to rounding in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ttapca.errors import NotEnoughDataError
from ttapca.fitting.channel_statistics import ChannelSums, Subsample
from ttapca.fitting.input_range import InputSums
from ttapca.spectral.cosine import CoefficientMoments
from ttapca.spectral.pca import Moments
from ttapca.spectral.position_sample import PositionSample
from ttapca.support.tensors import at_least_float32

if TYPE_CHECKING:
    from ttapca.fitting.activations import ModelInputs

# One mean for each class and number of a sample: 1,000 classes of 224 x 224 pixels are too many.
MOST_NUMBERS = 2**25


@dataclass(eq=False)
class ClassSums:
    """Sums of samples, each weighted by its class probabilities, and of these weights."""

    sums: Tensor | None = None  # (classes, size)
    weights: Tensor | None = None  # (classes,)

    def add(self, samples: Tensor, shares: Tensor) -> None:
        """Add samples, shape (samples, ...), and their probabilities, (samples, classes)."""
        flat = at_least_float32(samples.detach().flatten(1))
        if len(shares) == len(flat) and shares.shape[1] * flat.shape[1] <= MOST_NUMBERS:
            sums = (shares.to(flat).T @ flat).cpu().double()
            self.merge(ClassSums(sums, shares.sum(0).cpu().double()))

    def merge(self, other: ClassSums) -> None:
        """Add the sums of other samples, if they have the same shape."""
        if other.sums is None or other.weights is None:
            return
        if self.sums is None or self.weights is None:
            self.sums, self.weights = other.sums, other.weights
        elif self.sums.shape == other.sums.shape:
            self.sums, self.weights = self.sums + other.sums, self.weights + other.weights

    def means(self) -> tuple[Tensor, Tensor] | None:
        """Return means, shape (classes, size), and shares, (classes,); None if there are none."""
        # Each class has one more sample, the mean of all: a rare class is not far by chance.
        if self.sums is None or self.weights is None:
            return None
        total = self.weights.sum()
        if not (self.sums.isfinite().all() and self.weights.isfinite().all() and total > 0):
            return None
        mean = self.sums.sum(0) / total
        return (self.sums + mean) / (self.weights[:, None] + 1), self.weights / total


class PredictedClasses:
    """Remembers which class the network predicts for samples, by their positions."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def add(self, positions: Tensor, shares: Tensor) -> None:
        """Add samples at these positions, given their class probabilities, (samples, classes)."""
        if len(positions) == len(shares):
            found = zip(positions.tolist(), shares.argmax(1).tolist(), strict=True)
            self._known.update(found)

    def merge(self, other: PredictedClasses) -> None:
        """Add the predictions of other samples."""
        self._known |= other._known

    def at(self, positions: Tensor) -> Tensor:
        """Return the classes of the samples at these positions, -1 for those not predicted."""
        known = [self._known.get(each, -1) for each in positions.tolist()]
        return torch.tensor(known, dtype=torch.int64)


# Some of the data are kept, evenly distributed, to predict them again after the fit.
KEPT_PARTS = 8  # batches of which some samples are kept
KEPT_SAMPLES = 16  # of each of them, at most
KEPT_NUMBERS = 2**23  # of all of them together, at most


class KeptInputs:
    """The first samples of some blocks (usual batches) of the data, chosen by positions alone."""

    def __init__(self, block: int, numbers: int) -> None:
        self._block = block
        self._head = max(1, min(KEPT_SAMPLES, KEPT_NUMBERS // KEPT_PARTS // max(1, numbers)))
        self._every = 1
        self._kept: dict[int, ModelInputs] = {}  # by the position of the first sample

    def take(self, inputs: ModelInputs, positions: Tensor) -> None:
        """Look at a batch whose samples are at these positions, and keep some or none of them."""
        blocks, place = positions // self._block, positions % self._block
        wanted = (blocks % self._every == 0) & (place < self._head)
        for block in set(blocks[wanted].tolist()):
            chosen = wanted & (blocks == block)
            some = inputs.chosen(chosen).mapped(lambda x: x.detach().to("cpu", copy=True))
            self._kept[int(positions[chosen][0])] = some
        self._drop()

    def merge(self, other: KeptInputs) -> None:
        """Look at the batches of another one."""
        self._every = max(self._every, other._every)
        self._kept |= other._kept
        self._drop()

    def _drop(self) -> None:
        """Keep one block in `_every`, fewer if these are still too many."""
        blocks = {at: at // self._block for at in self._kept}
        while len({block for block in blocks.values() if block % self._every == 0}) > KEPT_PARTS:
            self._every *= 2
        kept = self._kept.items()
        self._kept = {at: some for at, some in kept if blocks[at] % self._every == 0}

    def all(self) -> list[ModelInputs]:
        """Return what is kept, in order of the positions."""
        return [self._kept[position] for position in sorted(self._kept)]


# With n samples a variance is known up to a factor of about 1 + sqrt(2 / n): with 32 within a
# quarter, with 3 not within a factor of two, and gains that follow from it would be noise.
FEWEST_SAMPLES = 32

MomentsKind = Literal["scatter", "cosines"]
Side = Literal["input", "output"]


@dataclass(frozen=True)
class PassConfig:
    """How data are read in one pass: the same for all parts and processes."""

    at: Side  # of the layer
    shape: tuple[int, ...]  # of a sample there
    numbers: int  # in a sample of the data
    together: int  # samples that are run through the network at once, at most
    block: int  # samples that a batch of the data usually has
    subsample: Subsample  # of images that are run through the whole network
    moments: MomentsKind | None = None  # None if a route needs the activations themselves


class SourceStatistics:
    """What was collected from some of the data; each part of it can be merged."""

    def __init__(self, config: PassConfig, device: torch.device | str = "cpu") -> None:
        size = math.prod(config.shape)
        self.config = config
        self.moments: Moments | CoefficientMoments | None = None  # of the activations
        if config.moments == "scatter":
            self.moments = Moments(size, device=device)
        elif config.moments == "cosines":
            self.moments = CoefficientMoments(config.shape, device=device)
        self.sample = PositionSample(size)  # some activations, to calibrate by
        self.kept = KeptInputs(config.block, config.numbers)  # some data, to predict again
        self.channels = ChannelSums()  # of normalisation layers
        self.class_sums = ClassSums()  # of the activations
        self.predicted = PredictedClasses()
        self.inputs = InputSums()  # of what the network was given

    @property
    def samples(self) -> int:
        """How many samples were read."""
        return self.sample.seen

    def merge(self, other: SourceStatistics) -> None:
        """Add what was collected from other data."""
        for name, part in vars(self).items():
            if name != "config" and part is not None:
                part.merge(getattr(other, name))

    def check_samples(self) -> None:
        """Raise `NotEnoughDataError` if there are too few samples for a filter."""
        if self.samples < FEWEST_SAMPLES:
            raise NotEnoughDataError(
                f"A filter is fitted on at least {FEWEST_SAMPLES} samples: fewer do not tell how "
                "much a component varies, and gains would be random. "
                f"Found {self.samples}. Give more data."
            )


def merged(parts: Iterable[SourceStatistics]) -> SourceStatistics:
    """Merge statistics of one or more parts while they arrive, so that two are held at a time."""
    arriving = iter(parts)
    total = next(arriving)
    for part in arriving:
        total.merge(part)
        del part  # not to be held while the next one is waited for
    return total
