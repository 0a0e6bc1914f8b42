"""Layers that normalise every sample by itself: GroupNorm, and LayerNorm over the last dimension.

Here they are run without their own scale and shift, with channels in the second dimension, so that
nobody else has to ask which of the two a layer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.support.wrapping import Wrapper, WrapperHandle, surely, wrap_forward

SampleNorm = nn.GroupNorm | nn.LayerNorm


def is_sample_norm(layer: nn.Module) -> TypeGuard[SampleNorm]:
    """Return whether a layer is of this kind.

    A LayerNorm over several dimensions has no channels. A layer with a `forward` of its own may
    have them somewhere else, as the `LayerNorm2d` of many networks, or do more than normalise, as
    the `GroupNormAct` of timm.

    Example:
        >>> [is_sample_norm(nn.LayerNorm(shape)) for shape in (4, (4, 8, 8))]
        [True, False]
    """
    if isinstance(layer, nn.GroupNorm):
        return type(layer).forward is nn.GroupNorm.forward
    if not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) != 1:
        return False
    return type(layer).forward is nn.LayerNorm.forward


def channels_of(layer: SampleNorm) -> int:
    """Return how many channels a layer has.

    Example:
        >>> channels_of(nn.GroupNorm(2, 8)), channels_of(nn.LayerNorm(6))
        (8, 6)
    """
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels
    return layer.normalized_shape[0]


def normalised_alone(layer: SampleNorm, x: Tensor) -> Tensor:
    """Return what a layer makes of its input before its own scale and shift.

    Returns:
        Shape (batch, channels, ...), for a LayerNorm as well.

    Example:
        >>> import torch
        >>> normalised_alone(nn.LayerNorm(6), torch.rand(5, 9, 6)).shape  # 9 tokens
        torch.Size([5, 6, 9])
    """
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps).movedim(-1, 1)


def in_own_layout(layer: SampleNorm, values: Tensor) -> Tensor:
    """Return values of shape (batch, channels, ...) as the layer itself would lay them out."""
    return values if isinstance(layer, nn.GroupNorm) else values.movedim(1, -1)


class Switch(Protocol):
    """Something that is switched on or off, such as a surface."""

    enabled: bool


class _EveryLayerCalled(Wrapper):
    """Runs a `nn.TransformerEncoderLayer` without its fast path, while a surface is enabled."""

    def __init__(self, layer: nn.Module, surface: Switch) -> None:
        self._layer = layer
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self.surface.enabled:
            return forward(*args, **kwargs)
        # Torch does not take the fast path of a layer that has hooks.
        handle = self._layer.register_forward_pre_hook(_nothing)
        return surely(lambda: forward(*args, **kwargs), then=handle.remove)


def _nothing(_layer: nn.Module, _args: tuple[Any, ...]) -> None:
    """Change nothing."""


def call_every_layer(
    model: nn.Module, layers: Sequence[nn.Module], surface: Switch
) -> list[WrapperHandle]:
    """Make sure that these layers are called, and return handles to undo that.

    In evaluation mode and without gradients, `nn.TransformerEncoderLayer` computes everything in
    one function of torch and never calls its LayerNorm layers.

    Args:
        model: Any module.
        layers: Some of its layers.
        surface: While it is disabled, everything is as it was.
    """
    these = {id(layer) for layer in layers}
    return [
        wrap_forward(module, _EveryLayerCalled(module, surface))
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        and any(id(inner) in these for inner in module.modules())
    ]
