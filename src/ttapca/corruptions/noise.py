"""Noise: every value changes independently."""

from __future__ import annotations

import numpy as np
from scipy import special

from ttapca.corruptions.pixels import WHITE, Numbers, Pixels, normals, to_pixels, unit

_PARTS = 256  # of (0, 1), in the coarse table of shot noise


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
    """Count photons: the darker the image, the fewer they are and the noisier it gets."""
    # There are only 256 Poisson distributions, one per grey level. Their distribution functions are
    # put one after another into one ascending list, in which every number has its place. A coarse
    # table says where the numbers of each 256th part of (0, 1) begin, and nearly all are there or
    # one step further; only the others are searched for.
    expected = np.arange(WHITE + 1) / WHITE * photons
    # Brighter than white is clipped, so counts above `photons` need no entries.
    counts = np.arange(int(np.ceil(photons)))
    distribution = special.pdtr(counts[None, :], expected[:, None])  # (levels, counts)
    offsets = np.arange(WHITE + 1) * 2.0  # keeps the levels apart: a distribution ends at 1
    ascending = np.append(distribution + offsets[:, None], np.inf)
    begin = np.searchsorted(ascending, np.arange(_PARTS) / _PARTS + offsets[:, None]).ravel()

    drawn, levels = numbers.reshape(-1), images.reshape(-1).astype(np.intp)
    wanted = drawn + offsets[levels]
    found = begin[levels * _PARTS + (drawn * _PARTS).astype(np.intp)]
    beyond = np.flatnonzero(ascending[found] < wanted)
    found[beyond] += 1
    beyond = beyond[ascending[found[beyond]] < wanted[beyond]]
    found[beyond] = np.searchsorted(ascending, wanted[beyond])
    found -= levels * counts.size
    return to_pixels(found.reshape(images.shape) / photons)
