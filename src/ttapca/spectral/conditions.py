"""Which of several conditions each image of a stream has: noise, fog, none, and so on.

A stream can have several *states*, one for each condition, each with gains and statistics of its
own. An image is served by the state that it is nearest to, by its appearance (`Appearances`).

- **A new state** begins if the recent images of a state can be cut into two clearly separate
  groups. Two halves of a normal distribution keep 36 % of its variance; two conditions keep less.
- **Back to normal.** An image much nearer to the source than to any state begins a state at once.
- **A stranger** is farther from every state than any source image is from the source. It begins a
  state at once, so that a few broken images do not spoil another one.
- **One condition at a time** is the common case: a batch that is about as near to its own mean as
  to its nearest states belongs to one state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.resemblance import around_means, resemblance_of_stream

Numbers = NDArray[np.float64]

# Share of its variance that is left in the two halves of a normal distribution.
HALVES_OF_NORMAL = 1 - 2 / math.pi
STEPS = 5  # of k-means after a split, of which more change nothing

# Source images for each number that describes an image; fewer do not tell how images vary.
FEWEST_SOURCE = 4
# An image without any detail has no logarithm; as a share of the median of source images.
LEAST = 1e-3
MOST_LOGARITHM = 300.0  # of an energy: any more would overflow
# In place of a deviation of zero, where a number is the same in all source images.
LEAST_DEVIATION = 1e-6


class Appearances:
    """Describes images by logarithms of band energies and textures, whitened by the source."""

    def __init__(
        self, energies: Tensor, textures: Tensor | None = None, constants: Constants = CONSTANTS
    ) -> None:
        self._bands = energies.shape[1]
        measured = _beside(energies, textures)
        self._least = LEAST * measured.median(0).values.clamp(min=torch.finfo(torch.float32).tiny)
        self._source = measured[:, : self._bands].numpy()
        logarithms = (measured + self._least).log()
        # Whitened, so that the subject of an image counts little, and its condition much.
        self._mean = logarithms.mean(0)
        self._deviation = logarithms.std(0).clamp(min=LEAST_DEVIATION)
        unit = (logarithms - self._mean) / self._deviation
        correlations = unit.T @ unit / (len(unit) - 1)
        ridge = constants.ridge * torch.eye(len(correlations), dtype=torch.float64)
        self._whiten = torch.linalg.cholesky(torch.linalg.inv(correlations + ridge))
        self._unwhiten = torch.linalg.inv(self._whiten).numpy()
        # Whether there were enough source images to say how they vary.
        self.known = len(measured) >= FEWEST_SOURCE * self.size
        # `reach` is the squared distance of the farthest source image from the mean of the others,
        # in units of how these vary: as it is if the image is left out of mean and covariance.
        farthest, images = float((unit @ self._whiten).square().sum(1).max()), len(unit)
        left = max(1 - images * farthest / (images - 1) ** 2, 1 / images)
        self.reach = farthest * images**2 * (images - 2) / (images - 1) ** 3 / left

    @property
    def size(self) -> int:
        """How many numbers describe an image."""
        return len(self._mean)

    def __call__(self, energies: Tensor, textures: Tensor | None = None) -> Tensor:
        """Return one row for each image, float64 on the CPU, shape (images, `size`)."""
        logarithms = (_beside(energies, textures) + self._least).log()
        whitened: Tensor = (logarithms - self._mean) / self._deviation @ self._whiten
        return whitened

    def by_band(self, rows: Numbers, away: Numbers) -> Numbers:
        """Return differences of descriptions by band, each in units of its own deviation.

        Noise adds as much energy to all images, whose logarithms then differ less. So these units
        are those of source images with the energy that `rows`, whole descriptions, have in excess.
        """
        bands, least = slice(self._bands), self._least[: self._bands].numpy()
        deviation = self._deviation[bands].numpy()
        logarithms = rows @ self._unwhiten[:, bands] * deviation + self._mean[bands].numpy()
        found = np.exp(logarithms.clip(max=MOST_LOGARITHM)).mean(0) - least
        excess = (found - self._source.mean(0)).clip(min=0)
        usual = np.log(self._source + least + excess).std(0, ddof=1).clip(min=LEAST_DEVIATION)
        return cast(Numbers, away @ self._unwhiten[:, bands] * (deviation / usual))


def _beside(energies: Tensor, textures: Tensor | None) -> Tensor:
    both = energies if textures is None else torch.cat([energies, textures.to(energies)], 1)
    return both.detach().to("cpu", torch.float64)


@dataclass(frozen=True, eq=False)
class KnownConditions:
    """The conditions of one stream, in float64."""

    centres: Numbers  # appearance of each state, shape (states, numbers)
    weights: Numbers  # number of recent images of each state, shape (states,)
    # Appearances of the last images in which states were looked for, shape (images, numbers).
    searched: Numbers
    # Appearances of the images since then; apart, so that one more does not copy hundreds.
    unsearched: Numbers

    @classmethod
    def none(cls, size: int) -> Self:
        """Return the conditions of a new stream, whose images have descriptions of this size."""
        nothing = np.zeros((0, size))
        return cls(nothing, np.zeros(0), nothing, nothing)

    def last(self, count: int) -> Numbers:
        """Return the appearances of up to this many last images."""
        missing = count - len(self.unsearched)
        if missing <= 0:
            return self.unsearched[-count:]
        return np.concatenate([self.searched[-missing:], self.unsearched])

    def with_images(self, appearances: Numbers, most: int, memory: float) -> KnownConditions:
        """Return the same with up to `most` more recent images, and a state if there was none."""
        unsearched = np.concatenate([self.unsearched, appearances])[-most:]
        weights = self.weights * math.exp(-len(appearances) / memory)
        known = replace(self, weights=weights, unsearched=unsearched)
        return known if len(known.centres) else known.with_state(0, appearances.mean(0))

    def with_state(self, place: int, centre: Numbers) -> KnownConditions:
        """Return the same with a state of no images in this place, centre of shape (numbers,)."""
        centres, weights = self.centres[:place], self.weights[:place]
        centres = np.concatenate([centres, centre[None], self.centres[place + 1 :]])
        weights = np.concatenate([weights, [0.0], self.weights[place + 1 :]])
        return replace(self, centres=centres, weights=weights)

    def present(self, images: int = CONSTANTS.block) -> NDArray[np.int64]:
        """Return the states that more than one of the last images had, in order."""
        last = self.last(images)
        if len(last) < 2 or not len(self.centres):
            return np.zeros(1, dtype=np.int64)
        counts = np.bincount(_nearest(last, self.centres), minlength=len(self.centres))
        found: NDArray[np.int64] = np.flatnonzero(counts > 1)
        return found


class ConditionStates:
    """Finds up to `most` states of a stream, and says which one each image belongs to."""

    def __init__(
        self, describe: Appearances, most: int = CONSTANTS.states, constants: Constants = CONSTANTS
    ) -> None:
        self.describe = describe
        self.most = most
        self.constants = constants
        # Images that are searched for a new state, that show together whether they have one
        # condition, and of the smallest condition.
        self._recent = round(2 * constants.memory)
        self._enough, self._fewest = constants.block // 2, constants.block // 8
        self._reach = constants.beyond * describe.reach  # squared distance of a stranger

    @classmethod
    def of_source(
        cls,
        energies: Tensor | None,
        textures: Tensor | None,
        most: int,
        constants: Constants = CONSTANTS,
    ) -> ConditionStates | None:
        """Return the finder of states; None for one, or if the source is little known."""
        if most == 1 or energies is None:
            return None
        describe = Appearances(energies, textures, constants)
        return cls(describe, most, constants) if describe.known else None

    def told_apart(
        self, known: KnownConditions, appearances: Numbers
    ) -> tuple[KnownConditions, NDArray[np.int64], set[int]]:
        """Return the conditions after images, the state of each, and the states that began anew."""
        before, known = known, known.with_images(appearances, self._recent, self.constants.memory)
        begun: set[int] = set()
        large = len(appearances) >= self._enough
        # Enough images have come that could have brought another condition.
        new, block = len(known.unsearched), self.constants.block
        if new >= block // 4 and new + len(known.searched) >= block:
            known = self._searched(known, begun)
        # In a large batch, a search or its mean tells better than its outermost images.
        if not large and self._some_like_source(appearances, before, known.centres):
            known = self._begin(known, np.zeros_like(appearances[0]), begun)
        known, strange = self._with_strangers(known, before, appearances, begun)
        nearest = _nearest(appearances, known.centres)
        together = appearances[~strange] if large else known.last(self._enough)
        if len(together) >= self._enough:
            mean = together.mean(0, keepdims=True)
            to_mean = np.square(together - mean).sum() / (len(together) - 1)
            to_nearest = _squares(together, known.centres).min(1).mean()
            # Images of two states that are just far enough apart are so much nearer to these.
            if to_mean - to_nearest < (self.constants.far / 2) ** 2:
                # Images of several small batches may have several conditions; a search tells.
                if large and _squares(mean, known.centres).min() > self.constants.far**2:
                    known = self._begin(known, mean[0], begun)
                [state] = _nearest(mean, known.centres)
                squares = _squares(appearances, known.centres)
                # When a condition ends, its last images still outnumber images of the next one.
                stay = squares[:, state] - squares.min(1) < 2 * self.constants.far**2
                nearest[~strange & (stay | large)] = state
        centres, weights = _moved(known.centres, known.weights, appearances, nearest)
        return replace(known, centres=centres, weights=weights), nearest, begun

    def resemblance(self, known: KnownConditions) -> float:
        """Return how far the last images of a stream resemble those of their state, from 0 to 1."""
        rows = known.last(self.constants.block)
        away, freedom = around_means(rows, _nearest(rows, known.centres))
        return resemblance_of_stream(self.describe.by_band(rows, away), freedom, self.constants)

    def _place(self, known: KnownConditions, taken: Iterable[int]) -> int | None:
        """Return the number for a new state, not a taken one; None if there is no place."""
        if len(known.centres) < self.most:
            return len(known.centres)
        weights = known.weights.copy()
        weights[list(taken)] = math.inf
        weakest = int(weights.argmin())
        return weakest if weights[weakest] < self._fewest else None

    def _begin(self, known: KnownConditions, centre: Numbers, begun: set[int]) -> KnownConditions:
        """Return the same with one more state, if there is a place for it."""
        place = self._place(known, begun)
        if place is None:
            return known
        begun.add(place)
        return known.with_state(place, centre)

    def _with_strangers(
        self, known: KnownConditions, before: KnownConditions, appearances: Numbers, begun: set[int]
    ) -> tuple[KnownConditions, NDArray[np.bool_]]:
        """Begin states for strangers, and say which images these are."""
        nearest = _nearest(appearances, known.centres)
        squares = _squares(appearances, known.centres).min(1)
        strange = squares > self._reach
        if strange.any():
            strange = squares > self._limits(known, before)[nearest]
        if strange.any() and len(appearances) >= self._enough:
            # None if the whole batch is as far away.
            mean = appearances.mean(0, keepdims=True)
            squares_to_mean = _squares(appearances, mean)[:, 0]
            spread = float(squares_to_mean.mean()) / self.describe.size
            strange &= squares_to_mean > self._reach * max(1.0, spread)
        left = np.flatnonzero(strange)
        while len(left):  # images that are nearer to the first one than to any state go with it
            rows = appearances[left]
            alike = _squares(rows, rows[:1])[:, 0] < squares[left]
            known = self._begin(known, rows[alike].mean(0), begun)
            left = left[~alike]
        return known, strange

    def _limits(self, known: KnownConditions, before: KnownConditions) -> Numbers:
        """Return the squared distance from each state beyond which an image is a stranger."""
        recent = before.last(self._recent)
        nearest = _nearest(recent, known.centres)
        found = []
        for state, centre in enumerate(known.centres):
            own = recent[nearest == state]
            if min(known.weights[state], len(own)) >= self._fewest:  # may vary more than the source
                squares = _squares(own, centre[None])
                spread = float(squares.mean()) / self.describe.size
                farthest = self.constants.beyond * float(squares.max())
                found.append(max(self._reach * max(1.0, spread), farthest))
            else:  # it is not known how much its images vary, unless they are like the source
                like_source = bool(np.square(centre).sum() <= self.constants.far**2)
                found.append(self._reach if like_source else math.inf)
        return np.array(found)

    def _searched(self, known: KnownConditions, begun: set[int]) -> KnownConditions:
        """Split states as long as there are two conditions in one."""
        recent = known.last(self._recent)
        while (place := self._place(known, begun)) is not None:
            centres, apart = known.centres, self.constants.apart
            if len(centres) > 1:  # the stream is known to have several conditions
                apart = (apart + HALVES_OF_NORMAL) / 2
            nearest = _nearest(recent, centres)
            found = [
                (*split, state)
                for state in range(len(centres))
                if (split := self._two_groups(recent[nearest == state], apart)) is not None
            ]
            if not found:
                break
            _, stays, leaves, state = max(found, key=lambda each: each[0])
            if place == state:
                break
            # The moments of the state belong to the group that is nearer to it, but its centre
            # stood for both.
            if np.linalg.norm(stays - centres[state]) > np.linalg.norm(leaves - centres[state]):
                stays, leaves = leaves, stays
            begun.add(place)
            known = known.with_state(place, leaves)
            start = known.centres.copy()
            start[state] = stays
            kept = known.weights.copy()
            kept[state] = 0.0
            centres = start
            for _ in range(STEPS):
                centres, _ = _moved(start, kept, recent, _nearest(recent, centres))
            known = replace(known, centres=centres)
        return replace(known, searched=recent, unsearched=recent[:0])

    def _two_groups(self, rows: Numbers, apart: float) -> tuple[float, Numbers, Numbers] | None:
        """Split images in two: by how much the sum of squares falls, and both means; or None."""
        constants = self.constants
        if len(rows) < 2 * self._fewest:
            return None
        away = rows - rows.mean(0)
        # By torch: beside it, numpy has threads of its own, and to wake these takes longer.
        covariance = torch.from_numpy(away.T @ away / (len(rows) - 1))
        variances, directions = (each.numpy() for each in torch.linalg.eigh(covariance))
        best: tuple[float, Numbers, Numbers] | None = None
        # Source images vary by 1, and two groups that are far enough apart by so much more.
        least = 1 + (constants.far / 2) ** 2
        for number in range(1, 1 + int((variances > least).sum())):
            places = away @ directions[:, -number]
            left, cut, distance = _two_means(places)
            upper = places > cut
            fewer = min(int(upper.sum()), int((~upper).sum()))
            gain = (1 - left) * float(variances[-number]) * len(rows)
            if (
                left > apart
                or distance < constants.far
                or fewer < self._fewest
                or (best and gain <= best[0])
            ):
                continue
            best = (gain, rows[upper].mean(0), rows[~upper].mean(0))
        return best

    def _some_like_source(self, rows: Numbers, before: KnownConditions, centres: Numbers) -> bool:
        """Return whether images are like the source, while no state is and none has such images."""
        deviations, squares = self.constants.far, np.square(centres).sum(1)
        if squares.min() <= deviations**2:
            return False
        lengths = np.sqrt(squares)
        squares = _squares(rows, centres)
        states = squares.argmin(1)
        to_source = np.square(rows).sum(1)
        like = (squares.min(1) - to_source > 2 * deviations**2) & (to_source <= self._reach)
        recent = before.last(self._recent) if like.any() else rows[:0]
        for state in sorted(set(states[like].tolist())):
            direction = centres[state] / lengths[state]
            # How much the images of the state vary towards the source; at first, these images tell.
            own = recent[_nearest(recent, centres) == state]
            own = (own if len(own) >= self._fewest else rows[states == state]) @ direction
            spread = float(own.std(ddof=1)) if len(own) >= self._fewest else 1.0  # as source images
            places = rows[like & (states == state)] @ direction
            if bool((lengths[state] - places > deviations * spread).any()):
                return True
        return False


def _squares(rows: Numbers, centres: Numbers) -> Numbers:
    """Return squared distances, shape (rows, centres)."""
    found: Numbers = np.square(rows[:, None] - centres).sum(-1)
    return found


def _nearest(rows: Numbers, centres: Numbers) -> NDArray[np.int64]:
    found: NDArray[np.int64] = _squares(rows, centres).argmin(1)
    return found


def _moved(
    centres: Numbers, counts: Numbers, rows: Numbers, nearest: NDArray[np.int64]
) -> tuple[Numbers, Numbers]:
    """Return means and counts of states after some rows, each of which is nearest to a state."""
    means, total = centres.copy(), counts.copy()
    for state in set(nearest.tolist()):  # mostly it is one
        own = rows[nearest == state]
        total[state] += len(own)
        means[state] += (own - centres[state]).sum(0) / total[state]
    return means, total


def _two_means(places: Numbers) -> tuple[float, float, float]:
    """Cut numbers in two: the variance left (a share), the cut, the distance of the means."""
    rising = np.sort(places)
    number = len(rising)
    below = np.arange(1, number)
    sums = rising.cumsum()
    lower, upper = sums[:-1] / below, (sums[-1] - sums[:-1]) / (number - below)
    between = below * (number - below) / number**2 * np.square(upper - lower)
    best = int(between.argmax())
    left = 1 - float(between[best]) / float(rising.var())
    cut = float(rising[best] + rising[best + 1]) / 2
    return left, cut, float(upper[best] - lower[best])
