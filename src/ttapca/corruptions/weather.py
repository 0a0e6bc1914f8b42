"""Weather: snow, frost and fog between the camera and the scene.

Each function takes images, the numbers from (0, 1) that belong to them, and the parameters of one
severity by name; it returns new images.
"""

from __future__ import annotations

import cv2
import numpy as np

from ttapca.corruptions.motion import blur_along
from ttapca.corruptions.pixels import (
    WHITE,
    Numbers,
    Pixels,
    apply_operator,
    to_pixels,
    unit,
    zoom_operator,
)
from ttapca.corruptions.random_streams import between, integers, normals

_GREY = np.array([0.299, 0.587, 0.114])  # luma of ITU-R BT.601, which OpenCV uses
_UP = -90.0  # degrees, clockwise from the right: snow streaks run from here
_ROUGHNESS = 100.0  # of the fractal's first scale; only its ratio to later scales shows


def snow_draws(height: int, width: int) -> int:
    """How many numbers `snow` needs for an image: one a pixel, and the direction of the fall."""
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
    """Whiten the image and let flakes fall: bright noise, enlarged, blurred downwards."""
    count, height, width, _ = images.shape
    noise = normals(numbers[:, :-1], mean, deviation).reshape(count, height, width, 1)
    flakes = apply_operator(zoom_operator(height, width, (zoom,)), noise)
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
    for number in range(texture_count):
        members = np.flatnonzero(chosen == number)
        texture = _scaled(textures[number], texture_scale, height, width)
        pieces = np.lib.stride_tricks.sliding_window_view(texture, (height, width), axis=(0, 1))
        rows, columns = texture.shape[0] - height, texture.shape[1] - width
        top = np.floor(numbers[members, 1] * rows).astype(np.intp)
        left = np.floor(numbers[members, 2] * columns).astype(np.intp)
        values[members] += frost_weight * pieces[top, left].transpose(0, 2, 3, 1)
    np.minimum(values, WHITE, out=values)
    return values.astype(np.uint8)


def _scaled(texture: Pixels, scale: float, height: int, width: int) -> Pixels:
    """Shrink a photograph, but never to less than one row and column more than the image."""
    rows, columns = texture.shape[:2]
    factor = max(scale, (height + 1) / rows, (width + 1) / columns)
    if factor == scale:
        return np.asarray(cv2.resize(texture, (0, 0), fx=scale, fy=scale))
    size = (max(round(columns * factor), width + 1), max(round(rows * factor), height + 1))
    return np.asarray(cv2.resize(texture, size))


def _fractal_side(height: int, width: int) -> int:
    """The smallest power of two that covers the image."""
    return 1 << (max(height, width) - 1).bit_length()


def fog_draws(height: int, width: int) -> int:
    """How many numbers `fog` needs for an image: one a point of the fractal except the first."""
    return _fractal_side(height, width) ** 2 - 1


def fog(images: Pixels, numbers: Numbers, *, amount: float, decay: float) -> Pixels:
    """Add a cloud that is rough at every scale, and dim the whole to where it was."""
    height, width = images.shape[1:3]
    cloud = plasma(numbers, _fractal_side(height, width), decay)[:, :height, :width, None]
    values = unit(images)
    brightest = values.max(axis=(1, 2, 3), keepdims=True)
    values += amount * cloud
    values *= brightest / (brightest + amount)
    return to_pixels(values)


def plasma(numbers: Numbers, side: int, decay: float) -> Numbers:
    """Grow fractal landscapes on a torus by the diamond-square algorithm.

    Each round halves the grid: the middle of every square, then the middle of every edge, becomes
    the mean of its four neighbours plus a random height. Heights fall by `decay` squared a round,
    as in the published generator, which multiplies a uniform draw of that range by it once more.

    Args:
        numbers: From (0, 1), (n, side * side - 1).
        side: A power of two.
        decay: Above 1 for a landscape smoother than noise.

    Returns:
        Heights from 0 to 1, (n, side, side).
    """
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
