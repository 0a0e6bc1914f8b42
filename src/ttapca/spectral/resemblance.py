"""How far samples resemble each other: frames of a drive, takes of a speaker, images of a class.

A hundred frames of one drive say less about a source, or about a shift, than a hundred photographs.
Let the log band energies of samples have a covariance S, of which a part B lies between groups of
samples that belong together. Then the mean of n samples of one group varies by B + (S - B) / n, and
not by S / n. So clean drives stay inside the normal range, and only in the directions in which
drives differ does it take a stronger shift to be sure of one.

`fit` measures B with samples grouped as the user names it (drives, patients, speakers), or else by
stretches of the data in order of arrival: see `measured_resemblance`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.chain import design_effect
from ttapca.spectral.constants import CONSTANTS, Constants

Numbers = NDArray[np.float64]

# Stretches are at most such a part of the data: fewer of them tell nothing.
FEWEST_STRETCHES = 8
# The first bands have too few components to tell how much samples vary.
WILD_BANDS = 2
# A direction in which log energies hardly vary would be rounding, in units of the largest one.
LEAST_VARIANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Resemblance:
    """How far samples of the source resemble each other."""

    # Number of independent samples in the source, in the direction in which they resemble most.
    independent: float
    correlation: float = 0.0  # of the log energies of two samples of a group, mean over directions
    classmates: float | None = None  # the same of two samples of a class; None without classes
    # B above, float64, shape (bands, bands); None if no samples resemble each other.
    between: Tensor | None = field(default=None, repr=False)
    # The part of the covariance of the source's mean that is due to resemblance, likewise.
    error: Tensor | None = field(default=None, repr=False)

    def worth(self, samples: Tensor) -> Tensor:
        """Return the number of independent samples among those of a stream, on average."""
        if not self.correlation:
            return samples
        return design_effect(samples, torch.tensor(self.correlation))

    def excess(self, samples: int) -> Tensor | None:
        """Return the covariance that resemblance adds to the mean of samples, or None.

        Shape (bands, bands); the mean is taken from that of the source.
        """
        if self.between is None or self.error is None:
            return None
        return self.between * (1 - 1 / samples) + self.error

    def told(self, constants: Constants) -> Constants:
        """Return the constants with the likeness that was measured, if any was."""
        if self.classmates is None:
            return constants
        return dataclasses.replace(constants, likeness=self.classmates)

    def truncated(self, bands: int, *, rest: bool) -> Resemblance:
        """Return the same for the first bands; `rest` adds one that resembles nothing."""
        if self.between is None or self.error is None:
            return self
        sides = (0, int(rest), 0, int(rest))
        between, error = (
            torch.nn.functional.pad(each[:bands, :bands], sides)
            for each in (self.between, self.error)
        )
        return dataclasses.replace(self, between=between, error=error)

    def tensors(self) -> dict[str, Tensor]:
        """Return all of it for a file; see `of_tensors`."""
        classmates = -1.0 if self.classmates is None else self.classmates
        numbers = [self.independent, self.correlation, classmates]
        found = {"resemblance": torch.tensor(numbers, dtype=torch.float64)}
        if self.between is not None and self.error is not None:
            found["resemblance_covariances"] = torch.stack([self.between, self.error])
        return found

    @classmethod
    def of_tensors(cls, numbers: Tensor, covariances: Tensor | None) -> Resemblance:
        """Make it of `tensors`."""
        independent, correlation, classmates = numbers.tolist()
        between, error = (None, None) if covariances is None else covariances
        known = None if classmates < 0 else classmates
        return cls(independent, correlation, known, between, error)


def measured_resemblance(
    energies: Tensor, classes: Tensor | None, groups: Sequence[Any] | None
) -> Resemblance:
    """Return how far samples of the source resemble each other.

    Without groups, stretches of 2, 4, 8, ... samples, up to an eighth of the data, stand for them,
    after the mean of each predicted class is taken out. So a video is noticed, data that are sorted
    by class do not look like one, and shuffled data look independent. A correlation that chance
    explains counts as none.

    Args:
        energies: Their band energies in order of arrival, shape (samples, bands).
        classes: The class of each by its prediction, shape (samples,), if there are any.
        groups: The group of each, if groups are named.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> drives = torch.rand(16, 3, generator=generator).repeat_interleave(20, 0)
        >>> frames = (drives + 0.1 * torch.rand(320, 3, generator=generator)).exp()
        >>> found = measured_resemblance(frames, None, None)
        >>> found.correlation > 0.8, found.independent < 32
        (True, True)
    """
    logs = energies.double().clamp(min=1e-12).log().cpu().numpy()
    away = logs - logs.mean(0)
    count = len(away)
    values, vectors = np.linalg.eigh(away.T @ away / max(1, count - 1))
    kept = values > LEAST_VARIANCE * values.max(initial=0.0)
    values, vectors = values[kept], vectors[:, kept]
    rows = away @ vectors / np.sqrt(values)  # varies by 1 in each direction
    classmates = None
    if classes is not None:
        number = np.unique(classes.cpu().numpy(), return_inverse=True)[1]
        classmates = float(intraclass_correlation(rows, number).mean())
        if groups is None:
            rows = _around_classes(rows, number)
    if groups is None:
        lengths = (2**power for power in range(1, count.bit_length()))
        groupings = [np.arange(count) // n for n in lengths if count >= FEWEST_STRETCHES * n]
    else:
        groupings = [np.unique(np.asarray(groups), return_inverse=True)[1]]
    correlation, crowd = _largest(rows, groupings)
    if not correlation.any():
        return Resemblance(float(count), classmates=classmates)
    between = (vectors * (values * correlation)) @ vectors.T
    error = (vectors * (values * (crowd - 1) / count)) @ vectors.T
    return Resemblance(
        count / float(crowd.max()),
        float(correlation.mean()),
        classmates,
        torch.from_numpy(between),
        torch.from_numpy(error),
    )


def _largest(rows: Numbers, groupings: Sequence[NDArray[np.int64]]) -> tuple[Numbers, Numbers]:
    """Return by direction the largest correlation within groups that chance does not explain.

    And for how many samples one independent sample stands, at least 1. Groupings hold the group of
    each row.
    """
    directions = rows.shape[1]
    largest, crowd = np.zeros(directions), np.ones(directions)
    # All directions of all groupings together are wrong as rarely as that.
    rare = CONSTANTS.rare / max(1, directions * len(groupings))
    for number in groupings:
        correlation = intraclass_correlation(rows, number, rare)
        size = np.square(np.bincount(number)).sum() / len(rows)  # of the group of a sample
        largest = np.maximum(largest, correlation)
        crowd = np.maximum(crowd, size / design_effect(size, correlation))
    return largest, crowd


def intraclass_correlation(
    rows: Numbers, number: NDArray[np.int64], rare: float | None = None
) -> Numbers:
    """Return the correlation of rows of one group by direction, from 0 to 1 (analysis of variance).

    A correlation that chance exceeds with the probability `rare` or more counts as none.
    """
    sizes = np.bincount(number).astype(np.float64)
    groups, count = len(sizes), len(rows)
    if not 1 < groups < count:
        return np.zeros(rows.shape[1])
    means = _sums(rows, number) / sizes[:, None]
    within = np.square(rows - means[number]).sum(0) / (count - groups)
    between = sizes @ np.square(means - rows.mean(0)) / (groups - 1)
    size = (count - np.square(sizes).sum() / count) / (groups - 1)
    total = between + (size - 1) * within
    found: Numbers = ((between - within) / np.maximum(total, 1e-300)).clip(0, 1)
    if rare is None:
        return found
    # The ratio of variances follows F, whose cube root is about normal (Paulson, 1942).
    root = np.cbrt(between / np.maximum(within, 1e-300))
    ours, theirs = 2 / (9 * (groups - 1)), 2 / (9 * (count - groups))
    normal = ((1 - theirs) * root - (1 - ours)) / np.sqrt(theirs * np.square(root) + ours)
    surely: Numbers = np.where(normal > -NormalDist().inv_cdf(rare), found, 0.0)
    return surely


def _sums(rows: Numbers, number: NDArray[np.int64]) -> Numbers:
    found = np.zeros((number.max() + 1, rows.shape[1]))
    np.add.at(found, number, rows)
    return found


def _around_classes(rows: Numbers, number: NDArray[np.int64]) -> Numbers:
    """Return rows around the mean of the others of their class; a class of one says nothing."""
    sizes = np.bincount(number).astype(np.float64)[number][:, None]
    others = (_sums(rows, number)[number] - rows) / np.maximum(sizes - 1, 1)
    found: Numbers = np.where(sizes > 1, rows - others, 0.0)
    return found


def resemblance_of_stream(rows: Numbers, freedom: int, constants: Constants = CONSTANTS) -> float:
    """Return how far the samples of a stream resemble each other, from 0 to 1.

    That is by how much less their bands vary than those of the source, in the band that keeps the
    second largest share of its variance. A shift changes how much bands vary, but hardly that of
    all: under nineteen corruptions of CIFAR-10 at severity 5 this band keeps 0.78 or more, of 64
    frames of a still scene 0.2 or less. Chance is granted, and the first two bands do not count:
    their energies, of one and two components, vary wildly.

    Args:
        rows: Log energies of samples around their mean, in deviations of the source, shape
            (samples, bands).
        freedom: Number of samples that are free to vary, given their means.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(60, 8))
        >>> resemblance_of_stream(rows, 59), round(resemblance_of_stream(rows / 10, 59), 2)
        (0.0, 0.98)
    """
    if freedom < 1 or rows.shape[1] < WILD_BANDS + 2:
        return 0.0
    # A quantile of chi squared, whose cube root is about normal (Wilson and Hilferty, 1931).
    spread = 2 / (9 * freedom)
    root = 1 - spread + NormalDist().inv_cdf(constants.rare) * math.sqrt(spread)
    least = freedom * max(0.0, root) ** 3
    squares = float(np.sort(np.square(rows[:, WILD_BANDS:]).sum(0))[-2])
    return max(0.0, 1 - squares / least) if least > 0 else 0.0
