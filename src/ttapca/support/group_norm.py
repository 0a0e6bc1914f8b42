"""A workaround for a bug in torch's GroupNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.support.wrapping import Patches, Wrapper, temporary_patches


class _Contiguous(Wrapper):
    """Gives a GroupNorm layer contiguous images where gradients are taken."""

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        return forward(input.contiguous() if torch.is_grad_enabled() else input)


def make_gradients_safe(model: nn.Module, patches: Patches) -> None:
    """Make gradients through GroupNorm safe, by patches that are added to others.

    On a CPU, torch's backward pass of GroupNorm crashes the process if images are laid out with
    channels last (seen in torch 2.13). So the layers get a contiguous copy.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
        >>> patches = Patches()
        >>> make_gradients_safe(model, patches)
        >>> x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> model(x).sum().backward()
        >>> patches.remove()
    """
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            patches.wrap(module, _Contiguous())


@contextmanager
def safe_gradients(model: nn.Module) -> Iterator[None]:
    """Apply `make_gradients_safe` inside a block."""
    with temporary_patches() as patches:
        make_gradients_safe(model, patches)
        yield
