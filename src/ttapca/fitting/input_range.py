"""The range of a network's inputs: measured on source data by `fit`, compared with others later.

Measured is the first argument of the network itself: behind a wrapper that normalises
(`ttapca.support.modules.core_of`), the normalised images. Images of shape (C, H, W) have numbers
for each channel, samples of other shapes one of each.

A shift of the field keeps the range of a camera: pixels stay between 0 and 1, however dark, foggy
or noisy images become. A forgotten division by 255 or a forgotten normalisation does not. Both are
affine, and the range of the source says by which numbers, so that `mistake_in` can undo each: it is
found if images are unlike the source before, and have its range, mean and deviation after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttapca.support.tensors import at_least_float32

# More channels than this are no image: their samples have one number of each.
MOST_CHANNELS = 64


@dataclass(frozen=True, eq=False)
class InputRange:
    """Range, mean and standard deviation of the inputs of a network, shape (channels,) each.

    Attributes:
        low: The lowest value.
        high: The highest one.
        mean: Over samples and places.
        deviation: Likewise.

    Example:
        >>> images = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(8, 8, 3, 2).permute(3, 2, 0, 1)
        >>> found = InputRange.of(images)
        >>> found.beyond(torch.stack([images[0], 255 * images[0]])) > 200
        tensor([False,  True])
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> InputRange | None:
        """Return those of some samples, (batch, ...); None if they are no floating-point numbers.

        Example:
            >>> InputRange.of(torch.zeros(4, 3, dtype=torch.int64)) is None
            True
        """
        sums = InputSums()
        sums.add(samples)
        return sums.found()

    @property
    def tensor(self) -> Tensor:
        """All of it, a row each, shape (4, channels); `of_tensor` is the way back."""
        return torch.stack([self.low, self.high, self.mean, self.deviation])

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> InputRange:
        """Return what was written as `tensor`."""
        return cls(*tensor)

    def in_words(self) -> str:
        """Say which numbers these are.

        Example:
            >>> InputRange.of(torch.tensor([[0.0, 1.0], [0.0, 3.0]])).in_words()
            'mean 1 and range 0 to 3'
        """
        mean, low, high = self.mean.mean(), self.low.min(), self.high.max()
        return f"mean {float(mean):.3g} and range {float(low):.3g} to {float(high):.3g}"

    def beyond(self, samples: Tensor) -> Tensor:
        """Return by how many widths of the range the values of each sample leave it at most.

        Returns:
            Shape (batch,): 0 for a sample within the range, NaN or infinity for one that holds NaN
            or infinity. Of samples with other channels than those of the source, the lowest and the
            highest value of all channels count.
        """
        values = at_least_float32(samples)
        values = values.flatten(2) if values.dim() == 4 else values.flatten(1)[:, None]
        low, high = (each.to(values) for each in (self.low, self.high))
        if values.shape[1] != len(low):
            values, low, high = values.flatten(1)[:, None], low.amin()[None], high.amax()[None]
        # That of the widest channel: another one may have been constant.
        width = (high - low).amax().clamp(min=torch.finfo(values.dtype).tiny)
        over = torch.maximum(values.amax(2) - high, low - values.amin(2)) / width
        return over.amax(1).clamp(min=0)


@dataclass(eq=False)
class InputSums:
    """Sums of which an `InputRange` is made; those of parts of the data add up.

    Attributes:
        sums: How many values, their sum and that of their squares, shape (3, channels).
        ends: The lowest and the highest value, shape (2, channels).
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, 0, dtype=torch.float64))
    ends: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))

    @torch.no_grad()
    def add(self, samples: Any) -> None:
        """Add the samples of a batch, (batch, ...); what is no tensor of such is left out."""
        if not isinstance(samples, Tensor) or not samples.is_floating_point():
            return
        if samples.dim() < 2 or not samples.numel():
            return
        values = at_least_float32(samples.detach())
        channels = values.shape[1] if values.dim() == 4 else 1
        each = values.reshape(len(values), channels if channels <= MOST_CHANNELS else 1, -1)
        var, mean = (found.double() for found in torch.var_mean(each, 2, correction=0))
        # Sums over single samples do not depend on how these are divided into batches.
        moments = each.shape[2] * torch.stack([torch.ones_like(mean), mean, var + mean.square()])
        ends = torch.stack([each.amin((0, 2)), each.amax((0, 2))]).double()
        self.merge(InputSums(moments.sum(1).cpu(), ends.cpu()))

    def merge(self, other: InputSums) -> None:
        """Add what was measured of other data."""
        if not other.sums.numel():
            return
        if not self.sums.numel():
            self.sums, self.ends = other.sums, other.ends
            return
        one, two = self, other
        if one.sums.shape != two.sums.shape:  # other channels: only all together compare
            one, two = one._together(), two._together()
        self.sums = one.sums + two.sums
        self.ends = torch.stack(
            [
                torch.minimum(one.ends[0], two.ends[0]),
                torch.maximum(one.ends[1], two.ends[1]),
            ]
        )

    def _together(self) -> InputSums:
        low, high = self.ends[0].amin(), self.ends[1].amax()
        return InputSums(self.sums.sum(1, keepdim=True), torch.stack([low, high])[:, None])

    def found(self) -> InputRange | None:
        """Return what was measured; None if that is nothing, or not finite."""
        if not self.sums.numel() or not torch.isfinite(self.sums).all():
            return None
        count, total, squares = self.sums
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        found = torch.stack([*self.ends, mean.clamp(*self.ends), deviation])
        return InputRange.of_tensor(found.float())

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same sums of."""
        return {"sums": self.sums, "ends": self.ends}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> InputSums:
        """Make sums of what `tensors` returned."""
        return cls(tensors["sums"], tensors["ends"])


PIXELS = 255  # the highest value of a pixel
LARGEST_PIXEL = 2**16 - 1
# Images, for mistakes that single ones may look like; an adapter passes some of them three times.
FEWEST = 64

# In widths of the source's range.
BELOW_ZERO = 0.02  # what is not lower is not negative: pixels may be interpolated
NEGATIVE = 0.25  # what reaches farther below zero is normalised
OUTSIDE = 0.1  # images that leave the range by less are within
LEAST_SPAN, SURE_SPAN = 0.5, 0.75  # of the range that images take up

# Means in deviations of the source, and ratios of deviations.
NEAR, ALIKE = 1.5, 2.5
SURELY_NEAR, SURELY_ALIKE = 0.75, 1.6
UNLIKE = 0.75  # a mean that is farther away is that of other units, if undoing a mistake mends it
MOVED = 0.25  # noise does not move the mean
CENTRED = 0.75  # means of images that were normalised, in their own deviations
LEAST_FACTOR = 8.0
DARK, LIGHT = 0.1, 0.7  # of the highest value of a pixel


@dataclass(frozen=True)
class Mistake:
    """Something that may have been done to images, or not.

    Attributes:
        words: What to ask the user.
        factor: Undoes it: what values are multiplied by, for each channel.
        offset: What is added then.
        possible: Whether it can have happened to such images at all.
        sure: Whether it is only believed if mean and deviation are much like those of the source:
            noise, and a dark camera, look a little like it.
        images: Of so many, or more.
    """

    words: str
    factor: Tensor
    offset: Tensor
    possible: bool
    sure: bool = False
    images: int = FEWEST


def mistake_in(seen: InputRange, source: InputRange, images: int) -> str | None:
    """Return which mistake makes images what they are, in words; None if none does.

    Args:
        seen: Of images of a stream.
        source: Of the images of the fit.
        images: How many were seen.

    Example:
        >>> pixels = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        >>> source = InputRange.of(pixels)
        >>> mistake_in(InputRange.of(255 * pixels), source, 1)
        'is a division by 255 missing?'
        >>> mistake_in(InputRange.of(pixels / 2), source, 1) is None
        True
    """
    if len(seen.low) != len(source.low) or not bool((source.deviation > 0).all()):
        return None
    if _fits(seen, source, 1.0, 0.0, UNLIKE, ALIKE, 5 * OUTSIDE, 0.0):
        return None
    for each in _mistakes(seen, source):
        if each.possible and images >= each.images:
            limits = (NEAR, ALIKE, OUTSIDE, LEAST_SPAN)
            if each.sure:
                limits = (SURELY_NEAR, SURELY_ALIKE, OUTSIDE, SURE_SPAN)
            if _fits(seen, source, each.factor, each.offset, *limits):
                return each.words
    return None


def _mistakes(seen: InputRange, source: InputRange) -> list[Mistake]:
    """Return the mistakes that are known."""
    low, width = source.low, source.high - source.low
    seen_width = (seen.high - seen.low).clamp(min=torch.finfo(low.dtype).tiny)
    ones, zeros = torch.ones_like(low), torch.zeros_like(low)
    pixels = bool((low >= -BELOW_ZERO * width).all())  # the fit had such, and no normalised ones
    seen_pixels = bool((seen.low >= -BELOW_ZERO * seen_width).all())
    times = float(seen.high.max() / source.high.max()) if pixels else 1.0
    moved = ((seen.mean - source.mean) / source.deviation).mean().abs()
    grown = bool(moved > MOVED) and bool((seen.deviation > source.deviation).all())
    around_zero = bool((seen.mean / seen.deviation).mean().abs() < CENTRED)
    around_zero &= bool((seen.low < -NEGATIVE * width).all())
    # Of some dozens of images, one has something dark, unless there is fog.
    dark = float(seen.low.min()) < DARK
    larger = "a division by 255" if PIXELS / 2 < times < 1.2 * PIXELS else "a division"
    return [
        Mistake(
            f"is {larger} missing?",
            ones / times,
            zeros,
            pixels and seen_pixels and LEAST_FACTOR < times < 2 * LARGEST_PIXEL,
            images=1,
        ),
        Mistake(
            "are the division by 255 and the normalisation missing?",
            width / PIXELS,
            low,
            not pixels and seen_pixels and float(seen.high.max()) > LIGHT * PIXELS,
            images=1,
        ),
        Mistake("is the normalisation missing?", width, low, not pixels and seen_pixels and dark),
        Mistake(
            "was it divided by 255 once too often?",
            ones * PIXELS,
            zeros,
            pixels and seen_pixels,
            sure=True,
        ),
        Mistake(
            "was it normalised, as the images of the fit were not?",
            width / seen_width,
            low - seen.low * width / seen_width,
            pixels and grown and around_zero,
            sure=True,
        ),
        Mistake(
            "was it normalised twice?",
            1 / width,
            -low / width,
            not pixels and grown,
            sure=True,
        ),
    ]


def _fits(
    seen: InputRange,
    source: InputRange,
    factor: Tensor | float,
    offset: Tensor | float,
    near: float,
    alike: float,
    outside: float,
    span: float,
) -> bool:
    """Return whether images, multiplied and moved, are like those of the source."""
    width = source.high - source.low
    low, high, mean = (each * factor + offset for each in (seen.low, seen.high, seen.mean))
    leaves = torch.maximum(source.low - low, high - source.high) / width
    away = ((mean - source.mean) / source.deviation).mean().abs()
    ratio = (seen.deviation * factor / source.deviation).log().mean().abs().exp()
    filled = ((high - low) / width).mean()
    return bool(leaves.max() <= outside and away <= near and ratio <= alike and filled >= span)
