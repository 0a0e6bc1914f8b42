"""Noise: every value changes independently.

Each corruption takes images, their random numbers from (0, 1) and its parameters by name.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from ttapca.corruptions.pixels import (
    WHITE,
    Numbers,
    Pixels,
    normals,
    to_pixels,
    unit,
)


def gaussian_noise(images: Pixels, numbers: Numbers, *, deviation: float) -> Pixels:
    """Add normal noise."""
    noise = normals(numbers, 0.0, deviation).reshape(images.shape)
    noise += unit(images)
    return to_pixels(noise)


def speckle_noise(images: Pixels, numbers: Numbers, *, deviation: float) -> Pixels:
    """Add normal noise in proportion to the value."""
    factor = normals(numbers, 1.0, deviation).reshape(images.shape)
    factor *= unit(images)
    return to_pixels(factor)


def impulse_noise(images: Pixels, numbers: Numbers, *, amount: float) -> Pixels:
    """Turn some values black or white, with equal chances."""
    chances = numbers.reshape(images.shape)
    noisy = images.copy()
    noisy[chances < amount] = WHITE
    noisy[chances < amount / 2] = 0
    return noisy


def shot_noise(images: Pixels, numbers: Numbers, *, photons: float) -> Pixels:
    """Count photons: the darker the image, the fewer they are and the noisier it gets.

    There are only 256 Poisson distributions, one per grey level. Their distribution functions are
    put one after another into one ascending list, and one search in it serves all values.
    """
    expected = np.arange(WHITE + 1) / WHITE * photons
    # Brighter than white is clipped, so counts above `photons` need no entries.
    counts = np.arange(int(np.ceil(photons)))
    distribution = special.pdtr(counts[None, :], expected[:, None])  # (levels, counts)
    offsets = np.arange(WHITE + 1) * 2.0  # keeps the levels apart: a distribution ends at 1
    ascending = (distribution + offsets[:, None]).ravel()
    found = np.searchsorted(ascending, numbers.reshape(images.shape) + offsets[images])
    found -= images.astype(np.intp) * counts.size
    return to_pixels(found / photons)
