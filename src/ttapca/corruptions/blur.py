"""Blur: light that lands in the wrong place, by a lens, a moving camera or frosted glass.

Each function takes images, the numbers from (0, 1) that belong to them, and the parameters of one
severity by name; it returns new images.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

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


def gaussian_blur(images: Pixels, _numbers: Numbers, *, deviation: float) -> Pixels:
    """Smooth with a Gaussian."""
    return to_pixels(smooth(unit(images), gaussian_kernel(deviation)))


def disk_kernel(radius: float, softness: float) -> NDArray[np.float32]:
    """A disk of light, as a lens out of focus makes of a point.

    Its rim of 3 pixels, or 5 for large disks, is softened by a Gaussian of deviation `softness`.
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


def defocus_blur(images: Pixels, _numbers: Numbers, *, radius: float, softness: float) -> Pixels:
    """Spread every pixel over a disk."""
    kernel = disk_kernel(radius, softness)
    values = unit(images)
    for image in values:
        image[...] = cv2.filter2D(image, cv2.CV_64F, kernel, borderType=cv2.BORDER_REFLECT_101)
    return to_pixels(values)


def zoom_blur(images: Pixels, _numbers: Numbers, *, stop: float, step: float) -> Pixels:
    """Average the image with ever larger enlargements of itself."""
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


def motion_weights(radius: int, deviation: float) -> Numbers:
    """Weights of the 2 * radius + 1 pixels of the line, nearest first; they sum to 1."""
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / deviation) ** 2)
    return np.asarray(weights / weights.sum())


def motion_offsets(angles: Numbers, count: int) -> NDArray[np.intp]:
    """Where the pixels of each line lie: rows down and columns right of the blurred pixel.

    Angles have shape (n,), the offsets (n, count, 2).
    """
    radians = np.deg2rad(angles)[:, None]
    steps = np.arange(count)
    down = np.ceil(steps * np.sin(radians) - 0.5)
    right = np.ceil(steps * np.cos(radians) - 0.5)
    return np.stack([down, right], axis=-1).astype(np.intp)


def blur_along(images: Pixels, angles: Numbers, *, radius: int, deviation: float) -> Pixels:
    """Blur each image along its own line, as ImageMagick's motion blur does it.

    ImageMagick (`MotionBlurImage`) takes half a Gaussian: the pixel itself has the largest weight,
    and the 2 * radius further ones lie to one side of it along the angle, each rounded to the
    nearest pixel; pixels outside the image repeat its edge. Angles are in degrees, clockwise from
    the right. Grey levels are cut off like everywhere in the published generator.

    Args:
        images: (n, height, width, channels)
        angles: One for each image, (n,).
        radius: Half the length of the line, in pixels.
        deviation: Of the Gaussian, in pixels.
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


def glass_draws(height: int, width: int, *, max_delta: int, iterations: int) -> int:
    """How many numbers an image needs: one for each pixel that moves, each time it moves."""
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
