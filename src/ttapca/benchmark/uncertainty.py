"""How sure a mean error is, and which methods are told apart: statistics over the test images.

One draw is an image with all of its predictions, as all methods predict the same images. From its
share of wrong ones follow the 95 % interval of a mean error (Student's), the interval of the
difference of two methods, image by image, and its p-value by flipping signs (with one prediction of
each image, McNemar's exact test). The order of the images is not in these intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
VANISHED = 1e-25  # even a million of these change no p-value


@dataclass(frozen=True)
class MeanInterval:
    """A mean over images in percent, and half the width of its 95 % interval."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width


@dataclass(frozen=True)
class Difference(MeanInterval):
    """By how much one mean error lies above another, over the same images."""

    p: float  # how likely such a difference is between methods that are equally good

    @property
    def told_apart(self) -> bool:
        """Whether the interval is without zero, and the p-value at most 5 %."""
        return self.p <= 1 - CONFIDENCE and self.low * self.high > 0


@dataclass(frozen=True, eq=False)
class ImageTally:
    """How often each image was predicted wrong, of `predictions`: corruptions times seeds."""

    wrong: NDArray[np.int64]  # (images,)
    predictions: int

    @classmethod
    def of(cls, packed: Sequence[bytes], images: int) -> ImageTally:
        """Count the bits of several measurements of the same images, see `Outcome.correct`."""
        bits = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1)
        correct = np.unpackbits(bits, axis=1, count=images)
        return cls(len(packed) - correct.sum(0, dtype=np.int64), len(packed))

    @property
    def error(self) -> MeanInterval:
        """The mean error."""
        shares = 100 * self.wrong / self.predictions
        return MeanInterval(float(shares.mean()), _half_width(shares))

    def above(self, other: ImageTally) -> Difference:
        """Return by how much this error lies above that of another method on the same images."""
        # Whole numbers, also if one method was measured with more seeds than the other.
        gaps = self.wrong * other.predictions - other.wrong * self.predictions
        shares = 100 * gaps / (self.predictions * other.predictions)
        return Difference(float(shares.mean()), _half_width(shares), sign_flip_p(gaps))


def _half_width(values: NDArray[np.float64]) -> float:
    """Return half the width of the 95 % interval of a mean."""
    from scipy.special import stdtrit

    count, tail = len(values), (1 - CONFIDENCE) / 2
    deviation = float(values.std(ddof=1)) if count > 1 else 0.0
    if not deviation:  # all images alike: the largest share of others that might go unseen
        return float(100 * (1 - tail ** (1 / count)))
    return float(stdtrit(count - 1, 1 - tail)) * deviation / math.sqrt(count)


def sign_flip_p(differences: NDArray[np.int64]) -> float:
    """Return how often random signs make the sum of whole numbers at least as large: a p-value."""
    from scipy.fft import irfft, next_fast_len

    sizes, total = np.abs(differences), abs(int(differences.sum()))
    if not total:
        return 1.0
    divisor = int(np.gcd.reduce(sizes))
    sizes, total = sizes // divisor, total // divisor
    reach = int(sizes.sum())
    # The sum of sizes whose sign is plus goes from 0 to `reach`: one place in a list for each sum.
    places = next_fast_len(reach + 1, real=True)
    angles = np.pi * np.arange(places // 2 + 1) / places
    counts = np.bincount(sizes)[1:]  # of differences of size 1, 2, ...
    alive, factors = np.arange(len(angles)), np.ones(len(angles))
    for size in np.argsort(-counts)[: np.count_nonzero(counts)] + 1:
        factors = factors * np.cos(size * angles[alive]) ** counts[size - 1]
        kept = np.abs(factors) > VANISHED  # soon few are left to compute
        alive, factors = alive[kept], factors[kept]
    transform = np.zeros(len(angles), dtype=complex)
    transform[alive] = factors * np.exp(-1j * reach * angles[alive])
    chances = irfft(transform, places)
    tail = float(chances[(reach + total) // 2 : reach + 1].sum())
    return min(max(2 * tail, 0.0), 1.0)  # both ways; rounding may leave less than nothing


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm, 1979)."""
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")
    corrected = np.empty_like(values)
    factors = np.arange(len(values), 0, -1)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, factors * values[order]))
    found: list[float] = corrected.tolist()
    return found


def differences(tallies: Sequence[ImageTally], reference: int) -> list[Difference]:
    """Return by how much each error lies above one of them, with p-values corrected by `holm`."""
    gaps = [tally.above(tallies[reference]) for tally in tallies]
    corrected = holm([gap.p for number, gap in enumerate(gaps) if number != reference])
    corrected.insert(reference, gaps[reference].p)
    return [replace(gap, p=p) for gap, p in zip(gaps, corrected, strict=True)]


@dataclass(frozen=True)
class Standing:
    """A method's error and rank: methods not told apart from the best of a rank share it."""

    rank: int
    error: MeanInterval


def standings(tallies: Sequence[ImageTally]) -> list[Standing]:
    """Rank methods by their error; methods that are not told apart share a rank."""
    errors = [tally.error for tally in tallies]
    ranks: dict[int, int] = {}
    remaining = sorted(range(len(tallies)), key=lambda number: errors[number].mean)
    while remaining:
        gaps = differences([tallies[number] for number in remaining], 0)  # to the lowest of them
        apart = [number for number, gap in zip(remaining, gaps, strict=True) if gap.told_apart]
        rank = len(ranks) + 1
        ranks |= {number: rank for number in remaining if number not in apart}
        remaining = apart
    return [Standing(ranks[number], error) for number, error in enumerate(errors)]
