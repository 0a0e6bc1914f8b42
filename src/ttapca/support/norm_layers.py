"""BatchNorm, GroupNorm and LayerNorm layers: find them, and run them in parts.

GroupNorm and LayerNorm over the last dimension are called sample norms here; their values have the
channels in the second dimension, so that callers need not ask which of the two a layer is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import AttachError
from ttapca.support.channel_moments import Moments, normalised
from ttapca.support.tensors import as_on, at_least_float32
from ttapca.support.wrapping import Patches, Result, Switch, Wrapper, surely, temporary_patches


def with_running_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return by path the BatchNorm layers that have a choice: others always use the batch's."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def running_statistics(layer: _BatchNorm) -> Moments:
    """Return mean and variance of the source, or raise `AttachError` if there are none."""
    if layer.running_mean is None or layer.running_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    return layer.running_mean, layer.running_var


def is_plain(layer: _BatchNorm) -> bool:
    """Return whether a layer only normalises: a subclass, as in timm, may have an activation."""
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def moved_to_source(x: Tensor, moments: Moments, layer: _BatchNorm) -> Tensor:
    """Return the input that a layer normalises to the same values as x by other moments."""
    mean, var = (each.to(x) for each in running_statistics(layer))
    return normalised(x, moments, (var + layer.eps).sqrt(), mean, layer.eps)


def by_running_statistics(layer: _BatchNorm, run: Callable[[], Result]) -> Result:
    """Run a layer's own `forward` with its running statistics, in training mode as well."""
    training = layer.training

    def run_evaluating() -> Result:
        layer.training = False
        return run()

    return surely(run_evaluating, then=lambda: setattr(layer, "training", training))


SampleNorm = nn.GroupNorm | nn.LayerNorm


def is_sample_norm(layer: nn.Module) -> TypeGuard[SampleNorm]:
    """Return whether a layer is a GroupNorm, or a LayerNorm over the last dimension.

    A layer with a `forward` of its own may have its channels somewhere else, or do more.
    """
    if isinstance(layer, nn.GroupNorm):
        return type(layer).forward is nn.GroupNorm.forward
    if not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) != 1:
        return False
    return type(layer).forward is nn.LayerNorm.forward


def channels_of(layer: SampleNorm) -> int:
    """Return how many channels a layer has."""
    return layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.normalized_shape[0]


def normalised_alone(layer: SampleNorm, x: Tensor) -> Tensor:
    """Return x normalised without scale and shift, in shape (batch, channels, ...)."""
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps).movedim(-1, 1)


def in_own_layout(layer: SampleNorm, values: Tensor) -> Tensor:
    """Return values of shape (batch, channels, ...) in the layout of the layer's own output."""
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

        def run() -> Any:
            # Torch does not take the fast path of a layer that has hooks; this one changes nothing.
            patches.hook_output(self._layer, lambda *_: None)
            return forward(*args, **kwargs)

        return surely(run, then=patches.remove)


def call_every_layer(
    model: nn.Module, layers: Sequence[nn.Module], surface: Switch, patches: Patches
) -> None:
    """Make a model call these layers while a surface is enabled, by patches that are added.

    Without gradients, `nn.TransformerEncoderLayer` never calls its LayerNorm layers.
    """
    wanted = {id(layer) for layer in layers}
    for module in model.modules():
        inside = {id(inner) for inner in module.modules()}
        if isinstance(module, nn.TransformerEncoderLayer) and wanted & inside:
            patches.wrap(module, _EveryLayerCalled(module, surface))


class _Contiguous(Wrapper):
    """Gives a GroupNorm layer contiguous images if gradients are taken."""

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        return forward(input.contiguous() if torch.is_grad_enabled() else input)


def make_gradients_safe(model: nn.Module, patches: Patches) -> None:
    """Make gradients of GroupNorm safe: on a CPU channels last would crash torch (seen in 2.13)."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            patches.wrap(module, _Contiguous())


@contextmanager
def safe_gradients(model: nn.Module) -> Iterator[None]:
    """Apply `make_gradients_safe` inside a block."""
    with temporary_patches() as patches:
        make_gradients_safe(model, patches)
        yield


Forward = Callable[..., Any]


class NormKind:
    """A layer that normalises by given moments; values have channels second."""

    layer: Any
    channels: int

    def values(self, x: Tensor) -> Tensor:
        """Return what is normalised, shape (batch, channels, ...)."""
        return at_least_float32(x)

    def source(self, like: Tensor) -> Moments:
        """Return mean and variance of the source."""
        raise NotImplementedError

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what a normalised channel is multiplied by, and what is added to it."""
        raise NotImplementedError

    def plain(self, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples by itself."""
        return forward(x)

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of normalised, scaled values of x."""
        del forward
        return as_on(values, x)

    def has_maps(self, x: Tensor) -> bool:
        """Return whether a sample has more than one number for each channel."""
        return x.dim() > 2 and math.prod(x.shape[1:]) > self.channels

    def normalised(self, values: Tensor, moments: Moments, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples, all by the same moments."""
        weight, bias = self.scale(values)
        found = normalised(values, moments, weight, bias, self.layer.eps)
        return self.finished(found, x, forward)

    def normalised_each(
        self, values: Tensor, moments: Moments, of: Tensor, x: Tensor, forward: Forward
    ) -> Any:
        """Return what the layer makes of samples, each by the moments of its group."""
        (mean, var), (weight, bias) = moments, self.scale(values)
        scale = torch.rsqrt(var + self.layer.eps)
        if weight is not None:
            scale = scale * as_on(weight, scale)
        shift = -mean * scale
        if bias is not None:
            shift = shift + as_on(bias, shift)
        shape = (values.shape[0], self.channels, *[1] * (values.dim() - 2))
        found = torch.addcmul(shift[of].view(shape), values, scale[of].view(shape))
        return self.finished(found, x, forward)


class BatchNormKind(NormKind):
    """BatchNorm; one that does more than normalise is given values as the source would have them.

    Layers of timm have an activation. Others are plain.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer, self.channels, self.is_plain = layer, layer.num_features, is_plain(layer)

    def source(self, like: Tensor) -> Moments:
        """See `NormKind`."""
        mean, var = running_statistics(self.layer)
        return as_on(mean, like), as_on(var, like)

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `NormKind`."""
        if self.is_plain:
            return self.layer.weight, self.layer.bias
        mean, var = self.source(like)
        return (var + self.layer.eps).sqrt(), mean

    def plain(self, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        if not self.is_plain:
            return by_running_statistics(self.layer, functools.partial(forward, x))
        layer = self.layer
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        values = as_on(values, x)
        if self.is_plain:
            return values
        return by_running_statistics(self.layer, functools.partial(forward, values))


class SampleNormKind(NormKind):
    """GroupNorm and LayerNorm."""

    def __init__(self, layer: Any, source: Tensor) -> None:
        self.layer, self.channels, self._source = layer, source.shape[1], source

    def values(self, x: Tensor) -> Tensor:
        """See `NormKind`."""
        return normalised_alone(self.layer, at_least_float32(x))

    def source(self, like: Tensor) -> Moments:
        """See `NormKind`."""
        mean, var = as_on(self._source, like)
        return mean, var

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `NormKind`."""
        # To the mean and deviation of the source, and from there as the layer itself does.
        mean, var = self.source(like)
        weight, bias = (var + self.layer.eps).sqrt(), mean
        if self.layer.weight is not None:
            own = as_on(self.layer.weight, like)
            weight, bias = weight * own, bias * own
        if self.layer.bias is not None:
            bias = bias + as_on(self.layer.bias, like)
        return weight, bias

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        del forward
        return in_own_layout(self.layer, values).to(x.dtype)
