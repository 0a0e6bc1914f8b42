"""Spatter: drops of water or mud on the lens."""

from __future__ import annotations

from typing import Literal

import cv2
import numpy as np

from ttapca.corruptions.pixels import (
    WHITE,
    Numbers,
    Pixels,
    gaussian_kernel,
    smooth,
    to_pixels,
    unit,
)
from ttapca.corruptions.random_streams import normals

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
    """Let drops lie where smoothed noise exceeds a threshold.

    Args:
        images: (n, height, width, 3)
        numbers: From (0, 1), one a pixel.
        mean: Of the noise.
        deviation: Of the noise.
        smoothing: Deviation of the Gaussian that rounds the drops.
        threshold: Above it there is liquid.
        strength: Opacity of water, or deviation of the blur of mud's edge.
        liquid: Water brightens the image; mud covers it.

    Returns:
        Images of the same shape.
    """
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
    """How much light each pixel of a wet lens adds, at most 1: relief along the rims of drops."""
    rims = cv2.Canny(drop, _EDGE_LOW, _EDGE_HIGH)
    distance = cv2.distanceTransform(WHITE - rims, cv2.DIST_L2, 5)
    near = cv2.blur(np.minimum(distance, _FARTHEST), (3, 3)).astype(np.uint8)
    relief = cv2.filter2D(cv2.equalizeHist(near), cv2.CV_8U, _RELIEF)
    light = drop * cv2.blur(relief, (3, 3)).astype(np.float64)
    # A lens on which no drop landed stays clean; the published generator divides 0 by 0 here.
    return np.asarray(light / max(light.max(), 1.0))
