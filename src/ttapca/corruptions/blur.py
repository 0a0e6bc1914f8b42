"""Blur, as by a lens out of focus, a moving camera or frosted glass.

Each corruption takes images, their random numbers from (0, 1) and its parameters by name.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions.pixels import (
    Numbers,
    Pixels,
    apply_operator,
    between,
    gaussian_kernel,
    integers,
    smooth,
    to_pixels,
    unit,
    zoom_operator,
)


def gaussian_blur(images: Pixels, _numbers: Numbers, *, deviation: float) -> Pixels:
    """Smooth with a Gaussian."""
    return to_pixels(smooth(unit(images), gaussian_kernel(deviation)))


def disk_kernel(radius: float, softness: float) -> NDArray[np.float32]:
    """Return a disk whose rim is softened by a Gaussian of deviation `softness`."""
    rim = 1 if radius <= 8 else 2
    reach = int(radius) + rim
    line = np.arange(-reach, reach + 1)
    disk = line[:, None] ** 2 + line[None, :] ** 2 <= radius**2
    # Single precision, as published: an even area may differ by a grey level in double precision.
    disk = (disk / disk.sum()).astype(np.float32)
    side = 2 * rim + 1
    return np.asarray(
        cv2.GaussianBlur(disk, (side, side), softness, borderType=cv2.BORDER_CONSTANT)
    )


def defocus_blur(images: Pixels, _numbers: Numbers, *, radius: float, softness: float) -> Pixels:
    """Spread every pixel over a disk."""
    kernel = disk_kernel(radius, softness)
    values = unit(images)
    for image in values:
        image[...] = cv2.filter2D(image, cv2.CV_64F, kernel, borderType=cv2.BORDER_REFLECT_101)
    return to_pixels(values)


def zoom_blur(images: Pixels, _numbers: Numbers, *, stop: float, step: float) -> Pixels:
    """Average the image with ever larger enlargements of itself."""
    # `arange`, as published: the last bits of the factors decide how half a pixel is rounded.
    factors = (1.0, *np.arange(1.0, stop, step).tolist())  # the image itself comes first
    operator = zoom_operator(images.shape[1], images.shape[2], factors)
    values = apply_operator(operator, unit(images))
    values /= len(factors)
    return to_pixels(values)


def motion_blur(
    images: Pixels, numbers: Numbers, *, radius: int, deviation: float, max_angle: float
) -> Pixels:
    """Blur along a line of random direction."""
    angles = between(numbers[:, 0], -max_angle, max_angle)
    return blur_along(images, angles, radius=radius, deviation=deviation)


def blur_along(images: Pixels, angles: Numbers, *, radius: int, deviation: float) -> Pixels:
    """Blur each image along a line at its angle, in degrees clockwise from the right.

    This is ImageMagick's `MotionBlurImage`, half a Gaussian: the pixel itself has the largest
    weight, and 2 * radius more lie to one side of it along the line, at the nearest pixels. Pixels
    outside the image repeat its edge.
    """
    steps, radians = np.arange(2 * radius + 1), np.deg2rad(angles)[:, None]
    weights = np.exp(-0.5 * (steps / deviation) ** 2)
    weights /= weights.sum()
    down = np.ceil(steps * np.sin(radians) - 0.5)
    right = np.ceil(steps * np.cos(radians) - 0.5)
    offsets = np.stack([down, right], axis=-1).astype(np.intp)  # (n, 2 * radius + 1, 2)
    blurred = np.empty_like(images)
    # Similar angles give the same pixels; images that share a line are blurred together.
    lines, members = np.unique(offsets, axis=0, return_inverse=True)
    members = members.reshape(-1)
    for number, line in enumerate(lines):
        chosen = np.flatnonzero(members == number)
        blurred[chosen] = _blur_along_line(images[chosen], line, weights)
    return blurred


def _blur_along_line(images: Pixels, line: NDArray[np.intp], weights: Numbers) -> Pixels:
    height, width = images.shape[1:3]
    before = np.maximum(-line.min(axis=0), 0)  # how many rows above and columns to the left
    after = np.maximum(line.max(axis=0), 0)
    margins = [(0, 0), (before[0], after[0]), (before[1], after[1]), (0, 0)]
    padded = np.pad(images, margins, mode="edge").astype(np.float64)
    total = np.zeros(images.shape)
    for (down, right), weight in zip(line + before, weights, strict=True):
        total += weight * padded[:, down : down + height, right : right + width]
    # The weights sum to 1 up to rounding only, and an even area must keep its grey level.
    return (total + 1e-6).astype(np.uint8)


def glass_draws(height: int, width: int, *, max_delta: int, iterations: int) -> int:
    """Return how many numbers an image needs: one per pixel that moves and iteration."""
    return iterations * max(height - 2 * max_delta, 0) * max(width - 2 * max_delta, 0)


def glass_blur(
    images: Pixels, numbers: Numbers, *, deviation: float, max_delta: int, iterations: int
) -> Pixels:
    """Smooth, give every pixel the value of a random neighbour, smooth again.

    The published generator means to swap the two pixels, but swapping two numpy views copies one
    over the other. CIFAR-C contains the copies, and so does this.
    """
    kernel = gaussian_kernel(deviation)
    blurred = to_pixels(smooth(unit(images), kernel))
    side = 2 * max_delta
    choices = integers(numbers, side * side).reshape(
        len(images), iterations, images.shape[1] - side, images.shape[2] - side
    )
    down, right = choices // side - max_delta, choices % side - max_delta
    move = _move_at_once if max_delta == 1 else _move_in_turn
    for turn in range(iterations):
        blurred = move(blurred, down[:, turn], right[:, turn], max_delta)
    return to_pixels(smooth(unit(blurred), kernel))


def _move_in_turn(
    images: Pixels, down: NDArray[np.intp], right: NDArray[np.intp], max_delta: int
) -> Pixels:
    """Visit the pixels from the last to the first; each takes its neighbour's current value."""
    moved = images.copy()
    every = np.arange(len(images))
    rows, columns = down.shape[1:]
    for row in range(rows - 1, -1, -1):
        for column in range(columns - 1, -1, -1):
            # The published loops run from side - max_delta down to max_delta + 1.
            y, x = row + max_delta + 1, column + max_delta + 1
            moved[:, y, x] = moved[every, y + down[:, row, column], x + right[:, row, column]]
    return moved


def _move_at_once(
    images: Pixels, down: NDArray[np.intp], right: NDArray[np.intp], max_delta: int
) -> Pixels:
    """Do the same for moves of at most one pixel, which go up and left only.

    Those neighbours are visited later and still have their first values, so order does not matter.
    """
    moved = images.copy()
    first = max_delta + 1
    rows, columns = down.shape[1:]
    every = np.arange(len(images))[:, None, None]
    y = np.arange(first, first + rows)[:, None] + down
    x = np.arange(first, first + columns)[None, :] + right
    moved[:, first:, first:] = images[every, y, x]
    return moved
