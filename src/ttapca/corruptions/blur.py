"""Blur, as by a lens out of focus, a moving camera or frosted glass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from ttapca.corruptions.pixels import (
    Numbers,
    Pixels,
    between,
    gaussian_kernel,
    integers,
    smooth,
    sum_of_zooms,
    to_pixels,
    unit,
)


def gaussian_blur(images: Pixels, _numbers: Numbers, *, deviation: float) -> Pixels:
    """Smooth with a Gaussian."""
    return to_pixels(smooth(unit(images), gaussian_kernel(deviation)))


def disk_kernel(radius: float, softness: float) -> NDArray[np.float32]:
    """Return a disk whose rim is softened by a Gaussian of deviation `softness`."""
    # The published kernels have 17 by 17 pixels, or as many as the disk if that is larger; a rim
    # that would leave them is mirrored back. Smaller disks are cut to the part that is not 0, for
    # speed.
    rim, largest = (1, 8) if radius <= 8 else (2, int(radius))
    reach, outside = int(radius) + rim, cv2.BORDER_CONSTANT
    if reach > largest:
        reach, outside = largest, cv2.BORDER_REFLECT_101
    line = np.arange(-reach, reach + 1)
    disk = line[:, None] ** 2 + line[None, :] ** 2 <= radius**2
    # Single precision, as published: an even area may differ by a grey level in double precision.
    disk = (disk / disk.sum()).astype(np.float32)
    side = 2 * rim + 1
    return np.asarray(cv2.GaussianBlur(disk, (side, side), softness, borderType=outside))


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
    values = sum_of_zooms(unit(images), factors)
    values /= len(factors)
    return to_pixels(values)


def motion_blur(
    images: Pixels, numbers: Numbers, *, radius: int, deviation: float, max_angle: float
) -> Pixels:
    """Blur along a line of random direction."""
    angles = between(numbers[:, 0], -max_angle, max_angle)
    return blur_along(images, angles, radius=radius, deviation=deviation)


def blur_along(images: Pixels, angles: Numbers, *, radius: int, deviation: float) -> Pixels:
    """Blur each image along a line at its angle, in degrees clockwise from the right."""
    # This is ImageMagick's `MotionBlurImage`, half a Gaussian: the pixel itself has the largest
    # weight, and 2 * radius more lie to one side of it along the line, at the nearest pixels.
    # Pixels outside the image repeat its edge.
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


def glass_draws(height: int, width: int, parameters: Mapping[str, Any]) -> int:
    """Return how many numbers an image needs: one per pixel that moves and iteration."""
    border, turns = 2 * int(parameters["max_delta"]), int(parameters["iterations"])
    return turns * max(height - border, 0) * max(width - border, 0)


def glass_blur(
    images: Pixels, numbers: Numbers, *, deviation: float, max_delta: int, iterations: int
) -> Pixels:
    """Smooth, give every pixel the value of a random neighbour, smooth again."""
    # The published generator means to swap the two pixels, but swapping two numpy views copies one
    # over the other. CIFAR-C contains the copies, and so does this.
    kernel = gaussian_kernel(deviation)
    blurred = to_pixels(smooth(unit(images), kernel))
    count, height, width, channels = images.shape
    side = 2 * max_delta
    rows, columns = max(height - side, 0), max(width - side, 0)  # in a small image nothing moves
    choices = integers(numbers, side * side).reshape(count, iterations, rows, columns)
    sources = np.arange(count * height * width)
    for turn in range(iterations):
        down, right = choices[:, turn] // side - max_delta, choices[:, turn] % side - max_delta
        sources = sources[_sources(down, right, (height, width), max_delta)]
    moved = blurred.reshape(-1, channels)[sources].reshape(images.shape)
    return to_pixels(smooth(unit(moved), kernel))


def _sources(
    down: NDArray[np.intp], right: NDArray[np.intp], size: tuple[int, int], max_delta: int
) -> NDArray[np.intp]:
    """Return for each pixel of a batch, numbered in order, whose old value it has in the end."""
    # The published loops visit the pixels from the last to the first, and each takes its
    # neighbour's *current* value. A neighbour that comes later in the image was visited before, and
    # may have taken its value from a third pixel, and so on. All such chains are followed at once,
    # and every round doubles the length that was followed.
    count, (height, width) = len(down), size
    pixels = np.arange(count * height * width)
    # The published loops run from side - max_delta down to max_delta + 1.
    moving = np.zeros((count, height, width), dtype=bool)
    first = max_delta + 1
    moving[:, first : height - max_delta + 1, first : width - max_delta + 1] = True
    movers = pixels[moving.reshape(-1)]
    sources = pixels.copy()
    sources[movers] += (down * width + right).reshape(-1)
    changed = moving.reshape(-1) & (sources > pixels)  # takes a value that was new by then
    changed &= moving.reshape(-1)[sources]
    followed = np.flatnonzero(changed)
    while followed.size:
        links = sources[followed]
        sources[followed] = sources[links]
        unfinished = changed[links]
        changed[followed[~unfinished]] = False
        followed = followed[unfinished]
    return sources
