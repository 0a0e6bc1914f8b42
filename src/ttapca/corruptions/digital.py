"""Digital: changes by cameras, software and file formats."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import cv2
import numpy as np
from PIL import Image

from ttapca.corruptions.pixels import (
    FEW_PIXELS,
    WHITE,
    Numbers,
    Pixels,
    between,
    gaussian_kernel,
    smooth_reflected,
    to_pixels,
    unit,
)

_CORNERS = 3  # an affine map is given by where it takes three points
_ELASTIC_TRUNCATE = 3.0  # deviations that the kernel of shifts reaches; other kernels reach four


def brightness(images: Pixels, _numbers: Numbers, *, amount: float) -> Pixels:
    """Raise the value of HSV."""
    # Hue and saturation stay, so all three channels grow by a factor that depends on the largest of
    # them only: a table over (largest, channel) holds every result.
    levels = np.arange(WHITE + 1) / WHITE
    brighter = np.minimum(levels + amount, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        table = levels[None, :] * (brighter / levels)[:, None]
    table[0] = brighter[0]  # black has no hue: it becomes grey
    answers = to_pixels(table)
    largest = images.max(axis=-1, keepdims=True)
    return np.asarray(answers[largest, images])


def saturate(images: Pixels, _numbers: Numbers, *, factor: float, offset: float) -> Pixels:
    """Scale and shift the saturation of HSV."""
    # Hue and value stay, so the distance of each channel from the largest grows by a factor, which
    # a table over (largest, smallest) holds.
    levels = np.arange(WHITE + 1) / WHITE
    with np.errstate(divide="ignore", invalid="ignore"):
        saturation = 1.0 - levels[None, :] / levels[:, None]  # (largest, smallest)
        growth = np.clip(saturation * factor + offset, 0.0, 1.0) / saturation
    largest, smallest = images.max(axis=-1), images.min(axis=-1)
    values = unit(images)
    value = unit(largest)
    with np.errstate(invalid="ignore"):  # greys, which are handled below
        changed = (
            value[..., None] - (value[..., None] - values) * growth[largest, smallest][..., None]
        )
    # Grey has no hue, and hue 0 is red: an offset tints it.
    grey = largest == smallest
    tinted = value[grey] * (1.0 - min(max(offset, 0.0), 1.0))
    changed[grey] = np.stack([value[grey], tinted, tinted], axis=-1)
    return to_pixels(changed)


def contrast(images: Pixels, _numbers: Numbers, *, factor: float) -> Pixels:
    """Pull every channel towards its mean over the image."""
    # The sum of whole numbers does not depend on their order.
    sums = images.sum(axis=(1, 2), keepdims=True, dtype=np.int64)
    means = sums / float(images.shape[1] * images.shape[2] * WHITE)
    values = unit(images)
    values -= means
    values *= factor
    values += means
    return to_pixels(values)


def pixelate(images: Pixels, _numbers: Numbers, *, scale: float) -> Pixels:
    """Shrink and enlarge with whole pixels."""
    height, width = images.shape[1:3]
    small = (int(width * scale), int(height * scale))
    box = Image.Resampling.BOX
    pictures = (Image.fromarray(image).resize(small, box) for image in images)
    return np.stack([np.asarray(each.resize((width, height), box)) for each in pictures])


def jpeg_compression(images: Pixels, _numbers: Numbers, *, quality: int) -> Pixels:
    """Write as JPEG and read back."""
    decoded = np.empty_like(images)
    for image, target in zip(images, decoded, strict=True):
        with BytesIO() as file:
            Image.fromarray(image).save(file, "JPEG", quality=quality)
            with Image.open(file) as opened:
                target[...] = np.asarray(opened)
    return decoded


def elastic_draws(height: int, width: int) -> int:
    """Return how many numbers an image needs: for three points and two fields of shifts."""
    return 2 * _CORNERS + 2 * height * width


def elastic_transform(
    images: Pixels,
    numbers: Numbers,
    *,
    amplitude_fraction: float,
    deviation_fraction: float,
    affine_fraction: float,
) -> Pixels:
    """Move three points at random and the image with them; then shift every pixel a little."""
    count, height, width, _ = images.shape
    side = min(height, width)
    sheared = _affine(unit(images), numbers[:, : 2 * _CORNERS], affine_fraction * side)
    if not amplitude_fraction:
        return to_pixels(sheared)
    fields = between(numbers[:, 2 * _CORNERS :], -1.0, 1.0).reshape(2 * count, height, width)
    kernel = gaussian_kernel(deviation_fraction * side, _ELASTIC_TRUNCATE)
    shifts = smooth_reflected(fields, kernel).reshape(count, 2, height, width)
    shifts *= amplitude_fraction * side
    rows, columns = np.mgrid[:height, :width]
    across = (shifts[:, 0] + columns).astype(np.float32)
    down = (shifts[:, 1] + rows).astype(np.float32)
    for image, x, y in zip(sheared, across, down, strict=True):
        source = image.astype(_precision(height, width))
        image[...] = cv2.remap(source, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)
    return to_pixels(sheared)


def _precision(height: int, width: int) -> type[np.floating[Any]]:
    """Return in which precision OpenCV samples."""
    # The published generator uses single precision, and OpenCV 5 then samples at places that are
    # rounded less than in double precision.
    return np.float64 if height * width <= FEW_PIXELS else np.float32


def _affine(values: Numbers, numbers: Numbers, reach: float) -> Numbers:
    """Move three corners of a central square by up to `reach` pixels, and the image with them."""
    height, width = values.shape[1:3]
    middle = np.array([width // 2, height // 2])
    square = min(height, width) // 3
    corners = middle + square * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + between(numbers, -reach, reach).reshape(-1, _CORNERS, 2)
    start = corners.astype(np.float32)
    sheared = np.empty_like(values)
    for image, end, target in zip(values, moved.astype(np.float32), sheared, strict=True):
        matrix = cv2.getAffineTransform(start, end)
        source = image.astype(_precision(height, width))
        target[...] = cv2.warpAffine(
            source, matrix, (width, height), borderMode=cv2.BORDER_REFLECT_101
        )
    return sheared
