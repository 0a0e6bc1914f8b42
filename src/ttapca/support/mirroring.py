"""Images with left and right exchanged, and what a model says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def mirror_images(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Return the arguments of a model with the images among them mirrored.

    The images are the first tensor of floating-point numbers of shape (batch, channels, height,
    width). Return None where there is none.

    Example:
        >>> import torch
        >>> (images, other), _ = mirror_images((torch.tensor([[[[1.0, 2.0]]]]), 3), {})
        >>> images.tolist(), other
        ([[[[2.0, 1.0]]]], 3)
    """
    for number, value in enumerate(args):
        if _are_images(value):
            return (*args[:number], value.flip(-1), *args[number + 1 :]), dict(kwargs)
    for name, value in kwargs.items():
        if _are_images(value):
            return tuple(args), {**kwargs, name: value.flip(-1)}
    return None


def _are_images(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()


def mirror_back(logits: Tensor) -> Tensor | None:
    """Return the logits of mirrored images as those of the images.

    One prediction per image, shape (batch,) or (batch, classes), stays; a prediction for every
    pixel, shape (batch, classes, height, width), is mirrored again. Return None for other shapes,
    of which nobody knows where left and right are.

    Example:
        >>> import torch
        >>> mirror_back(torch.tensor([[[[1.0, 2.0]]]])).tolist()
        [[[[2.0, 1.0]]]]
    """
    if logits.dim() == 4:
        return logits.flip(-1)
    return logits if logits.dim() in (1, 2) else None
