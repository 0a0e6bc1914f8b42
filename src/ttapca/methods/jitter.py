"""Another view of the same images: a few random changes that leave their meaning alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ttapca.errors import ShapeError

# As in the augmentation of CoTTA and ROID; a shift is in parts of the image's size.
BRIGHTNESS = (0.6, 1.4)
CONTRAST = (0.7, 1.3)
LARGEST_SHIFT = 1 / 16


class ImageJitter:
    """Flip, shift, and change brightness and contrast, each image by its own draw.

    All images of a batch are changed at once. Values are not clipped: the images may have been
    normalised, and their range is not known.

    Args:
        seed: Of the generator that all draws come from; the caller's random state is not touched.

    Example:
        >>> jitter = ImageJitter(seed=0)
        >>> images = torch.arange(12.0).reshape(1, 1, 3, 4)
        >>> first = jitter(images)
        >>> jitter.reset()
        >>> torch.equal(jitter(images), first)
        True
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._generator = torch.Generator()
        self.reset()

    def reset(self) -> None:
        """Start the draws again."""
        self._generator.manual_seed(self.seed)

    def __call__(self, images: Tensor) -> Tensor:
        """Give one new view of each image.

        Args:
            images: Shape (batch, channels, height, width); left as they were.

        Raises:
            ShapeError: When these are no images.
        """
        if images.dim() != 4:
            raise ShapeError(
                "Views are made of images of shape (batch, channels, height, width); found "
                f"{tuple(images.shape)}. Switch them off, for `roid` by `consistency=False`."
            )
        # Drawn in float64 on the CPU, so that every device and precision has the same views.
        draws = torch.rand(5, len(images), generator=self._generator, dtype=torch.float64)
        flip, down, right, brightness, contrast = draws.to(images.device)
        rows = _shifted(images.shape[2], down)  # (batch, height)
        columns = _shifted(images.shape[3], right)  # (batch, width)
        columns = torch.where(flip[:, None] < 0.5, images.shape[3] - 1 - columns, columns)
        picked = images.movedim(1, 3)[
            torch.arange(len(images), device=images.device)[:, None, None],
            rows[:, :, None],
            columns[:, None, :],
        ].movedim(3, 1)
        # In the order that images come in: torch 2.13 crashes in the backward pass of GroupNorm on
        # images whose channels are last in memory.
        picked = picked.contiguous()
        bright = picked * _between(BRIGHTNESS, brightness).to(images.dtype)
        mean = bright.mean((1, 2, 3), keepdim=True)
        return torch.lerp(mean, bright, _between(CONTRAST, contrast).to(images.dtype))


def _shifted(size: int, draws: Tensor) -> Tensor:
    """Where each pixel of a shifted axis comes from, reflected at the borders: (batch, size)."""
    most = max(1, round(size * LARGEST_SHIFT))
    shift = (draws * (2 * most + 1)).long() - most  # (batch,)
    place = (torch.arange(size, device=draws.device) + shift[:, None]).abs()
    return (size - 1 - (size - 1 - place).abs()).clamp(min=0)  # an axis of one pixel has no border


def _between(limits: tuple[float, float], draws: Tensor) -> Tensor:
    low, high = limits
    return (low + (high - low) * draws).view(-1, 1, 1, 1)
