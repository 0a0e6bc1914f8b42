"""What a filter made of an image, as a picture for a person."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Share of an image's variance that may be left when its pixels are found from what a filter saw.
UNEXPLAINED = 1e-3


def before_and_after(
    image: Tensor, given: Tensor, made: Tensor
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """Return an image before and after a filter, uint8, (height, width, 3).

    A network normalises each channel before its first layer, and the filter sees that. How pixels
    follow from what it saw is found from the image itself, by least squares.

    Args:
        image: Pixels from 0 to 1, shape (channels, height, width).
        given: What the filter was given of it.
        made: What it made of that.

    Returns:
        None where the filter does not act on images of one or three channels, or where pixels
        cannot be found from what it was given.

    Example:
        >>> image = torch.rand(3, 4, 4)
        >>> before, after = before_and_after(image, 2 * image - 1, 2 * image - 1)
        >>> bool((before == after).all()), before.shape
        (True, (4, 4, 3))
    """
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        return None
    pixels, seen, found = (each.detach().double().flatten(1) for each in (image, given, made))
    middle, centre = pixels.mean(1, keepdim=True), seen.mean(1, keepdim=True)
    spread = (seen - centre).square().sum(1, keepdim=True).clamp(min=1e-12)
    slope = ((seen - centre) * (pixels - middle)).sum(1, keepdim=True) / spread
    left = pixels - middle - slope * (seen - centre)
    if float(left.square().sum()) > UNEXPLAINED * float((pixels - middle).square().sum()) + 1e-9:
        return None
    after = middle + slope * (found - centre)
    return _as_picture(image.detach().double()), _as_picture(after.reshape(image.shape))


def _as_picture(pixels: Tensor) -> NDArray[np.uint8]:
    shown = (255 * pixels.clamp(0, 1)).round().to(torch.uint8).expand(3, -1, -1)
    return np.ascontiguousarray(shown.permute(1, 2, 0).numpy())
