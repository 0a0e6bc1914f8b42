"""Weather: snow, frost and fog between the camera and the scene, and drops on the lens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from ttapca.corruptions.blur import blur_along
from ttapca.corruptions.pixels import (
    WHITE,
    Numbers,
    Pixels,
    between,
    gaussian_kernel,
    integers,
    normals,
    smooth,
    sum_of_zooms,
    to_pixels,
    unit,
)
from ttapca.datasets.pictures import read_picture
from ttapca.errors import DataFormatError, DataNotFoundError

_GREY = np.array([0.299, 0.587, 0.114])  # luma of ITU-R BT.601, which OpenCV uses
_UP = -90.0  # degrees, clockwise from the right: where snow streaks come from
_ROUGHNESS = 100.0  # of the fractal's first scale; only its ratio to later scales matters


def snow_draws(height: int, width: int) -> int:
    """Return how many numbers an image needs: one for each pixel, one for the direction."""
    return height * width + 1


def snow(
    images: Pixels,
    numbers: Numbers,
    *,
    mean: float,
    deviation: float,
    zoom: float,
    threshold: float,
    radius: int,
    blur_deviation: float,
    max_angle: float,
    image_weight: float,
) -> Pixels:
    """Whiten the image and add flakes: bright noise, enlarged and blurred downwards."""
    count, height, width, _ = images.shape
    noise = normals(numbers[:, :-1], mean, deviation).reshape(count, height, width, 1)
    flakes = sum_of_zooms(noise, (zoom,))
    flakes[flakes < threshold] = 0.0
    angles = between(numbers[:, -1], _UP - max_angle, _UP + max_angle)
    layer = blur_along(to_pixels(flakes), angles, radius=radius, deviation=blur_deviation)

    values = unit(images)
    # Three products rather than a matrix product, whose sums may depend on the batch.
    grey = values[..., 0] * _GREY[0] + values[..., 1] * _GREY[1] + values[..., 2] * _GREY[2]
    white = np.maximum(values, grey[..., None] * 1.5 + 0.5)
    values *= image_weight
    white *= 1.0 - image_weight
    values += white
    values += unit(layer)
    values += unit(layer[:, ::-1, ::-1])  # a second fall, from the opposite corner
    return to_pixels(values)


FROST_DRAWS = 3  # which photograph, which row, which column
TEXTURE_FILES = (
    *("frost1.png", "frost2.png", "frost3.png"),
    *("frost4.jpg", "frost5.jpg", "frost6.jpg"),
)
# The photographs that ship: these files at a fifth of their size, as CIFAR-C takes them.
SHRUNK_FOLDER = Path(__file__).with_name("frost")
SHRUNK_BY = 0.2
SHRUNK_SIDES = (63, 97)  # height and width that the smallest of them has
_REMEDY = (
    "`ttapca data get frost` fetches them; `ttapca.datasets.fetch_frost(root)` does so from Python "
    "and returns the folder to pass as `textures=`."
)


def frost(
    images: Pixels,
    numbers: Numbers,
    *,
    textures: tuple[Pixels, ...],
    image_weight: float,
    frost_weight: float,
    texture_scale: float,
    texture_count: int,
) -> Pixels:
    """Lay a random piece of a photograph of frost over the image."""
    height, width = images.shape[1:3]
    chosen = integers(numbers[:, 0], texture_count)
    values = image_weight * images
    for number in np.unique(chosen):
        members = np.flatnonzero(chosen == number)
        texture = shrunk(textures[number], texture_scale, height, width)
        pieces = np.lib.stride_tricks.sliding_window_view(texture, (height, width), axis=(0, 1))
        rows, columns = texture.shape[0] - height, texture.shape[1] - width
        top = np.floor(numbers[members, 1] * rows).astype(np.intp)
        left = np.floor(numbers[members, 2] * columns).astype(np.intp)
        values[members] += frost_weight * pieces[top, left].transpose(0, 2, 3, 1)
    np.minimum(values, WHITE, out=values)
    return values.astype(np.uint8)


def choose_textures(
    given: str | Path | tuple[Pixels, ...] | None, height: int, width: int, scale: float
) -> tuple[tuple[Pixels, ...], float]:
    """Return the photographs for images of a size, and by how much they are still to be shrunk."""
    # If none are given, images as small as CIFAR's get the photographs that ship.
    if isinstance(given, tuple):
        return given, scale
    if given is None and textures_ship(height, width, scale):
        return _shrunk_textures(), 1.0
    return load_textures(given), scale


def textures_ship(height: int, width: int, scale: float) -> bool:
    """Return whether frost would shrink the original photographs to the ones that ship."""
    return scale == SHRUNK_BY and height < SHRUNK_SIDES[0] and width < SHRUNK_SIDES[1]


@cache
def _shrunk_textures() -> tuple[Pixels, ...]:
    names = (Path(name).with_suffix(".png") for name in TEXTURE_FILES)
    return tuple(_read_texture(SHRUNK_FOLDER / name) for name in names)


def load_textures(folder: str | Path | None) -> tuple[Pixels, ...]:
    """Read the six photographs of frost from a folder: RGB, (height, width, 3), in order."""
    if folder is None:
        raise DataNotFoundError(f"Frost needs a folder of photographs; none was given. {_REMEDY}")
    folder = Path(folder)
    missing = [name for name in TEXTURE_FILES if not (folder / name).is_file()]
    if missing:
        raise DataNotFoundError(
            f"Frost needs {len(TEXTURE_FILES)} photographs; {folder} lacks {', '.join(missing)}. "
            f"{_REMEDY}"
        )
    return tuple(_read_texture(folder / name) for name in TEXTURE_FILES)


def _read_texture(path: Path) -> Pixels:
    try:
        return read_picture(path)
    except DataFormatError as error:
        raise DataFormatError(
            f"Frost's photographs must be readable images; {error} Delete it. {_REMEDY}"
        ) from error


def shrunk(texture: Pixels, scale: float, height: int, width: int) -> Pixels:
    """Shrink a photograph, but never to less than one row and column more than the image."""
    rows, columns = texture.shape[:2]
    factor = max(scale, (height + 1) / rows, (width + 1) / columns)
    if factor == scale:
        return np.asarray(cv2.resize(texture, (0, 0), fx=scale, fy=scale))
    size = (max(round(columns * factor), width + 1), max(round(rows * factor), height + 1))
    return np.asarray(cv2.resize(texture, size))


def _fractal_side(height: int, width: int) -> int:
    """Return the smallest power of two that covers the image."""
    return 1 << (max(height, width) - 1).bit_length()


def fog_draws(height: int, width: int) -> int:
    """Return how many numbers an image needs: one for each point of the fractal but one."""
    return _fractal_side(height, width) ** 2 - 1


def fog(images: Pixels, numbers: Numbers, *, amount: float, decay: float) -> Pixels:
    """Add a cloud that is rough at every scale, and dim the sum to the old brightness."""
    height, width = images.shape[1:3]
    cloud = plasma(numbers, _fractal_side(height, width), decay)[:, :height, :width, None]
    values = unit(images)
    brightest = values.max(axis=(1, 2, 3), keepdims=True)
    values += amount * cloud
    values *= brightest / (brightest + amount)
    return to_pixels(values)


def plasma(numbers: Numbers, side: int, decay: float) -> Numbers:
    """Return fractal landscapes on a torus by the diamond-square algorithm, from 0 to 1."""
    # The middle of every square, then that of every edge, becomes the mean of its four neighbours
    # plus a random height, which shrinks by `decay` squared per round as in the published
    # generator. Numbers (n, side * side - 1) give heights (n, side, side); the side is a power of
    # two.
    heights = np.zeros((len(numbers), side, side))
    used, step, roughness = 0, side, _ROUGHNESS
    while step >= 2:
        half, cells = step // 2, (side // step) ** 2
        draws = between(numbers[:, used : used + 3 * cells], -(roughness**2), roughness**2)
        middle, right, below = draws.reshape(len(numbers), 3, side // step, side // step).swapaxes(
            0, 1
        )
        corners = heights[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        heights[:, half::step, half::step] = (pairs + np.roll(pairs, -1, axis=2)) / 4 + middle
        centres = heights[:, half::step, half::step]
        across = centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=2)
        down = centres + np.roll(centres, 1, axis=2) + corners + np.roll(corners, -1, axis=1)
        heights[:, ::step, half::step] = across / 4 + right
        heights[:, half::step, ::step] = down / 4 + below
        used, step, roughness = used + 3 * cells, half, roughness / decay
    heights -= heights.min(axis=(1, 2), keepdims=True)
    heights /= heights.max(axis=(1, 2), keepdims=True)
    return heights


_WATER = np.array([175, 238, 238]) / WHITE  # pale turquoise
_MUD = np.array([63, 42, 20]) / WHITE  # brown
_OPAQUE = 0.8  # mud thinner than this does not stick
_EDGE_LOW, _EDGE_HIGH = 50, 150  # Canny's two thresholds for the rim of a drop
_FARTHEST = 20.0  # pixels from a rim beyond which a drop is flat
_RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])  # light from the upper left


def spatter(
    images: Pixels,
    numbers: Numbers,
    *,
    mean: float,
    deviation: float,
    smoothing: float,
    threshold: float,
    strength: float,
    liquid: Literal["water", "mud"],
) -> Pixels:
    """Put drops on the lens at the pixels whose smoothed noise exceeds a threshold."""
    # Water brightens the image, mud covers it. `strength` is the opacity of water, or the deviation
    # of the blur of mud's edge.
    noise = normals(numbers, mean, deviation).reshape(images.shape[:3])
    layer = smooth(noise, gaussian_kernel(smoothing))
    values = unit(images)
    if liquid == "water":
        layer[layer < threshold] = 0.0
        drops = np.minimum(layer * WHITE, WHITE).astype(np.uint8)
        shine = np.stack([_shine(drop) for drop in drops])[..., None]
        return to_pixels(values + strength * shine * _WATER)
    cover = smooth((layer > threshold).astype(np.float64), gaussian_kernel(strength))[..., None]
    cover[cover < _OPAQUE] = 0.0
    return to_pixels(values * (1.0 - cover) + _MUD * cover)


def _shine(drop: Pixels) -> Numbers:
    """Return how much light each pixel of a wet lens adds, at most 1, along the rims of drops."""
    rims = cv2.Canny(drop, _EDGE_LOW, _EDGE_HIGH)
    distance = cv2.distanceTransform(WHITE - rims, cv2.DIST_L2, 5)
    near = cv2.blur(np.minimum(distance, _FARTHEST), (3, 3)).astype(np.uint8)
    relief = cv2.filter2D(cv2.equalizeHist(near), cv2.CV_8U, _RELIEF)
    light = drop * cv2.blur(relief, (3, 3)).astype(np.float64)
    # A lens on which no drop landed stays clean; the published generator divides 0 by 0 here.
    return np.asarray(light / max(light.max(), 1.0))
