"""What to scale a component by, given its variance in the source, s, and now, t, with r = s / t.

Wiener      min(r, 1)                        the optimal linear estimate under additive noise
matching    sqrt(r)                          gives back the variance of the source
two-sided   min(r, 1)^a clip(r, 1, limit)^b  Wiener is (1, 0), matching (1/2, 1/2)
"""

from __future__ import annotations

import math

from torch import Tensor


def two_sided_gain(
    log_ratio: Tensor,
    *,
    shrink: float = 1.0,
    restore: Tensor | float = 0.0,
    largest_ratio: float = 64.0,
) -> Tensor:
    """Return the gains min(r, 1)^shrink clip(r, 1, largest_ratio)^restore.

    Args:
        log_ratio: Logarithm of r = s / t, source variance over test variance, any shape.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less.
        largest_ratio: Larger ratios count as this one.

    Example:
        >>> import torch
        >>> gains = two_sided_gain(torch.tensor([0.25, 1.0, 4.0]).log(), restore=0.5)
        >>> [round(gain, 4) for gain in gains.tolist()]
        [0.25, 1.0, 2.0]
    """
    shrunk = shrink * log_ratio.clamp(max=0.0)
    restored = restore * log_ratio.clamp(0.0, math.log(largest_ratio))
    return shrunk.add_(restored).exp_()
