"""What the texture of an image looks like, in a few numbers that hardly depend on what it shows.

Band energies say how much detail an image has, but not of which kind: noise, the blocks of a
compressed image and sharp edges can have the same energy. What tells them apart is how differences
of neighbouring pixels are distributed. Noise has many medium ones, edges and blocks few large ones.
So for several kinds of differences three averages of their size are kept, of which the first looks
at small differences most, and the last at large ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Pixels that are compared are so far apart, along rows and along columns.
DISTANCES = (1, 2)
# Three averages for each distance and direction, and for the curvature.
TEXTURES = 3 * (2 * len(DISTANCES) + 1)

# Numbers that are worked on at once, so that they stay in the processor's cache.
TOGETHER = 2**16


@torch.no_grad()
def textures(images: Tensor) -> Tensor:
    """Return three averages of the size of each kind of difference between near pixels.

    Colours are averaged first. The kinds are differences along rows and columns for each of
    `DISTANCES`, and the curvature: four times a pixel less its four neighbours. The averages are
    the squared mean of square roots, the mean, and the root of the mean square.

    Args:
        images: Shape (batch, channels, height, width), at least 5 x 5 pixels.

    Returns:
        Shape (batch, `TEXTURES`), never negative, in the units of the images.

    Example:
        >>> stripes = torch.tensor([0.0, 1.0] * 3).expand(1, 1, 6, 6)
        >>> [round(value, 2) for value in textures(stripes)[0].tolist()]
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    """
    precise = torch.promote_types(images.dtype, torch.float32)
    parts = torch.split(images, max(1, TOGETHER // images[0].numel()))
    return torch.cat([_textures(part.mean(1, dtype=precise)) for part in parts])


def _textures(grey: Tensor) -> Tensor:
    """Return the averages for images without colours, (batch, height, width)."""
    found = list(_differences(grey))
    # One table for all kinds, zero beyond their ends: of small images, each step takes its time.
    table = grey.new_zeros(len(found), *grey.shape)
    for each, difference in zip(table, found, strict=True):
        each[:, : difference.shape[1], : difference.shape[2]] = difference
    size = table.abs_().flatten(2)  # (kinds, batch, pixels)
    count = grey.new_tensor([each[0].numel() for each in found])[:, None]
    root_mean_square = torch.linalg.vector_norm(size, dim=2) / count.sqrt()
    mean = size.sum(2) / count
    mean_root = size.sqrt_().sum(2) / count
    averages = torch.stack([mean_root.square(), mean, root_mean_square], 2)
    return averages.transpose(0, 1).flatten(1)


def _differences(grey: Tensor) -> Iterator[Tensor]:
    for distance in DISTANCES:
        yield grey[..., distance:] - grey[..., :-distance]
        yield grey[..., distance:, :] - grey[..., :-distance, :]
    across = grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    along = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1]
    yield 4 * grey[..., 1:-1, 1:-1] - across - along
