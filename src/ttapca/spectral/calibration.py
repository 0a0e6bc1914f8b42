"""What is normal: how much the spectrum of source images varies, for a batch of any size.

From the band energies of a few hundred source images (see `ttapca.spectral.bands`), batches of any
size are drawn again and again. They tell how the logarithm of a batch's mean energy is distributed
when nothing has shifted: its mean and covariance over bands, and how far from that mean such
batches lie. A test batch is measured against this, so that one rule serves a single image, whose
spectrum says little, and two hundred, whose mean says much.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ttapca.errors import NotEnoughDataError
from ttapca.spectral.bands import band_edges, band_means

# So many source samples are kept, fewer where a sample is large.
SAMPLES = 2048
SAMPLED_NUMBERS = 2**24
TOGETHER = 32  # are measured at once

# One in so many samples is held out of the basis it is measured with, if these are enough.
HELD_OUT = 8
FEWEST = 32

# Batches that are drawn for one size, and the seed they are drawn with.
DRAWS = 512
SEED = 0

# Share of source batches that count as not shifted at all.
REACH = 0.99

# Added to the covariance of logarithms, so that bands which hardly vary do not rule the distance.
RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class Normality:
    """How the log energies of source batches of one size are distributed.

    Attributes:
        log_energies: Of the batches that were drawn, rising in every band, shape (draws, bands).
        mean: Shape (bands,).
        extremes: Of each of these batches, how central the range is that just holds all of its
            bands: 0 is the median alone, 1 the whole range; rising, shape (draws,).
        precision: Inverse of their covariance, shape (bands, bands).
        distances: Of these batches, by `distance`, rising, shape (draws,).
    """

    log_energies: Tensor
    mean: Tensor
    extremes: Tensor
    precision: Tensor
    distances: Tensor
    _ranges: dict[float, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def distance(self, log_energy: Tensor) -> Tensor:
        """Squared Mahalanobis distance over the number of bands: (..., bands) to (...).

        It is near 1 on average over source batches.
        """
        away = log_energy - self.mean
        return ((away @ self.precision) * away).mean(-1)

    def excess(self, log_energy: Tensor, threshold: float) -> Tensor:
        """What lies beyond the range that source batches fill, in every band.

        Args:
            log_energy: Shape (..., bands).
            threshold: Share of source batches that lie within that range in all bands; at 0 it is
                the median alone.

        Returns:
            Distance from the range, of either sign, shape (..., bands).
        """
        low, high = self._range(threshold)
        return (log_energy - high).clamp(min=0) - (low - log_energy).clamp(min=0)

    def certainty(self, log_energy: Tensor) -> Tensor:
        """How surely a batch has shifted: 0 where source batches reach as far, towards 1 beyond.

        Args:
            log_energy: Shape (..., bands).
        """
        return (1 - self._reach / self.distance(log_energy).clamp(min=1e-12)).clamp(min=0)

    def _range(self, threshold: float) -> tuple[Tensor, Tensor]:
        """Ends of the range in every band; kept, since a single image cannot wait for quantiles."""
        if threshold not in self._ranges:
            share = float(torch.quantile(self.extremes, threshold)) if threshold else 0.0
            ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
            low, high = torch.quantile(self.log_energies, ends, dim=0)
            self._ranges[threshold] = (low, high)
        return self._ranges[threshold]

    @functools.cached_property
    def _reach(self) -> Tensor:
        """As far as nearly all source batches lie."""
        return torch.quantile(self.distances, REACH)

    def p_value(self, distance: Tensor) -> Tensor:
        """Share of source batches that are at least as far away, of the shape of `distance`."""
        nearer = torch.searchsorted(self.distances, distance.contiguous())
        return (len(self.distances) - nearer + 1) / (len(self.distances) + 1)


class SourceSpectrum:
    """Band energies of source images.

    Args:
        energies: Mean of component^2 / variance in every band, shape (images, bands).

    Raises:
        NotEnoughDataError: When there are fewer than two images.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> source = SourceSpectrum(torch.randn(400, 3, generator=generator).square())
        >>> one, many = source.batches_of(1), source.batches_of(100)
        >>> bool((many.log_energies.std(0) < one.log_energies.std(0)).all())
        True
    """

    def __init__(self, energies: Tensor) -> None:
        if len(energies) < 2:
            raise NotEnoughDataError(
                f"Calibration needs at least two source images; found {len(energies)}."
            )
        # An energy of zero, as of a black image, has no logarithm.
        self.energies = energies.detach().to("cpu", torch.float64).clamp(min=1e-12)
        self._known: dict[int, Normality] = {}

    @property
    def images(self) -> int:
        """How many images there are."""
        return len(self.energies)

    def batches_of(self, size: float) -> Normality:
        """Distribution of the log energies of source batches of this many images.

        Args:
            size: At least 1; past 64 in steps of a few per cent, so that a growing count does not
                ask for ever new draws, and never more than the images there are.
        """
        rounded = self._rounded(size)
        if rounded not in self._known:
            self._known[rounded] = self._draw(rounded)
        return self._known[rounded]

    def _rounded(self, size: float) -> int:
        whole = max(1, min(round(size), self.images))
        step = 1 << max(0, whole.bit_length() - 7)
        return max(1, whole // step * step)

    def _draw(self, size: int) -> Normality:
        if size == 1:
            log_energies = self.energies.log()
        else:
            generator = torch.Generator().manual_seed(SEED)
            chosen = torch.randint(self.images, (DRAWS, size), generator=generator)
            total = torch.zeros(DRAWS, self.energies.shape[1], dtype=torch.float64)
            for column in chosen.T:  # one image of every batch: no (draws, size, bands) tensor
                total += self.energies[column]
            log_energies = (total / size).log()
        mean = log_energies.mean(0)
        away = log_energies - mean
        if size > 1:
            # The images themselves are a sample: what they say of the source varies, too.
            away = away * math.sqrt(1 + size / self.images)
        covariance = away.T @ away / (len(away) - 1)
        precision = torch.linalg.inv(covariance + RIDGE * torch.eye(len(mean)))
        distances = ((away @ precision) * away).mean(-1)
        ranks = away.argsort(dim=0).argsort(dim=0) / (len(away) - 1)
        extremes = (2 * ranks - 1).abs().amax(1).double()
        rising = (mean + away).sort(dim=0).values
        return Normality(rising, mean, extremes.sort().values, precision, distances.sort().values)


class EvenSample:
    """Some samples of a stream of unknown length, evenly spread over it, without randomness.

    Args:
        size: Numbers in a sample.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._limit = max(2, min(SAMPLES, SAMPLED_NUMBERS // size))
        self._start()

    def _start(self) -> None:
        self._every = 1
        self._seen = 0
        self._count = 0
        self._rows: Tensor | None = None  # as many as there may be; the first `_count` are filled

    def of(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The same batches; some of what passes is kept. A second pass starts afresh."""
        self._start()
        for batch in batches:
            self._take(batch)
            yield batch

    def _take(self, batch: Tensor) -> None:
        """Keep every so many samples, and half of all whenever there are too many."""
        if self._rows is None:
            # One piece of memory, not one for every sample: it would scatter what comes between.
            self._rows = batch.new_empty(self._limit, self._size)
        chosen = batch[-self._seen % self._every :: self._every].flatten(1)
        self._seen += len(batch)
        while self._count + len(chosen) > self._limit:
            chosen = chosen[self._count % 2 :: 2]
            thinned = self._rows[: self._count : 2].clone()
            self._count = len(thinned)
            self._rows[: self._count] = thinned
            self._every *= 2
        self._rows[self._count : self._count + len(chosen)] = chosen
        self._count += len(chosen)

    def all(self) -> Tensor:
        """What was kept, shape (samples, size)."""
        if self._rows is None:
            raise NotEnoughDataError("Calibration needs data; found none.")
        return self._rows[: self._count]

    def apart(self) -> Tensor | None:
        """What can be left out of the fit: up to an eighth of the stream; None if that is little.

        Returns:
            Shape (samples, size).
        """
        step = self._step_apart()
        return self.all()[::step] if self._count / step >= FEWEST else None

    def numbers_apart(self) -> range:
        """Which samples of the stream those of `apart` are, counting from 0."""
        return range(self._count * self._every)[:: self._every * self._step_apart()]

    def _step_apart(self) -> int:
        return math.ceil(self._count * HELD_OUT / self._seen)


class Decomposition(Protocol):
    """A PCA in whatever space: `PCA` of `ttapca.spectral.pca`, `FoldedPCA` of `affine`."""

    @property
    def mean(self) -> Tensor:
        """Of the samples, shape (size,)."""

    @property
    def project(self) -> Tensor:
        """From centred samples to components, shape (size, components)."""

    @property
    def explained_variance(self) -> Tensor:
        """Shape (components,)."""


def energies_of(
    samples: Tensor, mean: Tensor, variances: Tensor, project: Callable[[Tensor], Tensor]
) -> Tensor:
    """Band energies of samples.

    Args:
        samples: Shape (samples, size).
        mean: Of the source, shape (size,).
        variances: Of the components in the source, shape (components,).
        project: From centred samples to components.

    Returns:
        Shape (samples, bands).
    """
    edges = band_edges(len(variances))
    # A few at a time: large images have as many components as pixels.
    found = [
        band_means(project(some.to(mean) - mean).square() / variances, edges).float().cpu()
        for some in torch.split(samples, TOGETHER)
    ]
    return torch.cat(found)


def calibrate(
    sample: EvenSample, pca: Decomposition, without: Callable[[Tensor], Decomposition]
) -> Tensor:
    """Band energies of source samples as new data would have them.

    A basis fits the samples it was made from better than others: on 20,000 images of CIFAR-100 the
    last of 3,072 components vary twice as much over new images. So the samples are measured with a
    basis that was made without them, where there are enough.

    Args:
        sample: Of the data.
        pca: Of all data.
        without: Makes another of all data but these samples, shape (samples, size).

    Returns:
        Shape (samples, bands).
    """
    apart = sample.apart()
    if apart is not None:
        try:
            return _energies_by(without(apart), apart)
        except NotEnoughDataError:  # as many components as samples: there is no telling
            pass
    return _energies_by(pca, sample.all())


def _energies_by(pca: Decomposition, samples: Tensor) -> Tensor:
    return energies_of(
        samples, pca.mean, pca.explained_variance, lambda centred: centred @ pca.project
    )
