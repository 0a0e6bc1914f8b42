"""Mean and variance of channels, shape (channels,) each: found, mixed, and normalised by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ttapca.support.tensors import as_on

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

    Neighbours are alike: some hundred places tell the moments of a channel about as well as all of
    them. The shape is (batch, channels, places), or (1, channels, places of all, 1).
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
    """Return the moments of one sample: torch is quickest at groups, so each channel is one."""
    channels = x.shape[1]
    places = x.numel() // channels
    _, mean, scale = torch.native_group_norm(
        x, None, None, 1, channels, places, channels, NO_VARIANCE
    )
    return mean[0], scale[0].square().reciprocal_()


def quick_moments(x: Tensor) -> Moments:
    """Return mean and variance of every channel of a large batch, without gradients.

    On a CPU torch's own `var_mean` takes as long as a convolution. Sums and norms of single
    feature maps are many times faster. The variance is then a difference of squares, unless the
    mean is so far from zero that this would cost digits.
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
