"""In which units images are: whether they look as if a normalisation were missing or doubled.

A shift of the field keeps the range of a camera: pixels stay between 0 and 1, however dark, foggy
or noisy images become. A forgotten division by 255 or a forgotten normalisation does not. Both are
affine, and the range of the source says by which numbers: if pixels from 0 to 1 become `low` to
`high`, they were multiplied by `high - low`, and `low` was added. So each mistake is undone, and it
is found if images are nothing like the source before, and have its range, mean and deviation after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.fitting.input_range import InputRange

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
