"""`corrupt`: check the call, cut it into pieces that fit the cache, hand each to its function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Whole, check_option
from ttapca.corruptions.catalogue import (
    CIFAR_C,
    SEVERITIES,
    TEXTURES,
    SeverityTable,
    find,
    load_table,
)
from ttapca.corruptions.pixels import CHANNELS, Pixels
from ttapca.corruptions.random_streams import stream_key, uniforms
from ttapca.corruptions.weather import load_textures
from ttapca.errors import OptionError, PixelTypeError, ShapeError

SMALLEST_SIDE = 32
_VALUES_A_PIECE = 512 * 32 * 32 * CHANNELS  # measured: near the fastest, and below 200 MB at work


def corrupt(
    images: NDArray[np.uint8],
    corruption: str,
    severity: int,
    seed: int = 0,
    *,
    start: int = 0,
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    table: str | Path | SeverityTable = CIFAR_C,
    textures: str | Path | tuple[Pixels, ...] | None = None,
) -> Pixels:
    """Spoil images in one of nineteen ways.

    An image's randomness depends on `seed`, `corruption`, `severity` and its index only: slices,
    batches, orders and processes give the same bytes, as long as each image keeps its index.

    Args:
        images: Grey levels, uint8, (n, height, width, 3), at least 32 by 32.
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: From 0 on.
        start: Index of the first image; the others follow. For a slice of a data set.
        indices: One index for each image instead, in any order.
        table: The severities: the name of a table, the path of one, or one that was loaded.
        textures: For frost: the folder of its photographs, or what `load_textures` returned.

    Returns:
        New images of the same shape.

    Raises:
        PixelTypeError: The images are not uint8.
        ShapeError: They are not (n, height, width, 3), or too small; or `indices` has another
            length.
        OptionError: No such corruption, severity, seed, index or table.
        DataNotFoundError: Frost has no photographs; the message says how to get them.

    Example:
        >>> import numpy as np
        >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
        >>> corrupt(images, "brightness", severity=3)[0, 0, 0]
        array([138, 138, 138], dtype=uint8)
        >>> whole = corrupt(images, "fog", severity=3, seed=0)
        >>> bool((corrupt(images[1:], "fog", severity=3, seed=0, start=1) == whole[1:]).all())
        True
    """
    chosen = find(corruption)
    check_images(images)
    _check_whole("severity", severity, Whole(SEVERITIES[0], SEVERITIES[-1]))
    _check_whole("seed", seed, Whole(0))
    places = _places(len(images), start, indices)
    loaded = table if isinstance(table, SeverityTable) else load_table(table)
    parameters = loaded.parameters(chosen.name, severity)
    arguments: dict[str, object] = dict(parameters)
    if chosen.needs_textures:
        arguments[TEXTURES] = textures if isinstance(textures, tuple) else load_textures(textures)

    height, width = images.shape[1:3]
    draws = chosen.draws(height, width, parameters)
    key = stream_key(int(seed), chosen.name, int(severity))
    piece = max(1, _VALUES_A_PIECE // (height * width * CHANNELS))
    spoilt = np.empty(images.shape, dtype=np.uint8)
    for first in range(0, len(images), piece):
        part = slice(first, first + piece)
        numbers = uniforms(key, places[part], draws)
        spoilt[part] = chosen.apply(np.ascontiguousarray(images[part]), numbers, **arguments)
    return spoilt


def check_images(images: object) -> None:
    """Refuse everything but uint8 images of three channels, channels last, of a workable size.

    Raises:
        PixelTypeError: It is not an array of uint8.
        ShapeError: It is not (n, height, width, 3), or an image is too small.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = type(images)
        array = isinstance(images, np.ndarray)
        found = f"dtype {images.dtype}" if array else f"a {kind.__module__}.{kind.__qualname__}"  # type: ignore[attr-defined]
        raise PixelTypeError(
            f"Images must be a numpy array of uint8, grey levels from 0 to 255; found {found}. "
            "Intensities from 0 to 1 become grey levels by (255 * images).round().astype(np.uint8)."
        )
    if images.ndim != 4 or images.shape[-1] != CHANNELS:
        remedy = "Add an axis with images[None]." if images.ndim == 3 else "Give colour images."
        if images.ndim == 4 and images.shape[1] == CHANNELS:
            remedy = "Move the channels to the end with images.transpose(0, 2, 3, 1)."
        raise ShapeError(
            f"Images must have shape (n, height, width, {CHANNELS}); found {images.shape}. {remedy}"
        )
    if min(images.shape[1:3]) < SMALLEST_SIDE:
        raise ShapeError(
            f"Images must be at least {SMALLEST_SIDE} by {SMALLEST_SIDE} pixels; found "
            f"{images.shape[1]} by {images.shape[2]}. Enlarge them first."
        )


def _check_whole(name: str, value: object, rule: Whole) -> None:
    check_option(name, int(value) if isinstance(value, np.integer) else value, rule)


def _places(
    count: int, start: int, indices: Sequence[int] | NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The index of every image."""
    _check_whole("start", start, Whole(0))
    if indices is None:
        return np.arange(start, start + count, dtype=np.int64)
    if start:
        raise OptionError("Give either `start` or `indices`, not both; found both.")
    places = np.asarray(indices)
    if places.shape != (count,):
        raise ShapeError(
            f"`indices` must hold one index for each image, ({count},); found {places.shape}."
        )
    if count and (places.dtype.kind not in "iu" or places.min() < 0):
        raise OptionError("`indices` must be whole numbers from 0 on; found others.")
    return places.astype(np.int64)
