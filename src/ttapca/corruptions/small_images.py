"""Corrupt images of any size, grey ones too: small ones are enlarged by mirroring first.

The corruptions are those of photographs: they take colour images of at least 32 by 32 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions.apply import SMALLEST_SIDE, corrupt
from ttapca.corruptions.catalogue import CIFAR_C, default_table, find
from ttapca.corruptions.pixels import CHANNELS, Pixels
from ttapca.corruptions.weather import SHRUNK_BY, textures_ship

TEXTURE_SIDE = 256  # pixels of a drawn frost texture
DRAWN_TEXTURES = 6  # as many as there are photographs


def corrupt_any_size(
    images: Pixels,
    corruption: str,
    severity: int,
    seed: int = 0,
    *,
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    textures: Path | None = None,
) -> Pixels:
    """Return corrupted images of the same shape, as `corrupt` does, also of small or grey images.

    Images that are smaller than 32 by 32, or grey, are mirrored at their edges until they are large
    enough, corrupted, and cut out again, so noise and blur are as strong, pixel for pixel, as on
    CIFAR. Frost is drawn: these images belong to no published benchmark, so photographs need not be
    downloaded for them.

    Args:
        images: Grey levels, uint8, (n, height, width, 3) or (n, height, width, 1).
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: From 0 on.
        indices: The index of each image in its data set, which its random numbers depend on; by
            default they are counted from 0.
        textures: For frost on images larger than CIFAR's: the folder of its photographs.

    Example:
        >>> digits = np.full((2, 8, 8, 1), 100, np.uint8)
        >>> corrupt_any_size(digits, "brightness", 3)[1, 0, 0].tolist()
        [138]
    """
    if not needs_photographs(images, corruption):
        textures = None
    if not _is_small(images):
        return corrupt(images, corruption, severity, seed, indices=indices, textures=textures)
    height, width, channels = images.shape[1:]
    above, left = (max(0, SMALLEST_SIDE - side + 1) // 2 for side in (height, width))
    large = np.pad(images, [(0, 0), (above, above), (left, left), (0, 0)], mode="symmetric")
    if channels == 1:
        large = np.repeat(large, CHANNELS, axis=3)
    frost = _drawn_textures()
    spoilt = corrupt(large, corruption, severity, seed, indices=indices, textures=frost)
    middle = spoilt[:, above : above + height, left : left + width]
    return np.ascontiguousarray(middle[..., 1:2] if channels == 1 else middle)


def needs_photographs(images: Pixels, corruption: str) -> bool:
    """Return whether a corruption of these images takes photographs of frost that do not ship.

    Example:
        >>> needs_photographs(np.zeros((1, 8, 8, 1), np.uint8), "frost")
        False
    """
    height, width = images.shape[1:3]
    ship = default_table(height, width) == CIFAR_C and textures_ship(height, width, SHRUNK_BY)
    return find(corruption).needs_textures and not _is_small(images) and not ship


def _is_small(images: Pixels) -> bool:
    """Return whether images are too small for the corruptions, or grey."""
    height, width, channels = images.shape[1:]
    return bool(min(height, width) < SMALLEST_SIDE or channels == 1)


@cache
def _drawn_textures() -> tuple[Pixels, ...]:
    return tuple(_drawn_frost(np.random.default_rng(number)) for number in range(DRAWN_TEXTURES))


def _drawn_frost(random: np.random.Generator) -> Pixels:
    """Draw a pale texture with the spectrum of clouds and the bright ridges of ice."""
    frequency = np.hypot(np.fft.fftfreq(TEXTURE_SIDE)[:, None], np.fft.rfftfreq(TEXTURE_SIDE)[None])
    amplitude = 1 / np.maximum(frequency, 1 / TEXTURE_SIDE) ** 1.5
    noise = np.fft.rfft2(random.standard_normal((TEXTURE_SIDE, TEXTURE_SIDE))) * amplitude
    cloud = np.fft.irfft2(noise, s=(TEXTURE_SIDE, TEXTURE_SIDE))
    ridges = np.exp(-np.abs(cloud) / cloud.std())  # 1 where the cloud changes sign
    grey: Pixels = np.rint(60 + 195 * ridges).astype(np.uint8)
    return np.repeat(grey[..., None], CHANNELS, axis=2)
