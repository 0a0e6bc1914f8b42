"""Gains without learning: from the spectrum of the test data, in closed form.

Let s be the variance of a component in the source data and t its variance now. Additive noise
raises t, blur and loss of contrast lower it; r = s / t says by how much to undo that.

    Wiener      min(r, 1)                        the optimal linear estimate under additive noise
    matching    sqrt(r)                          gives back the variance of the source
    two-sided   min(r, 1)^a clip(r, 1, limit)^b  Wiener is (1, 0), matching (1/2, 1/2)

Variances of single components are noisy, so they are looked at in *bands*: neighbouring components,
a few at the top of the spectrum and many at its end, one band to each doubling. The
energy of an image in a band is the mean of component^2 / s, which is 1 on average over the source.

Everything here is a pure function of tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.errors import OptionError

# Bands to a doubling of the number of components: one makes 12 bands of 3,072 components. More were
# not better at any size of batch (docs/closed-form.md).
BANDS_PER_OCTAVE = 1


def band_edges(n_components: int, per_octave: int = BANDS_PER_OCTAVE) -> list[int]:
    """Where bands begin and end: band k holds the components from edge k up to edge k + 1.

    Fewer components have the same bands, but for the last one, which ends earlier.

    Args:
        n_components: At least 1.
        per_octave: Bands to each doubling; at the top of the spectrum a band has one component.

    Example:
        >>> band_edges(12, per_octave=2)
        [0, 1, 2, 3, 5, 7, 10, 12]
    """
    if n_components < 1 or per_octave < 1:
        raise OptionError(
            "Bands need at least one component, and one band to a doubling; found "
            f"{n_components} components and {per_octave}."
        )
    steps = range(math.ceil(per_octave * math.log2(n_components + 1)) + 1)
    inner = {round(2 ** (step / per_octave)) - 1 for step in steps}
    return [*sorted(edge for edge in inner if edge < n_components), n_components]


def band_means(values: Tensor, edges: list[int]) -> Tensor:
    """Mean of every band: (..., components) to (..., bands).

    Example:
        >>> band_means(torch.tensor([1.0, 2.0, 4.0]), [0, 1, 3]).tolist()
        [1.0, 3.0]
    """
    return values @ over_bands(edges).to(values)


def over_bands(edges: list[int]) -> Tensor:
    """Matrix that takes the mean of every band, shape (components, bands).

    Example:
        >>> (torch.tensor([1.0, 2.0, 4.0]) @ over_bands([0, 1, 3])).tolist()
        [1.0, 3.0]
    """
    widths = torch.tensor(edges).diff()
    band = torch.arange(len(widths)).repeat_interleave(widths)
    return F.one_hot(band, len(widths)) / widths


def across_bands(edges: list[int]) -> Tensor:
    """Matrix that spreads a value of every band over the components, shape (bands, components).

    Between the centres of two bands the value changes linearly in the logarithm of the component's
    number, so that neighbouring components have near gains.

    Example:
        >>> (torch.tensor([1.0, 2.0]) @ across_bands([0, 1, 2])).tolist()
        [1.0, 2.0]
    """
    place = torch.arange(1, edges[-1] + 1, dtype=torch.float64).log()
    centres = band_means(place, edges)
    if len(centres) == 1:
        return torch.ones(1, len(place))
    right = torch.searchsorted(centres, place).clamp(1, len(centres) - 1)
    share = (place - centres[right - 1]) / (centres[right] - centres[right - 1])
    share = share.clamp(0, 1)
    spread = torch.zeros(len(centres), len(place), dtype=torch.float64)
    column = torch.arange(len(place))
    spread[right, column] = share
    spread[right - 1, column] = 1 - share
    return spread.float()


def smoothed(values: Tensor, window: int) -> Tensor:
    """Mean over neighbouring components; of logarithms it is the logarithm of a geometric mean.

    Args:
        values: Shape (components,).
        window: How many neighbours, an odd number; the ends are continued.

    Example:
        >>> smoothed(torch.tensor([0.0, 3.0, 6.0]), 3).tolist()
        [1.0, 3.0, 5.0]
    """
    half = window // 2
    padded = F.pad(values[None, None], (half, half), mode="replicate")
    return F.avg_pool1d(padded, window, stride=1)[0, 0]


def mean_shift(components: Tensor, deviations: Tensor, prior: float = 16.0) -> Tensor:
    """How far the mean of a batch surely is from the source's, component by component.

    The mean of n source samples has the variance s / n. Only what exceeds twice its deviation
    counts, after Stein: m max(0, 1 - 4 s / (n m^2)); and a small batch counts n / (n + prior).

    Args:
        components: Shape (batch, components).
        deviations: Standard deviation of the components in the source data, shape (components,).
        prior: Size of a batch that counts half.

    Returns:
        Shape (components,).

    Example:
        >>> far = 5 + torch.zeros(16, 1)
        >>> round(mean_shift(far, torch.ones(1)).item(), 3)
        2.475
    """
    size = len(components)
    mean = components.mean(0)
    noise = 4 * deviations.square() / size
    sure = (1 - noise / mean.square().clamp(min=torch.finfo(mean.dtype).tiny)).clamp(min=0)
    return mean * sure * (size / (size + prior))


def signal_share(energy: Tensor, floor: Tensor) -> Tensor:
    """Part of a component's variance that is not noise, relative to that part in the source.

    Rounding to 8 bits and the like add the same variance to every image. A component that blur or
    loss of contrast has left nothing but that holds nothing to restore.

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
    """Gains min(r, 1)^shrink clip(r, 1, largest_ratio)^restore.

    Args:
        log_ratio: Logarithm of r = s / t, source variance over test variance, any shape.
        shrink: Exponent where the test data have more variance than the source.
        restore: Exponent where they have less.
        largest_ratio: The largest r that is believed.

    Example:
        >>> gains = two_sided_gain(torch.tensor([0.25, 1.0, 4.0]).log(), restore=0.5)
        >>> [round(gain, 4) for gain in gains.tolist()]
        [0.25, 1.0, 2.0]
    """
    return torch.exp(
        shrink * log_ratio.clamp(max=0.0) + restore * log_ratio.clamp(0.0, math.log(largest_ratio))
    )
