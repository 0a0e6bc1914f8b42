"""Tests of whether a batch has shifted: ours, Kolmogorov-Smirnov on the softmax, MMD on features.

All of them know the same source images, and say of a batch how far it is from these: a `score` that
is larger for a shift, to be compared among batches of one size, and a `p_value`. Plain numpy and
scipy, but for ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from ttapca.adaptation.shift_alarm import skew_of
from ttapca.spectral.calibration import SourceSpectrum
from ttapca.spectral.closed_form_rule import independent_images

Numbers = NDArray[np.float64]

PERMUTATIONS = 100


@dataclass(frozen=True)
class Seen:
    """What there is to see of some images.

    Attributes:
        energies: In the bands of the filter, shape (images, bands).
        softmax: What the network predicts, shape (images, classes).
        features: What its last layer is given, shape (images, channels).
    """

    energies: Numbers
    softmax: Numbers
    features: Numbers

    def __len__(self) -> int:
        return len(self.energies)

    def __getitem__(self, chosen: NDArray[np.int64] | slice) -> Seen:
        return Seen(self.energies[chosen], self.softmax[chosen], self.features[chosen])


class ShiftTest(Protocol):
    """Compares batches with source images."""

    name: str

    def score(self, batch: Seen) -> float:
        """How far a batch is from the source."""

    def p_value(self, batch: Seen) -> float:
        """How rarely source batches are as far, by the test's own reckoning."""


class BandEnergies:
    """Ours: the distance of the mean band energies from those of source batches of the same size.

    Args:
        source: The source images.
        classes: Whether to look at the classes that the network predicts: a batch of one class then
            counts for fewer images.
    """

    def __init__(self, source: Seen, *, classes: bool = False) -> None:
        self.name = "band energies, classes looked at" if classes else "band energies"
        self._spectrum = SourceSpectrum(torch.from_numpy(source.energies))
        self._shares = torch.from_numpy(source.softmax.mean(0)) if classes else None

    def _judged(self, batch: Seen) -> tuple[float, float]:
        images = float(len(batch))
        if self._shares is not None:
            counts = torch.from_numpy(batch.softmax.sum(0))
            images = independent_images(images, skew_of(counts, self._shares))
        normal = self._spectrum.batches_of(images)
        log_energy = torch.from_numpy(batch.energies.mean(0)).clamp(min=1e-12).log()
        distance = normal.normal_range(0.0).distance(log_energy)
        # The largest of the source's distances makes those of other sizes comparable.
        return float(distance / normal.distances[-1]), float(normal.p_value(log_energy))

    def score(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        return self._judged(batch)[0]

    def p_value(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        return self._judged(batch)[1]


class KolmogorovSmirnov:
    """Rabanser, Guennemann and Lipton (2019): two-sample tests on what the network predicts.

    Args:
        source: The source images.
        classes: Whether to test the probability of each class, with Bonferroni's correction, as
            their black-box shift detection does; otherwise the largest probability alone.
    """

    def __init__(self, source: Seen, *, classes: bool) -> None:
        self.name = "KS, softmax of each class" if classes else "KS, confidence"
        self._classes = classes
        self._source = np.sort(self._columns(source), axis=0)

    def _columns(self, seen: Seen) -> Numbers:
        return seen.softmax if self._classes else seen.softmax.max(1, keepdims=True)

    def score(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        found = self._columns(batch)
        return max(
            ks_distance(np.sort(mine), source)
            for mine, source in zip(found.T, self._source.T, strict=True)
        )

    def p_value(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        found = self._columns(batch)
        smallest = min(
            stats.ks_2samp(mine, source).pvalue
            for mine, source in zip(found.T, self._source.T, strict=True)
        )
        return min(1.0, found.shape[1] * float(smallest))


def ks_distance(one: Numbers, other: Numbers) -> float:
    """The largest distance of two empirical distribution functions, of sorted numbers."""
    places = np.concatenate([one, other])
    shares = (np.searchsorted(each, places, side="right") / len(each) for each in (one, other))
    return float(np.abs(np.subtract(*shares)).max())


class MaximumMeanDiscrepancy:
    """Gretton et al. (2012) on features: RBF kernel, median heuristic, permutations as null.

    Args:
        source: The source images.
        generator: Draws the permutations.
    """

    name = "MMD, features"

    def __init__(self, source: Seen, generator: np.random.Generator) -> None:
        self._source = source.features
        squares = squared_distances(self._source, self._source)
        self._scale = float(np.median(squares[np.triu_indices(len(squares), 1)]))
        self._within = np.exp(-squares / self._scale)
        self._mean_within = float(self._within.mean())
        self._generator = generator

    def _kernel(self, one: Numbers, other: Numbers) -> Numbers:
        kernel: Numbers = np.exp(-squared_distances(one, other) / self._scale)
        return kernel

    def score(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        mine = batch.features
        between = self._kernel(mine, self._source).mean()
        return float(self._kernel(mine, mine).mean() + self._mean_within - 2 * between)

    def p_value(self, batch: Seen) -> float:
        """See `ShiftTest`."""
        size = len(batch)
        between = self._kernel(batch.features, self._source)
        own = self._kernel(batch.features, batch.features)
        kernel = np.block([[own, between], [between.T, self._within]])  # (batch + source) squared
        total = len(kernel)
        signs = np.full((total, PERMUTATIONS + 1), -1 / (total - size))
        signs[:size, 0] = 1 / size
        for column in range(1, PERMUTATIONS + 1):
            signs[self._generator.choice(total, size, replace=False), column] = 1 / size
        found = np.einsum("np,np->p", signs, kernel @ signs)
        return float((found[0] <= found[1:] + 1e-12).sum() + 1) / (PERMUTATIONS + 1)


def squared_distances(one: Numbers, other: Numbers) -> Numbers:
    """Between all rows of two arrays; as one product of matrices, many times as quick as a loop."""
    lengths = np.square(one).sum(1)[:, None] + np.square(other).sum(1)
    return np.maximum(lengths - 2 * one @ other.T, 0)


def all_tests(source: Seen) -> list[ShiftTest]:
    """Every test, knowing these source images."""
    return [
        BandEnergies(source),
        BandEnergies(source, classes=True),
        KolmogorovSmirnov(source, classes=False),
        KolmogorovSmirnov(source, classes=True),
        MaximumMeanDiscrepancy(source, np.random.default_rng(0)),
    ]
