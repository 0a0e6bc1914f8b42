"""Mean and variance of channels: computed quickly, put together, normalised with."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

# From so many numbers on, `quick_moments` is quicker than BatchNorm in training mode.
LARGE = 2**18

# Where the mean square is more than this many variances, their difference loses more than two of
# the seven digits of float32.
FAR_FROM_ZERO = 64.0


def mixed(
    alpha: float, batch: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of two populations together, given those of each.

    Args:
        alpha: Weight of the batch, from 0 to 1.
        batch: Its mean and variance, shape (channels,) each.
        source: Likewise.

    Example:
        >>> one, four = torch.tensor(1.0), torch.tensor(4.0)
        >>> [float(value) for value in mixed(0.5, (one, one), (one + 2, four))]
        [2.0, 3.5]
    """
    (batch_mean, batch_var), (source_mean, source_var) = batch, source
    source_mean, source_var = source_mean.to(batch_mean), source_var.to(batch_var)
    between = batch_mean - source_mean
    var = torch.lerp(source_var, batch_var, alpha)
    var = torch.addcmul(var, between, between, value=alpha * (1 - alpha))
    return torch.add(source_mean, between, alpha=alpha), var


def normalised(
    x: Tensor,
    moments: tuple[Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Every channel without its mean, over its deviation, times its weight, plus its bias.

    Args:
        x: Shape (batch, channels, ...).
        moments: Mean and variance, shape (channels,) each; gradients pass through them.
        weight: Shape (channels,), or None for 1.
        bias: Likewise, or None for 0.
        eps: Added to the variance.
    """
    mean, var = moments
    weight, bias = (None if value is None else value.to(x.dtype) for value in (weight, bias))
    if not torch.is_grad_enabled():
        # One pass instead of two; but no gradient would reach mean and variance.
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), x, scale.view(channels))


def can_be_quick(x: Tensor) -> bool:
    """Whether statistics without gradients will do, and are worth a way of their own."""
    several = x.numel() >= 2 * x.shape[1]
    plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return several and plain and x.device.type == "cpu"


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel, with gradients where there are any."""
    if can_be_quick(x):
        return quick_moments(x) if x.numel() >= LARGE else moments_of_few(x)
    dimensions = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x, dim=dimensions, correction=0)
    return mean, var


def moments_of_few(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of a small batch, without gradients.

    What BatchNorm calls for its own statistics is several times as quick as torch's `var_mean`: a
    single image waits for every call.

    Args:
        x: Shape (batch, channels, ...), float32 or float64.

    Example:
        >>> mean, var = moments_of_few(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> mean.tolist(), var.tolist()
        ([4.0], [5.0])
    """
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def quick_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of a large batch, without gradients.

    On a processor torch's own `var_mean` takes as long as a convolution. Sums and norms of single
    feature maps are many times faster, and are added up in float64. The variance is then a
    difference of squares; where the mean is so far from zero that this would cost digits, and
    where feature maps do not lie in one piece, torch's statistics for training take over.

    Args:
        x: Shape (batch, channels, ...), float32 or float64.

    Example:
        >>> mean, var = quick_moments(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> mean.tolist(), var.round(decimals=3).tolist()
        ([4.0], [5.0])
    """
    count = x.numel() // x.shape[1]
    if x.is_contiguous() and x.dim() > 2:
        maps = x.flatten(2)  # (batch, channels, places)
        mean = maps.mean(2, dtype=x.dtype).double().mean(0)
        squares = torch.linalg.vector_norm(maps, dim=2).double().square().sum(0) / count
        var = squares - mean.square()
        if bool((squares < FAR_FROM_ZERO * var).all()):
            return mean.to(x.dtype), var.to(x.dtype)
    mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    # With momentum 1 the running statistics become those of the batch.
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    return mean, var * ((count - 1) / count)
