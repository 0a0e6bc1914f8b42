"""Normalisation layers: find them, measure mean and variance of channels, and run layers in parts.

GroupNorm and LayerNorm over the last dimension normalise every sample by itself; they are called
sample norms here, and are run without their own scale and shift, with channels in the second
dimension, so that callers need not ask which of the two a layer is.

Moments are mean and variance of channels, shape (channels,) each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import AttachError
from ttapca.support.tensors import as_on
from ttapca.support.wrapping import Patches, Result, Switch, Wrapper, surely, temporary_patches

# If a sample has more numbers than this, PLACES of each of its feature maps are enough.
MANY = 2**16
PLACES = 128
# From this many numbers on, `quick_moments` is quicker than BatchNorm in training mode.
LARGE = 2**15
# In place of a variance of zero, which has no reciprocal; far below any that counts.
NO_VARIANCE = 1e-30
# If the mean square is more than this many variances, their difference loses more than two of the
# seven digits of float32.
FAR_FROM_ZERO = 64.0

Moments = tuple[Tensor, Tensor]
SampleNorm = nn.GroupNorm | nn.LayerNorm


# BatchNorm


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


# GroupNorm and LayerNorm


def is_sample_norm(layer: nn.Module) -> TypeGuard[SampleNorm]:
    """Return whether a layer is a GroupNorm, or a LayerNorm over the last dimension.

    A LayerNorm over several dimensions has no channels. A layer with a `forward` of its own may
    have them somewhere else, as the `LayerNorm2d` of many networks, or do more than normalise, as
    the `GroupNormAct` of timm.
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

    In evaluation mode and without gradients, `nn.TransformerEncoderLayer` computes everything in
    one function of torch and never calls its LayerNorm layers.
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
    """Make gradients through GroupNorm safe, by patches that are added to others.

    On a CPU, torch's backward pass of GroupNorm crashes the process if images are laid out with
    channels last (seen in torch 2.13). So the layers get a contiguous copy.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
        >>> with safe_gradients(model):
        ...     x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
        ...     model(x).sum().backward()
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


# Moments of channels


def mixed_moments(alpha: float, batch: Moments, source: Moments) -> Moments:
    """Return mean and variance of two populations together, the batch with weight alpha."""
    (batch_mean, batch_var), (source_mean, source_var) = batch, source
    source_mean, source_var = as_on(source_mean, batch_mean), as_on(source_var, batch_var)
    between = batch_mean - source_mean
    var = torch.lerp(source_var, batch_var, alpha)
    var.addcmul_(between, between, value=alpha * (1 - alpha))
    return torch.add(source_mean, between, alpha=alpha), var


def normalised(
    x: Tensor, moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return weight (x - mean) / sqrt(var + eps) + bias for x of shape (batch, channels, ...)."""
    mean, var = moments
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if not torch.is_grad_enabled():
        # One pass instead of two; but no gradient would reach mean and variance.
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, True)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), x, scale.view(channels))


def can_be_quick(x: Tensor) -> bool:
    """Return whether statistics need no gradients, and are worth a path of their own."""
    if torch.is_grad_enabled() or not x.is_cpu or x.numel() < 2 * x.shape[1]:
        return False
    return not torch.compiler.is_compiling()


def some_places(x: Tensor) -> Tensor:
    """Return evenly spread places of large feature maps; small ones as they are.

    Neighbours are alike: some hundred places tell mean and variance of a channel about as well as
    all of them, and most of the time for these goes into reading them. They have the shape (batch,
    channels, places), or (1, channels, places of all, 1).

    Example:
        >>> with torch.no_grad():
        ...     some_places(torch.zeros(1, 16, 112, 112)).shape
        torch.Size([1, 16, 130])
    """
    step = _step(x)
    if step == 1:
        return x
    channels = x.shape[1]
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        some = x.permute(0, 2, 3, 1).flatten(1, 2)[:, ::step].contiguous()
        return some.view(1, -1, 1, channels).permute(0, 3, 1, 2)  # channels stay last
    return x.flatten(2)[:, :, ::step].contiguous()


def _step(x: Tensor) -> int:
    """Return the distance between the places of feature maps that are read."""
    channels, *sides = x.shape[1:]
    places = math.prod(sides)
    step = places // PLACES
    if step < 2 or channels * places <= MANY or not can_be_quick(x):
        return 1
    # What repeats along a row, as the blocks of a compressed image do, is not to be met at the same
    # place each time.
    while math.gcd(step, 2 * sides[-1]) > 1:
        step -= 1
    return step


def moments_of_each(x: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and mean square around a centre, shape (channels,), of each sample's channels.

    Both have the shape (batch, channels), in float64 unless it is exported.
    """
    exporting = torch.compiler.is_exporting()
    if x.dim() == 2:
        away = x - centre if exporting else (x - centre).double()
        return away, away.square()
    maps = x.flatten(2)  # (batch, channels, places)
    if exporting:
        away = maps - centre[:, None]
        return away.mean(2), away.square().mean(2)
    maps = maps[:, :, :: _step(x)]
    mean = maps.mean(2).double()
    square = torch.linalg.vector_norm(maps, dim=2).double().square() / maps.shape[2]
    far = centre.double()
    # If the mean is far from zero, a difference of squares would cost digits.
    if bool((square > FAR_FROM_ZERO * (square - mean.square()).clamp(min=0) + NO_VARIANCE).any()):
        away = maps - centre[:, None]
        mean = away.mean(2).double()
        return mean, torch.linalg.vector_norm(away, dim=2).double().square() / maps.shape[2]
    return mean - far, square - 2 * far * mean + far.square()


def channel_moments(x: Tensor) -> Moments:
    """Return mean and variance of every channel, with gradients if there are any."""
    if can_be_quick(x):
        if len(x) == 1 and x.dim() > 2 and x.is_contiguous():
            return _moments_of_one(x)
        if x.numel() >= LARGE:
            return quick_moments(x)
        # Several times as quick as `var_mean`, for which a single image would have to wait.
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    dimensions = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x, dim=dimensions, correction=0)
    return mean, var


def _moments_of_one(x: Tensor) -> Moments:
    """Return mean and variance of every channel of one sample.

    Each channel is a group by itself, and for groups torch has the quickest statistics there are.
    """
    channels = x.shape[1]
    places = x.numel() // channels
    _, mean, scale = torch.native_group_norm(
        x, None, None, 1, channels, places, channels, NO_VARIANCE
    )
    return mean[0], scale[0].square().reciprocal_()


def quick_moments(x: Tensor) -> Moments:
    """Return mean and variance of every channel of a large batch, without gradients.

    On a CPU torch's own `var_mean` takes as long as a convolution. Sums and norms of single
    feature maps are many times faster, and are added up in float64. The variance is then a
    difference of squares. If the mean is so far from zero that this would cost digits, or feature
    maps are not contiguous, torch's statistics for training take over.
    """
    if x.is_contiguous() and x.dim() > 2:
        count = x.numel() // x.shape[1]
        maps = x.flatten(2)  # (batch, channels, places)
        mean = maps.mean(2, dtype=x.dtype).double().mean(0)
        squares = torch.linalg.vector_norm(maps, dim=2).double().square().sum(0) / count
        var = squares - mean.square()
        if bool((squares < FAR_FROM_ZERO * var).all()):
            return mean.to(x.dtype), var.to(x.dtype)
    return torch.batch_norm_update_stats(x, None, None, 0.0)
