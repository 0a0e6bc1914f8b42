"""The statistics that one pass over source data collects, for all of the data or a part of them.

Everything here is a sum, or a choice by position (`ttapca.spectral.position_sample`). So the
statistics of parts merge, in any order, into those of one pass over all parts, up to the rounding
of sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ttapca.errors import NotEnoughDataError
from ttapca.fitting.channel_statistics import ChannelSums, Subsample
from ttapca.fitting.input_range import InputSums
from ttapca.fitting.model_inputs import KeptInputs, ModelInputs
from ttapca.spectral.cosine import CoefficientMoments
from ttapca.spectral.pca import Moments
from ttapca.spectral.position_sample import PositionSample
from ttapca.support.tensors import at_least_float32

# One mean for each class and number of a sample: 1,000 classes of 224 x 224 pixels are too many.
MOST_NUMBERS = 2**25


class ClassMeans:
    """Adds up samples, each weighted by its class probabilities.

    Example:
        >>> means = ClassMeans()
        >>> means.add(torch.tensor([[1.0], [5.0]]), torch.eye(2))
        >>> [found.tolist() for found in means.found()]  # nearer to 3, the mean of all
        [[[2.0], [4.0]], [0.5, 0.5]]
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._weights: Tensor | None = None

    def add(self, samples: Tensor, shares: Tensor) -> None:
        """Add samples, shape (samples, ...), and their probabilities, (samples, classes)."""
        flat = at_least_float32(samples.detach().flatten(1))
        shape = (shares.shape[1], flat.shape[1])
        if len(shares) != len(flat) or shape[0] * shape[1] > MOST_NUMBERS:
            return
        self._add((shares.to(flat).T @ flat).cpu().double(), shares.sum(0).cpu().double())

    def merge(self, other: ClassMeans) -> None:
        """Add what others have added up."""
        if other._sums is not None and other._weights is not None:
            self._add(other._sums, other._weights)

    def _add(self, sums: Tensor, weights: Tensor) -> None:
        if self._sums is not None and self._weights is not None:
            if self._sums.shape != sums.shape:
                return
            sums, weights = self._sums + sums, self._weights + weights
        self._sums, self._weights = sums, weights

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same of."""
        if self._sums is None or self._weights is None:
            return {}
        return {"sums": self._sums, "weights": self._weights}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> ClassMeans:
        """Make class means of what `tensors` returned."""
        means = cls()
        means._sums, means._weights = tensors.get("sums"), tensors.get("weights")
        return means

    def found(self) -> tuple[Tensor, Tensor] | None:
        """Return means, shape (classes, size), and shares, (classes,); None where there are none.

        Each class has one more sample, which is the mean of all, so that a rare class is not far by
        chance.
        """
        if self._sums is None or self._weights is None:
            return None
        sums, weights = self._sums, self._weights
        total = weights.sum()
        if not (torch.isfinite(sums).all() and torch.isfinite(weights).all() and total > 0):
            return None
        mean = sums.sum(0) / total
        return (sums + mean) / (weights[:, None] + 1), weights / total


class PredictedClasses:
    """Remembers which class the network predicts for samples, by their positions.

    Example:
        >>> predicted = PredictedClasses()
        >>> predicted.add(torch.tensor([4, 7]), torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> predicted.at(torch.tensor([4, 5, 7])).tolist()  # nobody has predicted sample 5
        [0, -1, 1]
    """

    def __init__(self) -> None:
        self._rows = torch.empty(2, 0, dtype=torch.int64)  # positions and classes

    def add(self, positions: Tensor, shares: Tensor) -> None:
        """Add samples at these positions, given their class probabilities, (samples, classes)."""
        if len(positions) == len(shares):
            self._add(torch.stack([positions, shares.argmax(1).cpu()]))

    def merge(self, other: PredictedClasses) -> None:
        """Add what others remember."""
        self._add(other._rows)

    def _add(self, rows: Tensor) -> None:
        self._rows = torch.cat([self._rows, rows], 1)

    def at(self, positions: Tensor) -> Tensor:
        """Return the classes of the samples at these positions, -1 for those not predicted."""
        known, order = self._rows[0].sort()
        found = torch.full_like(positions, -1)
        if len(known):
            place = torch.searchsorted(known, positions).clamp(max=len(known) - 1)
            there = known[place] == positions
            found[there] = self._rows[1][order][place[there]]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same of."""
        return {"rows": self._rows}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PredictedClasses:
        """Make the same of what `tensors` returned."""
        predicted = cls()
        predicted._rows = tensors["rows"]
        return predicted


# With n samples a variance is known up to a factor of about 1 + sqrt(2 / n): with 32 within a
# quarter, with 3 not within a factor of two, and gains that follow from it would be noise.
FEWEST_SAMPLES = 32

MomentsKind = Literal["scatter", "cosines"]
Side = Literal["input", "output"]


@dataclass(frozen=True)
class Reading:
    """How data are read in one pass: the same for all parts, wherever they are read.

    Attributes:
        at: Which side of the layer is looked at.
        shape: Shape of a sample there.
        numbers: Numbers in a sample of the data.
        together: How many samples are run through the network at once, at most.
        block: How many samples a batch of the data usually has.
        subsample: Which images are run through the whole network.
        moments: Which moments are summed up; None if a route needs the activations themselves.
    """

    at: Side
    shape: tuple[int, ...]
    numbers: int
    together: int
    block: int
    subsample: Subsample
    moments: MomentsKind | None = None


@dataclass(eq=False)
class SourceStatistics:
    """What was collected from some of the data.

    Attributes:
        reading: How they were read.
        moments: Of the activations.
        sample: Some activations, to calibrate by.
        kept: Some data, to predict again.
        channels: Sums over channels of normalisation layers.
        class_means: Means of the activations by class.
        predicted: Class of some samples, as the network predicts it.
        inputs: Sums over what the network was given.
    """

    reading: Reading
    moments: Moments | CoefficientMoments | None
    sample: PositionSample
    kept: KeptInputs
    channels: ChannelSums = field(default_factory=ChannelSums)
    class_means: ClassMeans = field(default_factory=ClassMeans)
    predicted: PredictedClasses = field(default_factory=PredictedClasses)
    inputs: InputSums = field(default_factory=InputSums)

    @classmethod
    def empty(cls, reading: Reading, device: torch.device | str = "cpu") -> SourceStatistics:
        """Return what is collected before anything was read."""
        size = math.prod(reading.shape)
        moments: Moments | CoefficientMoments | None = None
        if reading.moments == "scatter":
            moments = Moments(size, device=device)
        elif reading.moments == "cosines":
            moments = CoefficientMoments(reading.shape, device=device)
        return cls(
            reading, moments, PositionSample(size), KeptInputs(reading.block, reading.numbers)
        )

    @property
    def samples(self) -> int:
        """How many samples were read."""
        return self.sample.seen

    @property
    def scatter(self) -> Moments:
        """The moments, where they are those of `scatter`."""
        if not isinstance(self.moments, Moments):
            raise TypeError("This pass did not sum up the scatter of the activations.")
        return self.moments

    @property
    def cosines(self) -> CoefficientMoments:
        """The moments, where they are those of `cosines`."""
        if not isinstance(self.moments, CoefficientMoments):
            raise TypeError("This pass did not sum up the coefficients of cosines.")
        return self.moments

    def merge(self, other: SourceStatistics) -> SourceStatistics:
        """Add what was collected from other data, and return self."""
        if isinstance(self.moments, Moments):
            self.moments.merge(other.scatter)
        elif isinstance(self.moments, CoefficientMoments):
            self.moments.merge(other.cosines)
        self.sample.merge(other.sample)
        self.kept.merge(other.kept)
        self.channels.merge(other.channels)
        self.class_means.merge(other.class_means)
        self.predicted.merge(other.predicted)
        self.inputs.merge(other.inputs)
        return self

    def check_samples(self) -> None:
        """Raise `NotEnoughDataError` if there are too few samples for a filter."""
        if self.samples < FEWEST_SAMPLES:
            raise NotEnoughDataError(
                f"A filter is fitted on at least {FEWEST_SAMPLES} samples: fewer do not tell how "
                "much a component varies, and gains would be random. "
                f"Found {self.samples}. Give more data."
            )

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it as tensors by name, to be sent to another process."""
        parts: dict[str, dict[str, Tensor]] = {
            "sample": self.sample.tensors(),
            "kept": self.kept.tensors(),
            "channels": self.channels.tensors(),
            "class_means": self.class_means.tensors(),
            "predicted": self.predicted.tensors(),
            "inputs": self.inputs.tensors(),
        }
        if self.moments is not None:
            parts["moments"] = self.moments.tensors()
        return {
            f"{part}/{name}": each for part, all_ in parts.items() for name, each in all_.items()
        }

    @classmethod
    def from_tensors(
        cls, reading: Reading, tensors: Mapping[str, Tensor], like: ModelInputs
    ) -> SourceStatistics:
        """Make the same of `tensors`; `like` are arguments as the model takes them."""

        def part(name: str) -> dict[str, Tensor]:
            start = f"{name}/"
            return {
                full.removeprefix(start): each
                for full, each in tensors.items()
                if full.startswith(start)
            }

        moments: Moments | CoefficientMoments | None = None
        if reading.moments == "scatter":
            moments = Moments.from_tensors(part("moments"))
        elif reading.moments == "cosines":
            moments = CoefficientMoments.from_tensors(reading.shape, part("moments"))
        kept = KeptInputs(reading.block, reading.numbers)
        kept.load_tensors(part("kept"), like)
        return cls(
            reading,
            moments,
            PositionSample.from_tensors(math.prod(reading.shape), part("sample")),
            kept,
            ChannelSums.from_tensors(part("channels")),
            ClassMeans.from_tensors(part("class_means")),
            PredictedClasses.from_tensors(part("predicted")),
            InputSums.from_tensors(part("inputs")),
        )


def merged(parts: Iterable[SourceStatistics]) -> SourceStatistics | None:
    """Merge what was collected from parts as a tree, while they arrive; None if there are none.

    Of n parts, at most log2(n) + 1 are held at a time.
    """
    waiting: list[tuple[int, SourceStatistics]] = []  # of how many parts, ever fewer, and their sum
    for part in parts:
        count, sum_ = 1, part
        while waiting and waiting[-1][0] <= count:
            more, other = waiting.pop()
            count, sum_ = count + more, other.merge(sum_)
        waiting.append((count, sum_))
        del part, sum_  # not to be held while the next one is waited for
    if not waiting:
        return None
    _, total = waiting.pop()
    while waiting:
        total = waiting.pop()[1].merge(total)
    return total
