"""From `Images` to what a network takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.datasets.images import Images
from ttapca.errors import OptionError, ShapeError


def to_tensor(images: NDArray[np.uint8]) -> Tensor:
    """Copy pixels into a float tensor in [0, 1], as torchvision's `ToTensor` does.

    Args:
        images: Pixels, uint8, `(batch, height, width, channels)`.

    Returns:
        A float32 tensor, `(batch, channels, height, width)`.

    Raises:
        ShapeError: `images` does not have four axes.

    Example:
        >>> import numpy as np
        >>> to_tensor(np.full((1, 2, 2, 3), 255, np.uint8)).shape
        torch.Size([1, 3, 2, 2])
    """
    if images.ndim != 4:
        raise ShapeError(
            f"Pixels must have shape (batch, height, width, channels); found {images.shape}. "
            "Give one image as image[None]."
        )
    # `astype` always copies, so a read-only memory map never leaks into a writable tensor.
    planes = images.transpose(0, 3, 1, 2).astype(np.float32, order="C")
    return torch.from_numpy(planes).div_(255)


@dataclass(frozen=True, eq=False)
class TensorBatches:
    """A loader: pairs of image and label tensors, in order, as often as you iterate.

    Args:
        data: Where the images come from.
        size: Images a batch; the last batch may have fewer.
        order: Which images, in which order; all as they come by default. Nothing but a batch at a
            time is copied.

    Example:
        >>> import numpy as np
        >>> data = Images(np.zeros((5, 2, 2, 3), np.uint8), np.zeros(5, np.int64), ("a",))
        >>> [tuple(pixels.shape) for pixels, labels in TensorBatches(data, 4)]
        [(4, 3, 2, 2), (1, 3, 2, 2)]
    """

    data: Images
    size: int
    order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Refuse a size that gives no batch."""
        if self.size < 1:
            raise OptionError(f"A batch must hold at least 1 image; found size={self.size}.")

    def __len__(self) -> int:
        """The number of batches."""
        images = len(self.data) if self.order is None else len(self.order)
        return -(-images // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs `(batch, channels, height, width)` in [0, 1] and `(batch,)`."""
        for batch in self._batches():
            yield to_tensor(batch.images), torch.from_numpy(batch.labels.copy())

    def _batches(self) -> Iterator[Images]:
        if self.order is None:
            yield from self.data.batches(self.size)
            return
        for start in range(0, len(self.order), self.size):
            yield self.data.subset(self.order[start : start + self.size])
