"""How much the spectrum of source images varies without a shift, for a batch of any size.

Components are grouped in *bands*, one per doubling. The energy of an image in a band is the mean of
component^2 / source variance, on average 1. From the band energies of source images, batches of any
size are drawn many times, which show how the logarithm of a batch's mean energy is distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.errors import NotEnoughDataError
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.resemblance import Resemblance

# Batches that are drawn for one batch size, and the seed they are drawn with.
DRAWS = 512
SEED = 0

# The leeway of images (see `SourceSpectrum.batches_of`) is rounded to such parts of 1, and at most
# so many distributions are cached: a stream may have images of many sizes.
LEEWAY_STEPS = 16
MOST_CACHED = 512

TINY = 1e-12  # in place of zero, which has no logarithm and divides nothing


def band_edges(n_components: int) -> list[int]:
    """Return the edges of bands: band k holds components edges[k] to edges[k + 1] - 1."""
    # One band per doubling: more were not better at any batch size (docs/closed-form-evidence.md).
    return [*(2**band - 1 for band in range(n_components.bit_length())), n_components]


def band_means(values: Tensor, edges: list[int]) -> Tensor:
    """Return the mean of every band: (..., components) to (..., bands)."""
    return values @ averaging_matrix(edges).to(values)


def averaging_matrix(edges: list[int]) -> Tensor:
    """Return the matrix that averages every band, shape (components, bands)."""
    widths = torch.tensor(edges).diff()
    band = torch.arange(len(widths)).repeat_interleave(widths)
    return F.one_hot(band, len(widths)) / widths


def spreading_matrix(edges: list[int]) -> Tensor:
    """Return the matrix that spreads band values over components, shape (bands, components)."""
    if len(edges) == 2:
        return torch.ones(1, edges[-1])
    # Between the centres of two bands the value changes linearly in the logarithm of the
    # component's number, so that neighbouring components have similar gains.
    right, share = between_centres(edges)
    spread = torch.zeros(len(edges) - 1, edges[-1], dtype=torch.float64)
    column = torch.arange(edges[-1])
    spread[right, column] = share
    spread[right - 1, column] = 1 - share
    return spread.float()


def between_centres(edges: list[int]) -> tuple[Tensor, Tensor]:
    """Return the right one of the two bands of every component, and its share."""
    place = torch.arange(1, edges[-1] + 1, dtype=torch.float64).log()
    centres = band_means(place, edges)
    right = torch.searchsorted(centres, place).clamp(1, len(centres) - 1)
    share = (place - centres[right - 1]) / (centres[right] - centres[right - 1])
    return right, share.clamp(0, 1)


@dataclass(frozen=True, eq=False)
class NormalRange:
    """The log energies of source batches of one size, or of several along a first dimension."""

    mean: Tensor  # of the log energies, shape (bands,)
    precision: Tensor  # inverse of their covariance, shape (bands, bands)
    reach: Tensor  # `distance` within which nothing has surely shifted, a number
    middle: Tensor  # `distance` that most of them have at most, a number
    low: Tensor  # lower end of the range in which log energies change nothing, shape (bands,)
    high: Tensor  # its upper end

    @classmethod
    def stacked(cls, several: Sequence[NormalRange]) -> NormalRange:
        """Return several ranges as one with a leading dimension."""
        return cls(*map(torch.stack, zip(*(vars(each).values() for each in several), strict=True)))

    def mapped(self, convert: Callable[[Tensor], Tensor]) -> NormalRange:
        """Return the range with each tensor converted."""
        return NormalRange(*map(convert, vars(self).values()))

    def distance(self, log_energy: Tensor) -> Tensor:
        """Return squared Mahalanobis distance / number of bands, (..., bands) to (...)."""
        away = log_energy - self.mean
        return ((away[..., None, :] @ self.precision)[..., 0, :] * away).mean(-1)

    def judged(self, log_energy: Tensor) -> tuple[Tensor, Tensor]:
        """Return how surely batches have shifted, and how unusual they are, from 0 to 1: (...)."""
        distance = self.distance(log_energy).clamp(min=TINY)
        certainty, unusual = 1 - self.reach / distance, 1 - self.middle / distance
        return certainty.clamp(min=0), unusual.clamp(min=0)

    def excess(self, log_energy: Tensor) -> Tensor:
        """Return how far log energies lie outside the range, with sign, shape (..., bands)."""
        return (log_energy - self.high).clamp(min=0) - (self.low - log_energy).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Normality:
    """How the log energies of source batches of one size are distributed."""

    log_energies: Tensor  # of the drawn batches, sorted per band, shape (draws, bands)
    mean: Tensor  # of these, shape (bands,)
    # For each drawn batch, the width of the smallest central range that holds it in all bands: 0 is
    # the median alone, 1 the whole range. Sorted, shape (draws,).
    extremes: Tensor
    precision: Tensor  # inverse of their covariance, shape (bands, bands)
    distances: Tensor  # `NormalRange.distance` of each drawn batch, sorted, shape (draws,)
    constants: Constants = CONSTANTS
    # By share: quantiles are slow for a single image.
    _ranges: dict[float, NormalRange] = field(default_factory=dict, repr=False)

    def normal_range(self, threshold: float) -> NormalRange:
        """Return the range that holds this share of source batches in all bands."""
        if threshold not in self._ranges:
            share = float(torch.quantile(self.extremes, threshold)) if threshold else 0.0
            ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
            low, high = torch.quantile(self.log_energies, ends, dim=0)
            shares = (1 - self.constants.rare, self.constants.threshold)
            reach, middle = (torch.quantile(self.distances, each) for each in shares)
            self._ranges[threshold] = NormalRange(
                self.mean, self.precision, reach, middle, low, high
            )
        return self._ranges[threshold]

    def p_value(self, log_energy: Tensor) -> Tensor:
        """Return the share of source batches that are at least as far: (..., bands) to (...)."""
        distance = self.normal_range(0.0).distance(log_energy)
        nearer = torch.searchsorted(self.distances, distance.contiguous())
        return (len(self.distances) - nearer + 1) / (len(self.distances) + 1)

    def band_p_values(self, log_energy: Tensor) -> Tensor:
        """Return by band twice the share of source batches at least as far out, (bands,)."""
        rising, value = self.log_energies.T.contiguous(), log_energy[:, None]
        draws = rising.shape[1]
        above = draws - torch.searchsorted(rising, value)
        below = torch.searchsorted(rising, value, right=True)
        farther = torch.minimum(above, below)[:, 0]
        return (2 * (farther + 1) / (draws + 1)).clamp(max=1)


class SourceSpectrum:
    """Band energies of source images, (images, bands), with how far these resemble each other."""

    def __init__(
        self,
        energies: Tensor,
        constants: Constants = CONSTANTS,
        resemblance: Resemblance | None = None,
    ) -> None:
        if len(energies) < 2:
            raise NotEnoughDataError(
                f"Calibration needs at least two source samples; found {len(energies)}."
            )
        self._constants = constants
        self._resemblance = resemblance
        self._independent = float(len(energies))
        if resemblance is not None:
            self._independent = min(self._independent, max(2.0, resemblance.average))
        # A black image has an energy of zero.
        self.energies = energies.detach().to("cpu", torch.float64).clamp(min=TINY)
        away = self.energies - self.energies.mean(0)
        spread = away.square().mean(0).square().clamp(min=TINY**4)
        self._kurtosis = max(1.5, float((away.pow(4).mean(0) / spread).median()))
        self._known: dict[tuple[float, ...], Normality] = {}
        self._tables: dict[float, tuple[dict[int, int], NormalRange]] = {}

    def batches_of(self, size: float, leeway: Tensor | None = None) -> Normality:
        """Return the distribution of log energies for source batches of this many images.

        A drawn share of each of the harmless changes in `leeway`, (kinds, bands), is added to them.
        """
        key: tuple[float, ...] = (rounded := self._rounded(size),)
        if leeway is not None and bool(leeway.any()):
            steps = (leeway.to("cpu", torch.float64) * LEEWAY_STEPS).round()
            leeway, key = steps / LEEWAY_STEPS, (rounded, *steps.flatten().tolist())
        if key not in self._known:
            if len(self._known) >= MOST_CACHED:
                self._known.clear()
            self._known[key] = self._draw(rounded, leeway if len(key) > 1 else None)
        return self._known[key]

    def _rounded(self, size: float) -> int:
        # By a few per cent, so that a growing count does not need new draws each time.
        whole = max(1, min(round(size), len(self.energies)))
        step = 1 << max(0, whole.bit_length() - 5)
        return whole // step * step

    def normal_ranges(self, sizes: Tensor, threshold: float, leeway: Tensor) -> NormalRange:
        """Return the range of each stream, with leeways of shape (streams, kinds, bands)."""
        if len(sizes) == 1:  # one range broadcasts as it is
            return self.batches_of(float(sizes), leeway[0]).normal_range(threshold)
        if bool(leeway.any()):
            several = [
                self.batches_of(size, own) for size, own in zip(sizes.tolist(), leeway, strict=True)
            ]
            return NormalRange.stacked([each.normal_range(threshold) for each in several])
        wanted = [self._rounded(size) for size in sizes.tolist()]
        rows, table = self._tables.get(threshold, ({}, None))
        new = set(wanted) - rows.keys()
        if new or table is None:
            rows = {size: row for row, size in enumerate([*rows, *sorted(new)])}
            ranges = [self.batches_of(size).normal_range(threshold) for size in rows]
            table = NormalRange.stacked(ranges)
            self._tables[threshold] = (rows, table)
        chosen = torch.tensor([rows[size] for size in wanted])
        return table.mapped(lambda each: each.index_select(0, chosen))

    def all_normal_ranges(self, threshold: float) -> tuple[Tensor, NormalRange]:
        """Return the ranges of all sizes, and the row of 0, 1, 2, ... images among them."""
        rounded = [self._rounded(size) for size in range(len(self.energies) + 1)]
        sizes = sorted(set(rounded))
        rows = torch.searchsorted(torch.tensor(sizes), torch.tensor(rounded))
        ranges = [self.batches_of(size).normal_range(threshold) for size in sizes]
        return rows, NormalRange.stacked(ranges)

    def _draw(self, size: int, leeway: Tensor | None = None) -> Normality:
        """Draw batches of this size, and return how their log energies are distributed."""
        log_energies = self._log_energies(size)
        mean = log_energies.mean(0)
        away = log_energies - mean
        if size > 1:
            # The images are a sample themselves, so their statistics vary, too.
            away = away * math.sqrt(1 + size / len(self.energies))
        away = away + self._of_groups(size, len(away))
        if leeway is not None:
            generator = torch.Generator().manual_seed(SEED)
            turns = torch.rand(len(away), len(leeway), generator=generator, dtype=torch.float64)
            shares = (1 - torch.cos(math.pi * turns)) / 2  # it was done or not, seldom by half
            away = away + shares @ leeway.to(away)
            mean, away = mean + away.mean(0), away - away.mean(0)
        covariance = away.T @ away / (len(away) - 1)
        precision = torch.linalg.inv(covariance + self._constants.ridge * torch.eye(len(mean)))
        away = away * self._uncertainty(len(away), away.shape[1], size)
        distances = ((away @ precision) * away).mean(-1)
        # Sorted once, since a stream that grows has a new size with almost every batch.
        rising, order = away.sort(dim=0)
        ranks = torch.arange(len(away)) / (len(away) - 1)
        widths = (2 * ranks - 1).abs()[:, None].expand_as(rising)
        extremes = torch.empty_like(widths).scatter_(0, order, widths).amax(1).double()
        shown = (mean + rising, mean, extremes.sort().values, precision, distances.sort().values)
        return Normality(*shown, self._constants)

    def _of_groups(self, size: int, draws: int) -> Tensor | float:
        """Return by how much drawn batches differ since images of a group resemble each other."""
        known = self._resemblance
        excess = None if known is None else known.excess(size)
        if known is None or excess is None:
            return 0.0
        values, vectors = torch.linalg.eigh(excess)
        # How groups vary is known from few of them, so that they follow Student's distribution.
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randn(draws, len(values), generator=generator, dtype=torch.float64)
        freedom = max(2.0, known.independent - 1)
        chance = np.random.default_rng(SEED + 1).chisquare(freedom, draws) / freedom
        found: Tensor = drawn @ (vectors * values.clamp(min=0).sqrt()).T
        return found / torch.from_numpy(chance).sqrt()[:, None]

    def _uncertainty(self, draws: int, bands: int, size: int) -> Tensor:
        """Return by how much farther away new batches may seem, shape (draws, 1).

        How the images vary is known from n images. So the squared distance of a new batch is (n -
        1) / chi squared with n - bands degrees of freedom times as large (Hotelling, 1931). The
        mean energy of several images is ruled by the largest: with a kurtosis of k, its variance is
        known as that of 2 n / (k - 1) normal numbers is.
        """
        images, generator = self._independent, np.random.default_rng(SEED)
        factor = (images - 1) / generator.chisquare(max(2, images - bands), draws)
        if size > 1:
            freedom = max(1.0, 2 * images / (self._kurtosis - 1))
            factor *= freedom / generator.chisquare(freedom, draws)
        return torch.from_numpy(factor).sqrt()[:, None]

    def _log_energies(self, size: int) -> Tensor:
        """Return log energies of drawn batches, or of all images for a size of 1: (n, bands)."""
        if size == 1 and len(self.energies) >= DRAWS:
            return self.energies.log()
        generator = torch.Generator().manual_seed(SEED)
        chosen = torch.randint(len(self.energies), (DRAWS, size), generator=generator)
        # By numpy, the same sums bit for bit: torch would share each of these small steps among
        # its threads, which takes seconds in all where the cores are busy with other work.
        energies = self.energies.numpy()
        total = np.zeros((DRAWS, energies.shape[1]))
        for column in chosen.numpy().T:  # one image of every batch at a time: little memory
            total += energies.take(column, 0)
        return (torch.from_numpy(total) / size).log()
