"""BatchNorm, GroupNorm and LayerNorm layers: find them, run them in parts, and their moments.

Moments are mean and variance of channels, shape (channels,) each. GroupNorm and LayerNorm over the
last dimension are called sample norms here; their values have the channels second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import AttachError
from ttapca.support.tensors import as_on, at_least_float32
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
Forward = Callable[..., Any]


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


def by_running_statistics(layer: _BatchNorm, run: Callable[[], Result]) -> Result:
    """Run a layer's own `forward` with its running statistics, in training mode as well."""
    training = layer.training

    def run_evaluating() -> Result:
        layer.training = False
        return run()

    return surely(run_evaluating, then=lambda: setattr(layer, "training", training))


def is_sample_norm(layer: nn.Module) -> TypeGuard[SampleNorm]:
    """Return whether a layer is a GroupNorm, or a LayerNorm over the last dimension."""
    # A layer with a `forward` of its own may have its channels somewhere else, or do more.
    if type(layer).forward not in (nn.GroupNorm.forward, nn.LayerNorm.forward):
        return False
    return not isinstance(layer, nn.LayerNorm) or len(layer.normalized_shape) == 1


def channels_of(layer: SampleNorm) -> int:
    """Return how many channels a layer has."""
    return layer.num_channels if isinstance(layer, nn.GroupNorm) else layer.normalized_shape[0]


def normalised_alone(layer: SampleNorm, x: Tensor) -> Tensor:
    """Return x normalised without scale and shift, in shape (batch, channels, ...)."""
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    return F.layer_norm(x, layer.normalized_shape, eps=layer.eps).movedim(-1, 1)


class _EveryLayerCalled(Wrapper):
    """Runs a `nn.TransformerEncoderLayer` without its fast path, while a surface is enabled."""

    def __init__(self, layer: nn.Module, surface: Switch) -> None:
        self._layer, self.surface = layer, surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self.surface.enabled:
            return forward(*args, **kwargs)
        with temporary_patches() as patches:
            # Torch does not take the fast path of a layer that has hooks; this one changes nothing.
            patches.hook_output(self._layer, lambda *_: None)
            return forward(*args, **kwargs)


def call_every_layer(
    model: nn.Module, layers: Sequence[nn.Module], surface: Switch, patches: Patches
) -> None:
    """Make `nn.TransformerEncoderLayer` call these layers, also without gradients, by patches."""
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

    def _scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what a normalised channel is multiplied by, and what is added to it."""
        raise NotImplementedError

    def plain(self, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples by itself."""
        return forward(x)

    def _finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of normalised, scaled values of x."""
        del forward
        return as_on(values, x)

    def has_maps(self, x: Tensor) -> bool:
        """Return whether a sample has more than one number for each channel."""
        return x.dim() > 2 and math.prod(x.shape[1:]) > self.channels

    def normalised(self, values: Tensor, moments: Moments, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples, all by the same moments."""
        weight, bias = self._scale(values)
        found = normalised(values, moments, weight, bias, self.layer.eps)
        return self._finished(found, x, forward)

    def normalised_each(
        self, values: Tensor, moments: Moments, of: Tensor, x: Tensor, forward: Forward
    ) -> Any:
        """Return what the layer makes of samples, each by the moments of its group."""
        scale, shift = _as_affine(moments, *self._scale(values), self.layer.eps)
        shape = (values.shape[0], self.channels, *[1] * (values.dim() - 2))
        found = torch.addcmul(shift[of].view(shape), values, scale[of].view(shape))
        return self._finished(found, x, forward)


class BatchNormKind(NormKind):
    """BatchNorm; one that does more, as in timm, is given values as the source would have them."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer, self.channels, self.is_plain = layer, layer.num_features, is_plain(layer)

    def source(self, like: Tensor) -> Moments:
        """See `NormKind`."""
        mean, var = running_statistics(self.layer)
        return as_on(mean, like), as_on(var, like)

    def _scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
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

    def _finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
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

    def _scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # To the mean and deviation of the source, and from there as the layer itself does.
        mean, var = self.source(like)
        weight, bias = (var + self.layer.eps).sqrt(), mean
        if self.layer.weight is not None:
            own = as_on(self.layer.weight, like)
            weight, bias = weight * own, bias * own
        if self.layer.bias is not None:
            bias = bias + as_on(self.layer.bias, like)
        return weight, bias

    def _finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        del forward
        own_layout = values if isinstance(self.layer, nn.GroupNorm) else values.movedim(1, -1)
        return own_layout.to(x.dtype)


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
    if not torch.is_grad_enabled():
        # One pass instead of two; but no gradient would reach mean and variance.
        weight, bias = (each if each is None else each.to(x.dtype) for each in (weight, bias))
        return torch.batch_norm(x, weight, bias, *moments, False, 0.0, eps, True)
    scale, shift = _as_affine(moments, weight, bias, eps)
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), x, scale.view(channels))


def _as_affine(moments: Moments, weight: Tensor | None, bias: Tensor | None, eps: float) -> Moments:
    """Return what a channel is multiplied by to normalise it, and what is added then."""
    mean, var = moments
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * as_on(weight, scale)
    shift = -mean * scale
    return scale, shift if bias is None else shift + as_on(bias, shift)


def can_be_quick(x: Tensor) -> bool:
    """Return whether statistics need no gradients, and are worth a path of their own."""
    if torch.is_grad_enabled() or not x.is_cpu or x.numel() < 2 * x.shape[1]:
        return False
    return not torch.compiler.is_compiling()


def some_places(x: Tensor) -> Tensor:
    """Return evenly spread places of large feature maps; (batch or 1, channels, places, ...)."""
    # Neighbours are alike: some hundred places tell the moments about as well as all of them.
    step = _step(x)
    if step == 1:
        return x
    channels = x.shape[1]
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        some = x.permute(0, 2, 3, 1).flatten(1, 2)[:, ::step].contiguous()
        return some.view(1, -1, 1, channels).permute(0, 3, 1, 2)  # channels stay last
    return x.flatten(2)[:, :, ::step].contiguous()


def _step(x: Tensor) -> int:
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
    """Return mean and mean square of each sample's channels around a centre, (batch, channels)."""
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
            # Torch is quickest at groups, so each channel of a single sample is one.
            sizes = 1, x.shape[1], x.numel() // x.shape[1], x.shape[1]
            _, mean, scale = torch.native_group_norm(x, None, None, *sizes, NO_VARIANCE)
            return mean[0], scale[0].square().reciprocal_()
        if x.numel() >= LARGE:
            return quick_moments(x)
        # Several times as quick as `var_mean`, for which a single image would have to wait.
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    dimensions = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x, dim=dimensions, correction=0)
    return mean, var


def quick_moments(x: Tensor) -> Moments:
    """Return mean and variance of every channel of a large batch, without gradients."""
    # Sums and norms of single feature maps are many times faster than `var_mean` on a CPU. The
    # variance is a difference of squares, unless the mean is too far from zero.
    if x.is_contiguous() and x.dim() > 2:
        count = x.numel() // x.shape[1]
        maps = x.flatten(2)  # (batch, channels, places)
        mean = maps.mean(2, dtype=x.dtype).double().mean(0)
        squares = torch.linalg.vector_norm(maps, dim=2).double().square().sum(0) / count
        var = squares - mean.square()
        if bool((squares < FAR_FROM_ZERO * var).all()):
            return mean.to(x.dtype), var.to(x.dtype)
    return torch.batch_norm_update_stats(x, None, None, 0.0)
