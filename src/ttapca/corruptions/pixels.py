"""Shared by corruptions: random numbers, grey levels, smoothing, enlarging.

Random numbers belong to an image, not to a batch. Philox is a counter-based generator: its output
is a function of a key and a counter. Seed, corruption and severity make the key, the index of an
image the counter. So image 7,000 gets the same numbers alone, in a batch, in another order or in
another process.

All other functions, too, treat each image by itself. That rules out one matrix product over a whole
batch: a BLAS may sum in another order for another number of columns.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy import fft, ndimage, sparse, special

Pixels = NDArray[np.uint8]
Numbers = NDArray[np.float64]

WHITE = 255
CHANNELS = 3
FEW_PIXELS = 64 * 64  # up to this size operations are the same as ever: CIFAR-C keeps its bytes
_WORDS_PER_COUNT = 4  # Philox4x64 turns each value of its counter into four 64-bit words
_UNUSED_BITS = np.uint64(11)  # a double holds 53 of a word's 64 bits
_STEP = 2.0**-53


def stream_key(seed: int, corruption: str, severity: int) -> NDArray[np.uint64]:
    """Return a Philox key of two words; similar arguments give unrelated keys."""
    sequence = np.random.SeedSequence([seed, severity, *corruption.encode()])
    return sequence.generate_state(2, np.uint64).astype(np.uint64)


def uniforms(key: NDArray[np.uint64], indices: NDArray[np.int64], count: int) -> Numbers:
    """Return `count` numbers for the image of each index, strictly between 0 and 1."""
    counts_each = -(-count // _WORDS_PER_COUNT)
    words_each = counts_each * _WORDS_PER_COUNT
    drawn = np.empty((len(indices), count))
    # Images with consecutive indices are drawn in one call.
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    for run in np.split(np.arange(len(indices)), breaks):
        if not run.size or not count:
            continue
        generator = np.random.Philox(key=key, counter=int(indices[run[0]]) * counts_each)
        words = generator.random_raw(run.size * words_each).reshape(run.size, words_each)
        drawn[run[0] : run[-1] + 1] = words[:, :count] >> _UNUSED_BITS
    # The centre of each of the 2^53 steps: never 0 and never 1, so that every quantile is finite.
    drawn += 0.5
    drawn *= _STEP
    return np.minimum(drawn, 1.0 - _STEP, out=drawn)


def between(numbers: Numbers, low: float, high: float) -> Numbers:
    """Stretch numbers from (0, 1) to (low, high)."""
    return low + (high - low) * numbers


def integers(numbers: Numbers, stop: int) -> NDArray[np.intp]:
    """Turn numbers from (0, 1) into integers from 0 to `stop` - 1, all equally likely."""
    return np.floor(numbers * stop).astype(np.intp)


def normals(numbers: Numbers, mean: float, deviation: float) -> Numbers:
    """Turn numbers from (0, 1) into normal ones by the inverse of the distribution function."""
    # A rejection method would take an unknown number of draws for an image.
    values: Numbers = special.ndtri(numbers)
    values *= deviation
    values += mean
    return values


def unit(images: Pixels) -> Numbers:
    """Scale grey levels to the range from 0 to 1."""
    return images / float(WHITE)


def to_pixels(values: Numbers) -> Pixels:
    """Clip intensities to 0 to 1 and scale them to grey levels; overwrites `values`."""
    # Grey levels are rounded down, as in the published generator: half a level darker on average.
    np.clip(values, 0.0, 1.0, out=values)
    values *= WHITE
    return values.astype(np.uint8)


def gaussian_kernel(deviation: float, truncate: float = 4.0) -> Numbers:
    """Return a Gaussian that sums to 1 and reaches `truncate` deviations to each side."""
    radius = int(truncate * deviation + 0.5)
    if radius == 0:
        return np.ones(1)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    return np.asarray(weights / weights.sum())


def smooth(images: Numbers, kernel: Numbers, border: int = cv2.BORDER_REPLICATE) -> Numbers:
    """Convolve rows and columns of each image, (n, height, width, ...), with a symmetric kernel."""
    # `border` is OpenCV's name for what the pixels outside are.
    if kernel.size == 1:
        return images.copy()
    smoothed = np.empty_like(images)
    for source, target in zip(images, smoothed, strict=True):
        target[...] = cv2.sepFilter2D(source, cv2.CV_64F, kernel, kernel, borderType=border)
    return smoothed


_WIDE = 65  # pixels from which on a cosine transform is quicker than a sum over the kernel


def smooth_reflected(fields: Numbers, kernel: Numbers) -> Numbers:
    """Convolve rows and columns of fields, (n, height, width), that go on as in a mirror."""
    # The mirror repeats the edge. Then the cosines of the DCT are only scaled, each by its own
    # factor, however wide the kernel is; it may be wider than the field.
    if kernel.size < _WIDE:
        return smooth(fields, kernel, cv2.BORDER_REFLECT)
    down, across = (_cosine_response(kernel, size) for size in fields.shape[1:])
    response = down[:, None] * across[None, :]
    smoothed = np.empty_like(fields)
    for source, target in zip(fields, smoothed, strict=True):
        target[...] = fft.idctn(fft.dctn(source) * response)
    return smoothed


def _cosine_response(kernel: Numbers, size: int) -> Numbers:
    """Return by how much a symmetric kernel scales each cosine of a line of `size` pixels."""
    steps = np.arange(kernel.size) - kernel.size // 2
    cosines = np.cos(np.pi / size * np.arange(size)[:, None] * steps[None, :])
    return np.asarray((cosines * kernel).sum(axis=1))


def sum_of_zooms(images: Numbers, factors: tuple[float, ...]) -> Numbers:
    """Return the sum of enlargements of images, (n, h, w, channels), about their middle."""
    # For small images one sparse matrix over all pixels holds the sum of all enlargements:
    # twenty-six cost as much as one. For 224 by 224 pixels this matrix would take longer to make
    # than to use, so that rows and columns are enlarged one after the other, factor by factor.
    count, height, width, channels = images.shape
    if (pixels := height * width) <= FEW_PIXELS:
        columns = images.reshape(count, pixels, channels).transpose(1, 0, 2)
        zoomed = _operator(height, width, factors) @ columns.reshape(pixels, count * channels)
        moved = zoomed.reshape(pixels, count, channels).transpose(1, 0, 2)
        return np.ascontiguousarray(moved).reshape(images.shape)
    total = np.empty_like(images)
    for image, target in zip(images, total, strict=True):
        target[...] = _zoom_by_axes(image, factors)
    return total


def _zoom_by_axes(image: Numbers, factors: tuple[float, ...]) -> Numbers:
    height, width, channels = image.shape
    # Columns first: each is a line in memory. An image as it is needs no matrix.
    turned: Numbers = np.asarray(cv2.transpose(image), dtype=np.float64) * factors.count(1.0)
    turned = turned.reshape(width, height * channels)
    lines = image.reshape(height, width * channels)
    for factor in (each for each in factors if each != 1.0):
        enlarged = (_sparse_axis(height, factor) @ lines).reshape(height, width, channels)
        columns = cv2.transpose(enlarged).reshape(width, height * channels)
        turned += _sparse_axis(width, factor) @ columns
    upright: Numbers = turned.reshape(width, height, channels).swapaxes(0, 1)
    return upright


def _middle(size: int, factor: float) -> tuple[int, int]:
    """Return the first pixel of the middle that is enlarged to all of a line, and their number."""
    kept = int(np.ceil(size / factor))
    return (size - kept) // 2, kept


@lru_cache(maxsize=256)
def _sparse_axis(size: int, factor: float) -> sparse.csr_array:
    """Return the matrix (size, size) that enlarges the middle of a line, as scipy's `zoom` does."""
    start, kept = _middle(size, factor)
    enlarged = round(kept * factor)
    trim = (enlarged - size) // 2
    places = (np.arange(size) + trim) * ((kept - 1) / max(enlarged - 1, 1))
    left = np.minimum(places.astype(np.intp), max(kept - 2, 0))
    weights = places - left
    rows = np.arange(size)
    right = np.minimum(left + 1, kept - 1)
    entries = np.concatenate([1.0 - weights, weights])
    columns = start + np.concatenate([left, right])
    return sparse.csr_array((entries, (np.tile(rows, 2), columns)), shape=(size, size))


def _axis(size: int, factor: float) -> NDArray[np.float64]:
    """Return the same matrix by scipy, as the bytes of CIFAR-C were always made."""
    start, kept = _middle(size, factor)
    zoomed = ndimage.zoom(np.eye(kept), (factor, 1.0), order=1)
    trim = (zoomed.shape[0] - size) // 2
    matrix = np.zeros((size, size))
    matrix[:, start : start + kept] = zoomed[trim : trim + size]
    return matrix


@lru_cache(maxsize=32)
def _operator(height: int, width: int, factors: tuple[float, ...]) -> sparse.csr_array:
    """Return the sum of several enlargements as one sparse matrix over pixels."""
    total = sparse.csr_array((height * width, height * width))
    for factor in factors:
        rows = sparse.csr_array(_axis(height, factor))
        columns = sparse.csr_array(_axis(width, factor))
        total = total + sparse.kron(rows, columns, format="csr")
    return total
