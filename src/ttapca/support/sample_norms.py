"""Layers that normalise every sample by itself: GroupNorm, and LayerNorm over the last dimension.

Here they are run without their own scale and shift, with channels in the second dimension, so that
nobody else has to ask which of the two a layer is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.support.wrapping import Patches, Switch, Wrapper, surely

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


class _EveryLayerCalled(Wrapper):
    """Runs a `nn.TransformerEncoderLayer` without its fast path, while a surface is enabled."""

    def __init__(self, layer: nn.Module, surface: Switch) -> None:
        self._layer = layer
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self.surface.enabled:
            return forward(*args, **kwargs)
        patches = Patches()
        inside = functools.partial(self._hooked, patches, forward, args, kwargs)
        return surely(inside, then=patches.remove)

    def _hooked(self, patches: Patches, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Torch does not take the fast path of a layer that has hooks; this one changes nothing.
        patches.hook_output(self._layer, lambda *_: None)
        return forward(*args, **kwargs)


def call_every_layer(
    model: nn.Module, layers: Sequence[nn.Module], surface: Switch, patches: Patches
) -> None:
    """Make sure that these layers are called.

    In evaluation mode and without gradients, `nn.TransformerEncoderLayer` computes everything in
    one function of torch and never calls its LayerNorm layers.

    Args:
        model: Any module.
        layers: Some of its layers.
        surface: While it is disabled, everything is as it was.
        patches: Take what is put on the model for that.
    """
    these = {id(layer) for layer in layers}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            id(inner) in these for inner in module.modules()
        ):
            patches.wrap(module, _EveryLayerCalled(module, surface))
