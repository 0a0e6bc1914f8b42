"""Images between their pixels, by scipy: what oracles of moved pixels share."""

from __future__ import annotations

import numpy as np
from scipy import ndimage


def sampled(image: np.ndarray, rows: np.ndarray, columns: np.ndarray, mode: str) -> np.ndarray:
    """The image at these rows and columns, linear between pixels; `mode` is what lies outside."""
    channels = [
        ndimage.map_coordinates(image[..., each], [rows, columns], order=1, mode=mode)
        for each in range(3)
    ]
    return np.stack(channels, axis=-1)
