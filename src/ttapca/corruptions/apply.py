"""Corrupt images of any size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Whole, check_option
from ttapca.corruptions.catalogue import (
    CIFAR_C,
    SEVERITIES,
    TEXTURE_SCALE,
    TEXTURES,
    SeverityTable,
    default_table,
    find,
    load_table,
)
from ttapca.corruptions.pixels import CHANNELS, Pixels, stream_key, uniforms
from ttapca.corruptions.weather import (
    SHRUNK_BY,
    TEXTURE_FILES,
    choose_textures,
    textures_ship,
)
from ttapca.errors import OptionError, PixelTypeError, ShapeError

SMALLEST_SIDE = 32
_TEXTURE_SIDE = 256  # pixels of a drawn frost texture
_VALUES_PER_PIECE = 512 * 32 * 32 * CHANNELS  # measured: nearly the fastest, in less than 200 MB


def corrupt(
    images: NDArray[np.uint8],
    corruption: str,
    severity: int,
    seed: int = 0,
    *,
    start: int = 0,
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    table: str | Path | SeverityTable | None = None,
    textures: str | Path | tuple[Pixels, ...] | None = None,
) -> Pixels:
    """Return corrupted images of the same shape.

    The random numbers of an image depend on `seed`, `corruption`, `severity` and its index only. In
    any batch, order or process it gives the same bytes, as long as it keeps its index.

    Args:
        images: Grey levels, uint8, (n, height, width, 3), at least 32 by 32.
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: From 0 on.
        start: Index of the first image; the others follow. For a slice of a data set.
        indices: Or the index of each image, in any order.
        table: The severities: `cifar-c`, `imagenet-c`, the path of a table, or a loaded one. The
            default is `imagenet-c` from a shorter side of 96 pixels on, `cifar-c` below.
        textures: For frost: the folder of its photographs, or the result of `load_textures`. Images
            as small as CIFAR's need none: small copies of the photographs ship with the package.

    Example:
        >>> import numpy as np
        >>> images = np.full((2, 32, 32, 3), 100, dtype=np.uint8)
        >>> corrupt(images, "brightness", severity=3)[0, 0, 0]
        array([138, 138, 138], dtype=uint8)
    """
    chosen = find(corruption)
    check_images(images)
    _check_whole("severity", severity, Whole(SEVERITIES[0], SEVERITIES[-1]))
    _check_whole("seed", seed, Whole(0))
    chosen_indices = _indices(len(images), start, indices)
    height, width = images.shape[1:3]
    if table is None:
        table = default_table(height, width)
    loaded = table if isinstance(table, SeverityTable) else load_table(table)
    parameters = loaded.parameters(chosen.name, severity)
    arguments: dict[str, object] = dict(parameters)
    if chosen.needs_textures:
        scale = float(parameters[TEXTURE_SCALE])
        photographs, still = choose_textures(textures, height, width, scale)
        arguments |= {TEXTURES: photographs, TEXTURE_SCALE: still}

    draws = chosen.draws(height, width, parameters)
    key = stream_key(int(seed), chosen.name, int(severity))
    piece = max(1, _VALUES_PER_PIECE // (height * width * CHANNELS))
    corrupted = np.empty(images.shape, dtype=np.uint8)
    for first in range(0, len(images), piece):
        part = slice(first, first + piece)
        numbers = uniforms(key, chosen_indices[part], draws)
        corrupted[part] = chosen.apply(np.ascontiguousarray(images[part]), numbers, **arguments)
    return corrupted


def check_images(images: object) -> None:
    """Raise an error unless images are uint8, (n, height, width, 3) and large enough."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        found = getattr(images, "dtype", type(images).__name__)
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


def _indices(
    count: int, start: int, indices: Sequence[int] | NDArray[np.int64] | None
) -> NDArray[np.int64]:
    _check_whole("start", start, Whole(0))
    if indices is None:
        return np.arange(start, start + count, dtype=np.int64)
    if start:
        raise OptionError("Give either `start` or `indices`, not both; found both.")
    given = np.asarray(indices)
    if given.shape != (count,):
        raise ShapeError(
            f"`indices` must hold one index for each image, ({count},); found {given.shape}."
        )
    if count and (given.dtype.kind not in "iu" or given.min() < 0):
        raise OptionError("`indices` must be whole numbers from 0 on; found others.")
    return given.astype(np.int64)


def corrupt_any_size(
    images: Pixels,
    corruption: str,
    severity: int,
    seed: int = 0,
    *,
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    table: str | Path | None = None,
    textures: Path | None = None,
) -> Pixels:
    """Return corrupted images of the same shape, as `corrupt` does, also of small or grey images.

    The corruptions are made for photographs: they take colour images of at least 32 by 32 pixels.
    So images that are smaller, or grey, are mirrored at their edges until they are large enough,
    corrupted, and cut out again: noise and blur are as strong, pixel for pixel, as on CIFAR. Their
    frost is drawn: they belong to no published benchmark that a download could reproduce.

    Args:
        images: Grey levels, uint8, (n, height, width, 3) or (n, height, width, 1).
        corruption: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: From 0 on.
        indices: The index of each image in its data set; by default they are counted from 0.
        table: The severities, as for `corrupt`.
        textures: For frost on images larger than CIFAR's: the folder of its photographs.

    Example:
        >>> digits = np.full((2, 8, 8, 1), 100, np.uint8)
        >>> corrupt_any_size(digits, "brightness", 3)[1, 0, 0].tolist()
        [138]
    """
    spoil = partial(corrupt, seed=seed, indices=indices, table=table)
    if not needs_photographs(images, corruption, table):
        textures = None
    if not _is_small(images):
        return spoil(images, corruption, severity, textures=textures)
    height, width, channels = images.shape[1:]
    above, left = (max(0, SMALLEST_SIDE - side + 1) // 2 for side in (height, width))
    large = np.pad(images, [(0, 0), (above, above), (left, left), (0, 0)], mode="symmetric")
    if channels == 1:
        large = np.repeat(large, CHANNELS, axis=3)
    frost = _drawn_textures()
    spoilt = spoil(large, corruption, severity, textures=frost)
    middle = spoilt[:, above : above + height, left : left + width]
    return np.ascontiguousarray(middle[..., 1:2] if channels == 1 else middle)


def needs_photographs(images: Pixels, corruption: str, table: str | Path | None = None) -> bool:
    """Return whether a corruption of these images takes photographs of frost that do not ship."""
    height, width = images.shape[1:3]
    usual = (table or default_table(height, width)) == CIFAR_C
    ship = usual and textures_ship(height, width, SHRUNK_BY)
    return find(corruption).needs_textures and not _is_small(images) and not ship


def _is_small(images: Pixels) -> bool:
    """Return whether images are too small for the corruptions, or grey."""
    height, width, channels = images.shape[1:]
    return bool(min(height, width) < SMALLEST_SIDE or channels == 1)


@cache
def _drawn_textures() -> tuple[Pixels, ...]:
    return tuple(_drawn_frost(np.random.default_rng(n)) for n in range(len(TEXTURE_FILES)))


def _drawn_frost(random: np.random.Generator) -> Pixels:
    """Draw a pale texture with the spectrum of clouds and the bright ridges of ice."""
    frequency = np.hypot(
        np.fft.fftfreq(_TEXTURE_SIDE)[:, None], np.fft.rfftfreq(_TEXTURE_SIDE)[None]
    )
    amplitude = 1 / np.maximum(frequency, 1 / _TEXTURE_SIDE) ** 1.5
    noise = np.fft.rfft2(random.standard_normal((_TEXTURE_SIDE, _TEXTURE_SIDE))) * amplitude
    cloud = np.fft.irfft2(noise, s=(_TEXTURE_SIDE, _TEXTURE_SIDE))
    ridges = np.exp(-np.abs(cloud) / cloud.std())  # 1 where the cloud changes sign
    grey: Pixels = np.rint(60 + 195 * ridges).astype(np.uint8)
    return np.repeat(grey[..., None], CHANNELS, axis=2)
