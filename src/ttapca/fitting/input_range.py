"""The range of a network's inputs: measured on source data by `fit`, compared with others later.

Measured is the first argument of the network itself, behind a wrapper that normalises. A shift of
the field keeps the range of a camera: pixels stay between 0 and 1, however dark, foggy or noisy
images become. A forgotten division by 255 or normalisation does not. Both are affine, and the range
of the source says by which numbers, so that `mistake_in` can undo each: it is found if images are
unlike the source before, and have its range, mean and deviation after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttapca.support.tensors import at_least_float32

# More channels than this are no image: their samples have one number of each.
MOST_CHANNELS = 64


class InputRange(NamedTuple):
    """Range, mean and deviation of a network's inputs, (channels,); (1,) if these are no images."""

    low: Tensor
    high: Tensor
    mean: Tensor
    deviation: Tensor

    def scaled(self, factor: Tensor | float, offset: Tensor | float) -> InputRange:
        """Return that of samples which are multiplied and then moved."""
        low, high, mean = (each * factor + offset for each in (self.low, self.high, self.mean))
        return InputRange(low, high, mean, self.deviation * factor)

    def in_words(self) -> str:
        """Say which numbers these are."""
        mean, low, high = self.mean.mean(), self.low.min(), self.high.max()
        return f"mean {float(mean):.3g} and range {float(low):.3g} to {float(high):.3g}"

    def beyond(self, samples: Tensor) -> Tensor:
        """Return by how many widths of the range each sample leaves it, shape (batch,)."""
        values = at_least_float32(samples)
        values = values.flatten(2) if values.dim() == 4 else values.flatten(1)[:, None]
        low, high = (each.to(values) for each in (self.low, self.high))
        if values.shape[1] != len(low):
            values, low, high = values.flatten(1)[:, None], low.amin()[None], high.amax()[None]
        # That of the widest channel: another one may have been constant.
        width = (high - low).amax().clamp(min=torch.finfo(values.dtype).tiny)
        over = torch.maximum(values.amax(2) - high, low - values.amin(2)) / width
        return over.amax(1).clamp(min=0)


def extremes_of(images: Sequence[Tensor]) -> Tensor | None:
    """Return the lowest and highest value of each channel of images, (images, channels, 1, 2)."""
    # `InputRange.beyond` says the same of them. None for samples that are no images of one kind.
    if {(each.dim(), each.shape[:1]) for each in images} != {(3, images[0].shape[:1])}:
        return None
    ends = [torch.stack(each.flatten(1).aminmax(dim=1), 1) for each in images if each.numel()]
    return torch.stack(ends)[:, :, None] if len(ends) == len(images) else None


@dataclass(eq=False)
class InputSums:
    """Sums of which an `InputRange` is made; those of parts of the data add up."""

    # How many values, their sum and that of their squares, shape (3, channels).
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, 0, dtype=torch.float64))
    # The lowest and the highest value, shape (2, channels).
    ends: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))

    @torch.no_grad()
    def add(self, samples: Any) -> None:
        """Add a batch, (batch, ...), or a list of samples, if they are floating-point numbers."""
        if isinstance(samples, (list, tuple)):
            for each in samples:
                self.add(each[None])
            return
        known = isinstance(samples, Tensor) and samples.is_floating_point()
        if not known or samples.dim() < 2 or not samples.numel():
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
        """Add what was measured of other data, if they have the same channels."""
        if not self.sums.numel():
            self.sums, self.ends = other.sums, other.ends
        elif self.sums.shape == other.sums.shape:
            self.sums = self.sums + other.sums
            low, high = torch.minimum(self.ends, other.ends), torch.maximum(self.ends, other.ends)
            self.ends = torch.stack([low[0], high[1]])

    def found(self) -> InputRange | None:
        """Return what was measured; None if that is nothing, or not finite."""
        if not self.sums.numel() or not torch.isfinite(self.sums).all():
            return None
        count, total, squares = self.sums
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        found = torch.stack([*self.ends, mean.clamp(*self.ends), deviation])
        return InputRange(*found.float())


PIXELS = 255  # the highest value of a pixel
LARGEST_PIXEL = 2**16 - 1
# Images, for mistakes that single ones may look like; an adapter passes some of them three times.
FEWEST = 64

# In widths of the source's range.
BELOW_ZERO = 0.02  # what is not lower is not negative: pixels may be interpolated
NEGATIVE = 0.25  # what reaches farther below zero is normalised


class Tolerance(NamedTuple):
    """By how much images may differ from those of the source."""

    mean: float  # in deviations of the source
    deviation: float  # as a ratio
    outside: float  # in widths of the source's range
    span: float  # share of that range that images take up, at least


SAME = Tolerance(0.75, 2.5, 0.5, 0.0)  # beyond are other units, if undoing a mistake mends it
UNDONE = Tolerance(1.5, 2.5, 0.1, 0.5)
# For mistakes that noise, or a dark camera, looks a little like.
SURELY_UNDONE = Tolerance(0.75, 1.6, 0.1, 0.75)
MOVED = 0.25  # noise does not move the mean by this many deviations
CENTRED = 0.75  # means of images that were normalised, in their own deviations
LEAST_FACTOR = 8.0
DARK, LIGHT = 0.1, 0.7  # of the highest value of a pixel


class Mistake(NamedTuple):
    """A mistake in words, and how to undo it by channel; `images` are seen at least."""

    words: str
    factor: Tensor
    offset: Tensor
    possible: bool
    tolerance: Tolerance = UNDONE
    images: int = FEWEST


def mistake_in(seen: InputRange, source: InputRange, images: int) -> str | None:
    """Say which mistake explains the range of `images` of a stream; None if none does."""
    if len(seen.low) != len(source.low) or not bool((source.deviation > 0).all()):
        return None
    if _fits(seen, source, SAME):
        return None
    for each in _mistakes(seen, source):
        undone = seen.scaled(each.factor, each.offset)
        possible = each.possible and images >= each.images
        if possible and _fits(undone, source, each.tolerance):
            return each.words
    return None


def _mistakes(seen: InputRange, source: InputRange) -> list[Mistake]:
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
            SURELY_UNDONE,
        ),
        Mistake(
            "was it normalised, as the samples of the fit were not?",
            width / seen_width,
            low - seen.low * width / seen_width,
            pixels and grown and around_zero,
            SURELY_UNDONE,
        ),
        Mistake(
            "was it normalised twice?", 1 / width, -low / width, not pixels and grown, SURELY_UNDONE
        ),
    ]


def _fits(seen: InputRange, source: InputRange, tolerance: Tolerance) -> bool:
    width = source.high - source.low
    leaves = torch.maximum(source.low - seen.low, seen.high - source.high) / width
    away = ((seen.mean - source.mean) / source.deviation).mean().abs()
    ratio = (seen.deviation / source.deviation).log().mean().abs().exp()
    span = ((seen.high - seen.low) / width).mean()
    alike = away <= tolerance.mean and ratio <= tolerance.deviation
    return bool(leaves.max() <= tolerance.outside and alike and span >= tolerance.span)
