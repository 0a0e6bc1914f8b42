"""Blur: light that lands in the wrong place.

Each function takes images, the numbers from (0, 1) that belong to them, and the parameters of one
severity by name; it returns new images.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions.motion import blur_along
from ttapca.corruptions.pixels import (
    Numbers,
    Pixels,
    apply_operator,
    gaussian_kernel,
    smooth,
    to_pixels,
    unit,
    zoom_operator,
)
from ttapca.corruptions.random_streams import between, integers


def gaussian_blur(images: Pixels, numbers: Numbers, *, deviation: float) -> Pixels:
    """Smooth with a Gaussian."""
    del numbers
    return to_pixels(smooth(unit(images), gaussian_kernel(deviation)))


def disk_kernel(radius: float, softness: float) -> NDArray[np.float32]:
    """A disk of light, as a lens out of focus makes of a point, with a softened rim.

    Args:
        radius: In pixels.
        softness: Deviation of the Gaussian over the rim, which spans 3 pixels, 5 for large disks.

    Returns:
        A square of odd side, no larger than the disk and its rim.
    """
    rim = 1 if radius <= 8 else 2
    reach = int(radius) + rim
    line = np.arange(-reach, reach + 1)
    disk = line[:, None] ** 2 + line[None, :] ** 2 <= radius**2
    # Single precision, as published: whether nine ninths make a little more than 1 decides on which
    # side of a grey level an even area ends up.
    disk = (disk / disk.sum()).astype(np.float32)
    side = 2 * rim + 1
    return np.asarray(
        cv2.GaussianBlur(disk, (side, side), softness, borderType=cv2.BORDER_CONSTANT)
    )


def defocus_blur(images: Pixels, numbers: Numbers, *, radius: float, softness: float) -> Pixels:
    """Spread every pixel over a disk."""
    del numbers
    kernel = disk_kernel(radius, softness)
    values = unit(images)
    for image in values:
        image[...] = cv2.filter2D(image, cv2.CV_64F, kernel, borderType=cv2.BORDER_REFLECT_101)
    return to_pixels(values)


def zoom_blur(images: Pixels, numbers: Numbers, *, stop: float, step: float) -> Pixels:
    """Average the image with ever larger enlargements of itself."""
    del numbers
    # The last bits of these factors matter: they decide whether half a pixel rounds up or down, and
    # whether the end is reached. `arange` gives the very ones of the published generator.
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


def glass_draws(height: int, width: int, *, max_delta: int, iterations: int) -> int:
    """How many numbers `glass_blur` needs for an image: one a moved pixel and iteration."""
    return iterations * max(height - 2 * max_delta, 0) * max(width - 2 * max_delta, 0)


def glass_blur(
    images: Pixels, numbers: Numbers, *, deviation: float, max_delta: int, iterations: int
) -> Pixels:
    """Smooth, let every pixel take the value of a random neighbour, smooth again.

    The published generator means to swap the two pixels, but a swap of two numpy views copies one
    over the other; the copy is what CIFAR-C contains, and what is done here.
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
    """Visit the pixels from the last to the first; each takes its neighbour's present value."""
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
    """The same for moves of at most one pixel, which are only up and left.

    Those neighbours come later in the visit and still have their first values: no order matters.
    """
    moved = images.copy()
    first = max_delta + 1
    rows, columns = down.shape[1:]
    every = np.arange(len(images))[:, None, None]
    y = np.arange(first, first + rows)[:, None] + down
    x = np.arange(first, first + columns)[None, :] + right
    moved[:, first:, first:] = images[every, y, x]
    return moved
