"""What to scale a component by, given its variance in the source, s, and now, t, with r = s / t.

Wiener      min(r, 1)                        the optimal linear estimate under additive noise
matching    sqrt(r)                          gives back the variance of the source
two-sided   min(r, 1)^a clip(r, 1, limit)^b  Wiener is (1, 0), matching (1/2, 1/2)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor


def smoothed(values: Tensor, window: int) -> Tensor:
    """Average every value with its neighbours; the ends are continued.

    Args:
        values: Shape (..., components).
        window: How many values are averaged, an odd number.

    Example:
        >>> smoothed(torch.tensor([0.0, 3.0, 6.0]), 3).tolist()
        [1.0, 3.0, 5.0]
    """
    half = window // 2
    rows = values.reshape(-1, 1, values.shape[-1])
    padded = F.pad(rows, (half, half), mode="replicate")
    return F.avg_pool1d(padded, window, stride=1).reshape(values.shape)


def signal_share(energy: Tensor, floor: Tensor) -> Tensor:
    """Return the share of a component's variance that is not noise, relative to the source.

    Rounding to 8 bits and the like add the same variance to every image. Where blur or loss of
    contrast has left nothing but that noise, there is nothing to restore.

    Args:
        energy: Test variance over source variance, t / s.
        floor: Variance of the noise over source variance.

    Returns:
        (1 - floor / energy) / (1 - floor), between 0 and 1; 1 where the source is all noise.

    Example:
        >>> floor = torch.tensor([0.0, 0.1, 0.1, 0.1])
        >>> found = signal_share(torch.tensor([0.2, 1.0, 0.2, 0.1]), floor)
        >>> [round(share, 3) for share in found.tolist()]
        [1.0, 1.0, 0.556, 0.0]
    """
    source = 1 - floor
    share = (1 - floor / energy) / source.clamp(min=torch.finfo(source.dtype).tiny)
    return torch.where(source > 0, share.clamp(0, 1), 1.0)


def two_sided_gain(
    log_ratio: Tensor, *, shrink: float = 1.0, restore: float = 0.0, largest_ratio: float = 64.0
) -> Tensor:
    """Return the gains min(r, 1)^shrink clip(r, 1, largest_ratio)^restore.

    Args:
        log_ratio: Logarithm of r = s / t, source variance over test variance, any shape.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less.
        largest_ratio: Larger ratios count as this one.

    Example:
        >>> gains = two_sided_gain(torch.tensor([0.25, 1.0, 4.0]).log(), restore=0.5)
        >>> [round(gain, 4) for gain in gains.tolist()]
        [0.25, 1.0, 2.0]
    """
    shrunk = shrink * log_ratio.clamp(max=0.0)
    restored = restore * log_ratio.clamp(0.0, math.log(largest_ratio))
    return shrunk.add_(restored).exp_()
