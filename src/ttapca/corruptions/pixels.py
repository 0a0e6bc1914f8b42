"""What several corruptions share: bytes to numbers and back, smoothing, zooming.

Everything here treats each image by itself, with the same operations whatever the batch, so that an
image's bytes do not depend on its neighbours. That rules out one matrix product over a whole batch:
a BLAS may sum in another order for another number of columns.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, sparse

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.float64]

WHITE = 255
CHANNELS = 3


def unit(images: Pixels) -> Numbers:
    """Scale grey levels to the range from 0 to 1."""
    return images / float(WHITE)


def to_pixels(values: Numbers) -> Pixels:
    """Scale intensities back to grey levels; those outside 0 to 1 are clipped.

    `values` is overwritten. Grey levels are cut off rather than rounded, as the published generator
    does: half a level darker on average.
    """
    np.clip(values, 0.0, 1.0, out=values)
    values *= WHITE
    return values.astype(np.uint8)


def gaussian_kernel(deviation: float, truncate: float = 4.0) -> Numbers:
    """A Gaussian at whole pixels that sums to 1; it reaches `truncate` deviations to each side.

    A deviation of 0 gives the kernel that changes nothing.
    """
    radius = int(truncate * deviation + 0.5)
    if radius == 0:
        return np.ones(1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    return np.asarray(weights / weights.sum())


def smooth(images: Numbers, kernel: Numbers, border: int = cv2.BORDER_REPLICATE) -> Numbers:
    """Convolve rows and columns of each image with a symmetric kernel.

    Images have shape (n, height, width) or (n, height, width, channels); `border` is what OpenCV
    takes for the pixels outside.
    """
    if kernel.size == 1:
        return images.copy()
    smoothed = np.empty_like(images)
    for source, target in zip(images, smoothed, strict=True):
        target[...] = cv2.sepFilter2D(source, cv2.CV_64F, kernel, kernel, borderType=border)
    return smoothed


def _zoom_axis(size: int, factor: float) -> Numbers:
    """The matrix (size, size) that enlarges the middle of a line of pixels."""
    kept = int(np.ceil(size / factor))
    start = (size - kept) // 2
    zoomed = ndimage.zoom(np.eye(kept), (factor, 1.0), order=1)
    trim = (zoomed.shape[0] - size) // 2
    matrix = np.zeros((size, size))
    matrix[:, start : start + kept] = zoomed[trim : trim + size]
    return matrix


@lru_cache(maxsize=32)
def zoom_operator(height: int, width: int, factors: tuple[float, ...]) -> sparse.csr_array:
    """The sum of several enlargements of an image about its middle, as one sparse matrix.

    Linear interpolation is linear, so twenty-six enlargements cost as much as one. Factors are at
    least 1.
    """
    # (height * width, height * width)
    total = sparse.csr_array((height * width, height * width))
    for factor in factors:
        rows = sparse.csr_array(_zoom_axis(height, factor))
        columns = sparse.csr_array(_zoom_axis(width, factor))
        total = total + sparse.kron(rows, columns, format="csr")
    return total


def apply_operator(operator: sparse.csr_array, images: Numbers) -> Numbers:
    """Apply a matrix over pixels to every image, of shape (n, height, width, channels)."""
    count, height, width, channels = images.shape
    columns = images.reshape(count, height * width, channels).transpose(1, 0, 2)
    result = operator @ columns.reshape(height * width, count * channels)
    moved = result.reshape(height * width, count, channels).transpose(1, 0, 2)
    return np.ascontiguousarray(moved).reshape(images.shape)
