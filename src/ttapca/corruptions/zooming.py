"""Enlarge the middle of images to their full size, by one factor or as a sum over many.

Linear interpolation is linear, so that it is a matrix. For small images one sparse matrix over all
pixels holds the sum of all enlargements, and twenty-six of them cost as much as one. For images of
224 by 224 pixels this matrix would have a million and a half entries, and take longer to make than
to use. There, rows and columns are enlarged one after the other, factor by factor.
"""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, sparse

from ttapca.corruptions.pixels import FEW_PIXELS, Numbers


def sum_of_zooms(images: Numbers, factors: tuple[float, ...]) -> Numbers:
    """Return the sum of several enlargements about the middle of images.

    Args:
        images: (n, height, width, channels).
        factors: From 1 on.
    """
    height, width = images.shape[1:3]
    if height * width <= FEW_PIXELS:
        return _apply(_operator(height, width, factors), images)
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
    """Return the matrix (size, size) that enlarges the middle of a line of pixels.

    The ends of the enlarged line fall on the ends of the middle, as in `scipy.ndimage.zoom`; pixels
    too many are cut off.
    """
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


def _apply(operator: sparse.csr_array, images: Numbers) -> Numbers:
    """Apply a matrix over pixels to every image, of shape (n, height, width, channels)."""
    count, height, width, channels = images.shape
    columns = images.reshape(count, height * width, channels).transpose(1, 0, 2)
    result = operator @ columns.reshape(height * width, count * channels)
    moved = result.reshape(height * width, count, channels).transpose(1, 0, 2)
    return np.ascontiguousarray(moved).reshape(images.shape)
