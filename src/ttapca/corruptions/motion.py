"""Blur along a line, as ImageMagick's motion blur does it, for moving cameras and falling snow.

ImageMagick (`MotionBlurImage`) takes half a Gaussian: the pixel itself has the largest weight, and
the 2 * radius further ones lie to one side of it along the angle, each rounded to the nearest
pixel; pixels outside the image repeat its edge. Angles are in degrees, clockwise from the right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions.pixels import Numbers, Pixels


def motion_weights(radius: int, deviation: float) -> Numbers:
    """Weights of the 2 * radius + 1 pixels of the line, nearest first; they sum to 1."""
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / deviation) ** 2)
    return np.asarray(weights / weights.sum())


def motion_offsets(angles: Numbers, count: int) -> NDArray[np.intp]:
    """Where the pixels of each line lie.

    Args:
        angles: In degrees, (n,).
        count: Pixels on a line.

    Returns:
        Rows down and columns right of the blurred pixel, (n, count, 2).
    """
    radians = np.deg2rad(angles)[:, None]
    steps = np.arange(count)
    down = np.ceil(steps * np.sin(radians) - 0.5)
    right = np.ceil(steps * np.cos(radians) - 0.5)
    return np.stack([down, right], axis=-1).astype(np.intp)


def blur_along(images: Pixels, angles: Numbers, *, radius: int, deviation: float) -> Pixels:
    """Blur each image along its own line.

    Args:
        images: (n, height, width, channels)
        angles: In degrees, (n,).
        radius: Half the length of the line.
        deviation: Of the Gaussian.

    Returns:
        Images of the same shape, grey levels cut off like everywhere in the published generator.
    """
    weights = motion_weights(radius, deviation)
    offsets = motion_offsets(angles, weights.size)
    blurred = np.empty_like(images)
    # Lines of nearly the same angle touch the same pixels: few distinct ones remain, and the images
    # that share one are blurred together.
    lines, members = np.unique(offsets, axis=0, return_inverse=True)
    members = members.reshape(-1)
    for number, line in enumerate(lines):
        chosen = np.flatnonzero(members == number)
        blurred[chosen] = _blur_along_line(images[chosen], line, weights)
    return blurred


def _blur_along_line(images: Pixels, line: NDArray[np.intp], weights: Numbers) -> Pixels:
    height, width = images.shape[1:3]
    before = np.maximum(-line.min(axis=0), 0)  # rows above and columns left that are needed
    after = np.maximum(line.max(axis=0), 0)
    margins = [(0, 0), (before[0], after[0]), (before[1], after[1]), (0, 0)]
    padded = np.pad(images, margins, mode="edge").astype(np.float64)
    total = np.zeros(images.shape)
    for (down, right), weight in zip(line + before, weights, strict=True):
        total += weight * padded[:, down : down + height, right : right + width]
    # The weights sum to 1 only up to rounding: an even area must keep its grey level.
    return (total + 1e-6).astype(np.uint8)
