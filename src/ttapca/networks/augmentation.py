"""Random crops, flips and cut-outs of whole batches at once.

Everything works on uint8 tensors, a quarter of the memory of floats, and draws from a generator
that is passed in. Crop and flip are one look-up of pixels by row and column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.errors import OptionError


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images.

    Attributes:
        padding: Pixels of black around an image before a part of the old size is cut out at random.
        flip: Whether half of the images are mirrored.
        cutout: Side of a square at a random place that is blanked; 0 for none.

    Raises:
        OptionError: A number is negative.

    Example:
        >>> images = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
        >>> augment = Augmentation(padding=4, flip=True, cutout=8)
        >>> augment(images, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3, 32, 32])
    """

    padding: int = 4
    flip: bool = True
    cutout: int = 0

    def __post_init__(self) -> None:
        """Refuse negative numbers."""
        for name in ("padding", "cutout"):
            if getattr(self, name) < 0:
                raise OptionError(f"`{name}` is at least 0; found {getattr(self, name)}.")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment a batch.

        Args:
            images: Pixels, uint8, shape (batch, channels, height, width); left as they were.
            generator: Where the numbers come from; as many are drawn whatever they turn out to be.
        """
        if self.padding or self.flip:
            images = crop_and_flip(images, self.padding, self.flip, generator)
        return cut_out(images, self.cutout, generator) if self.cutout else images


def crop_and_flip(images: Tensor, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift each image by up to `padding` pixels, black moving in, and mirror half of them.

    Args:
        images: Shape (batch, channels, height, width).
        padding: The largest shift.
        flip: Whether to mirror.
        generator: Where the numbers come from.

    Example:
        >>> images = torch.tensor([[[[1, 2, 3]]]])
        >>> crop_and_flip(images, 0, False, torch.Generator()).tolist()
        [[[[1, 2, 3]]]]
    """
    batch, _, height, width = images.shape
    shifts = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator)
    rows = shifts[0] + torch.arange(height)  # (batch, height)
    columns = torch.arange(width).expand(batch, width)
    if flip:
        mirrored = torch.randint(0, 2, (batch, 1), generator=generator).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    columns = shifts[1] + columns  # (batch, width)
    padded = F.pad(images, (padding, padding, padding, padding))
    numbers = torch.arange(batch)[:, None, None]
    # Channels come last where indices stand on both sides of a slice.
    found = padded[numbers, :, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2).contiguous()


def cut_out(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Blank a square of each image with the image's own mean; its centre lies anywhere inside.

    Args:
        images: Pixels, shape (batch, channels, height, width); left as they were.
        side: Of the square; less of it remains at the borders.
        generator: Where the numbers come from.

    Example:
        >>> images = torch.tensor([[[[8, 0], [0, 0]]]], dtype=torch.uint8)
        >>> cut_out(images, 4, torch.Generator().manual_seed(0)).tolist()
        [[[[2, 2], [2, 2]]]]
    """
    batch, _, height, width = images.shape
    top = torch.randint(0, height, (batch, 1), generator=generator) - side // 2
    left = torch.randint(0, width, (batch, 1), generator=generator) - side // 2
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows = (rows >= top) & (rows < top + side)  # (batch, height)
    in_columns = (columns >= left) & (columns < left + side)  # (batch, width)
    square = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    mean = images.float().mean((2, 3), keepdim=True).round().to(images.dtype)
    return torch.where(square, mean, images)
