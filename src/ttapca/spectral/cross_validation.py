"""Cross-validation: the energies of source samples in bases that were made without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca.spectral.basis import Basis
from ttapca.spectral.calibration import TINY, band_edges, band_means
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.folded import FoldedPCA, InputPCA
from ttapca.spectral.pca import MOST_DROPPED, PCA
from ttapca.spectral.position_sample import PositionSample
from ttapca.spectral.resemblance import Resemblance

TOGETHER = 32  # samples that are measured at a time


def energies_of(
    samples: Tensor,
    mean: Tensor,
    variances: Tensor,
    project: Callable[[Tensor], Tensor],
    n_samples: int,
) -> Tensor:
    """Return band energies of samples, (samples, bands), with mean and variances of the others."""
    edges, others = band_edges(len(variances)), n_samples - 1
    found = []
    # A few at a time: large images have as many components as pixels.
    for some in torch.split(samples, TOGETHER):
        squares = project(some.to(mean) - mean).square()
        left = (others * variances - squares * n_samples / others) / max(1, others - 1)
        away = squares * (n_samples / others) ** 2
        found.append(band_means(away / left.maximum(variances / n_samples), edges).float().cpu())
    return torch.cat(found)


def rest_of(samples: Tensor, mean: Tensor, basis: Basis) -> Tensor:
    """Return the squared length outside a basis in float64, (samples, size) to (samples,)."""
    found = []
    for some in torch.split(samples, TOGETHER):
        centred = some.to(mean) - mean
        rebuilt = basis.add_rebuilt(torch.zeros_like(mean), basis.project(centred))
        found.append((centred - rebuilt).square().sum(1).float().cpu())
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The energies of new source data in a basis."""

    energies: Tensor  # of bands, shape (samples, bands)
    rows: Tensor  # which of the kept samples these are; see `PositionSample.all`
    rest: Tensor | None = None  # squared length outside the basis, shape (samples,), if measured
    # Of each component, float64; fewer than were found if the samples do not resolve the last ones.
    # None for the variances that were found.
    variances: Tensor | None = None
    resemblance: Resemblance | None = None  # of the samples


AnyPCA = PCA | InputPCA | FoldedPCA


def calibrate(
    sample: PositionSample,
    pca: AnyPCA,
    without: Callable[[Tensor, list[int]], AnyPCA],
    basis_of: Callable[[AnyPCA], Basis],
    groups: Sequence[Any] | None = None,
) -> Calibration:
    """Return the calibration of a decomposition of all data, by cross-validation.

    On 20,000 images of CIFAR-100 the last of 3,072 components vary twice as much over new images,
    and with 400 samples for 384 components some vary hundreds of times as much. So samples are
    measured with bases made by `without`, given samples, (samples, size), and their positions, and
    components are known by their rank. Samples of one of the `groups` are held out together.
    """
    samples, positions, folds = sample.all(), sample.positions(), sample.folds(groups)
    kept = len(pca.singular_values)
    # With as many components as samples allow, new samples have others as well; and a shift may
    # have directions in which no sample varies, such as an offset of series without a mean.
    outside = pca.drops_something or kept < samples.shape[1]
    squares: list[Tensor] = []
    rests: list[Tensor] = []
    length = 0.0  # squared, of all samples that `rests` are of
    while len(squares) < len(folds):
        rows = folds[len(squares)]
        apart = samples[rows.to(samples.device)]
        found = without(apart, positions[rows].tolist())
        if len(found.singular_values) < kept:  # begin anew: with fewer samples, fewer are resolved
            kept, squares, rests, length = len(found.singular_values), [], [], 0.0
            continue
        found = found.truncated(kept)
        squares.append((apart.to(found.mean) - found.mean) @ found.project)
        squares[-1] = squares[-1].square().cpu()
        if outside or kept < len(pca.singular_values):
            rests.append(rest_of(apart, found.mean, basis_of(found)))
            length += float((apart.to(found.mean) - found.mean).square().sum())
    energies, variances = _by_others(squares, alone=groups is None)
    rest = torch.cat(rests) if rests else None
    if rest is not None and float(rest.sum()) <= MOST_DROPPED * length:
        rest = _of_nothing(rest, MOST_DROPPED * length / len(rest))
    return Calibration(energies, torch.cat(folds), rest, variances)


def _of_nothing(rest: Tensor, negligible: float) -> Tensor:
    """Return squared lengths outside a basis that leaves out next to nothing, (samples,).

    If none of n samples has anything outside, one more may have it with a chance of 1 / n, after
    Laplace. So the sample that has most of it stands for one that has as much as is believed.
    """
    most = CONSTANTS.largest_ratio * negligible
    found = rest.clamp(negligible, most)
    found[rest.argmax()] = most
    return found


def _by_others(squares: list[Tensor], *, alone: bool) -> tuple[Tensor, Tensor]:
    """Return band energies of samples by the variances of others, and the variances over all."""
    together = torch.cat(squares)
    total, count = together.sum(0), len(together)
    own, sizes = together, torch.ones(count, 1)
    if not alone:
        own = torch.cat([each.sum(0).expand_as(each) for each in squares])
        sizes = torch.cat([torch.full((len(each), 1), len(each)) for each in squares])
    others = (total - own).maximum(total / count) / (count - sizes)
    variances = total / count
    energies = band_means(together / others, band_edges(len(total))).float()
    return energies, variances.clamp(min=TINY * variances.max())


def calibrate_fixed(
    sample: PositionSample,
    mean: Tensor,
    variances: Tensor,
    project: Callable[[Tensor], Tensor],
    n_samples: int,
    rest: Tensor | None = None,
    groups: Sequence[Any] | None = None,
) -> Calibration:
    """Return the calibration of a basis of which only mean and variances depend on the samples."""
    samples = sample.all()
    if groups is None:
        alone = energies_of(samples, mean, variances, project, n_samples)
        return Calibration(alone, torch.arange(len(samples)), rest)
    folds, each_stands_for = sample.folds(groups), n_samples / len(samples)

    def components(rows: Tensor) -> Iterator[Tensor]:
        for some in torch.split(samples[rows.to(samples.device)], TOGETHER):
            yield project(some.to(mean) - mean).double()

    moved, squares = [], []  # by fold: from the mean of the others, and the sum of squares from it
    for rows in folds:
        parts = [(each.sum(0), each.square().sum(0)) for each in components(rows)]
        first, second = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        away = first * each_stands_for / (n_samples - each_stands_for * len(rows))
        moved.append(away)
        squares.append(second + away * (2 * first + len(rows) * away))
    total, edges = torch.stack(squares).sum(0), band_edges(len(variances))
    energies: list[Tensor] = []
    for rows, away, own in zip(folds, moved, squares, strict=True):
        others = (total - own).maximum(total / len(samples)) / (len(samples) - len(rows))
        energies += [
            band_means((each + away).square() / others, edges).float().cpu()
            for each in components(rows)
        ]
    rows = torch.cat(folds)
    rest = None if rest is None else rest[rows]
    return Calibration(torch.cat(energies), rows, rest, total.cpu() / len(samples))
