"""What one pass over source data collects, for all of the data or a part of them.

Everything here is a sum, or a choice by position (`ttapca.spectral.even_sample`). So what was
collected from parts merges, in any order, into what one pass over all of them collects, up to the
rounding of sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ttapca.errors import NotEnoughDataError
from ttapca.fitting.channel_sums import ChannelSums
from ttapca.fitting.class_means import ClassMeans
from ttapca.fitting.input_range import InputSums
from ttapca.fitting.measuring_rule import MeasuringRule
from ttapca.fitting.model_inputs import KeptInputs, ModelInputs
from ttapca.spectral.cosine import CoefficientMoments
from ttapca.spectral.even_sample import EvenSample
from ttapca.spectral.moments import Moments

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
        rule: Which images are run through the whole network.
        moments: Which moments are summed up; None if a route needs the activations themselves.
    """

    at: Side
    shape: tuple[int, ...]
    numbers: int
    together: int
    block: int
    rule: MeasuringRule
    moments: MomentsKind | None = None


@dataclass(eq=False)
class Collected:
    """What was collected from some of the data.

    Attributes:
        reading: How they were read.
        moments: Of the activations.
        sample: Some activations, to calibrate by.
        kept: Some data, to predict again.
        channels: Sums over channels of normalisation layers.
        class_means: Means of the activations by class.
        inputs: Sums over what the network was given.
    """

    reading: Reading
    moments: Moments | CoefficientMoments | None
    sample: EvenSample
    kept: KeptInputs
    channels: ChannelSums = field(default_factory=ChannelSums)
    class_means: ClassMeans = field(default_factory=ClassMeans)
    inputs: InputSums = field(default_factory=InputSums)

    @classmethod
    def nothing(cls, reading: Reading, device: torch.device | str = "cpu") -> Collected:
        """Return what is collected before anything was read."""
        size = math.prod(reading.shape)
        moments: Moments | CoefficientMoments | None = None
        if reading.moments == "scatter":
            moments = Moments(size, device=device)
        elif reading.moments == "cosines":
            moments = CoefficientMoments(reading.shape, device=device)
        return cls(reading, moments, EvenSample(size), KeptInputs(reading.block, reading.numbers))

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

    def merge(self, other: Collected) -> Collected:
        """Add what was collected from other data, and return self."""
        if isinstance(self.moments, Moments):
            self.moments.merge(other.scatter)
        elif isinstance(self.moments, CoefficientMoments):
            self.moments.merge(other.cosines)
        self.sample.merge(other.sample)
        self.kept.merge(other.kept)
        self.channels.merge(other.channels)
        self.class_means.merge(other.class_means)
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
    ) -> Collected:
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
            EvenSample.from_tensors(math.prod(reading.shape), part("sample")),
            kept,
            ChannelSums.from_tensors(part("channels")),
            ClassMeans.from_tensors(part("class_means")),
            InputSums.from_tensors(part("inputs")),
        )


def merged(parts: Iterable[Collected]) -> Collected | None:
    """Merge what was collected from parts as a tree, while they arrive; None if there are none.

    Of n parts, at most log2(n) + 1 are held at a time.
    """
    waiting: list[tuple[int, Collected]] = []  # of how many parts, ever fewer, and their sum
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
