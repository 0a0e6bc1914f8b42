"""Which of several conditions each image of a stream has: noise, fog, none, and so on.

One set of gains and statistics cannot serve a batch in which every image may have another
condition. So a stream can have several *states*, one for each condition, and each image is served
by the state that it is nearest to.

Its appearance tells which one that is (`ttapca.spectral.appearances`).

**A new state.** There is one state at first. The images that a state had of late are split in two
along a direction in which they vary, where the split leaves two clearly separate groups: far
apart, and each so narrow that they cannot be the two halves of one. One condition does not do that,
however much its images vary: two halves of a normal distribution keep 36 % of its variance, two
halves of an even one 25 %. The images of two conditions keep less than that.

**Back to normal.** When a condition ends, what follows looks like the source, and that is known
beforehand: an image that is much nearer to the source than to any state begins a state at once.

**One condition at a time** is what most streams have. Where the images of a batch are about as
near to their own mean as each is to its nearest state, the whole batch belongs to one state: the
one nearest to its mean, or a new one if all are far from it.

States are not forgotten: a condition that comes back finds the state that it had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.appearances import Appearances
from ttapca.spectral.constants import CONSTANTS, Constants

Numbers = NDArray[np.float64]

# Share of its variance that is left in the two halves of a normal distribution.
HALVES_OF_NORMAL = 1 - 2 / math.pi
STEPS = 5  # of k-means after a split, of which more change nothing


@dataclass(frozen=True, eq=False)
class KnownConditions:
    """What is known of the conditions of one stream.

    Attributes:
        centres: Appearance of each state, float64, shape (states, numbers).
        weights: How many images each centre stands for, float64, shape (states,).
        searched: Appearances of the last images in which states were looked for, float64, shape
            (images, numbers).
        unsearched: Those of the images since then. Kept apart, so that a single image more does not
            make a copy of hundreds.
    """

    centres: Numbers
    weights: Numbers
    searched: Numbers
    unsearched: Numbers

    @classmethod
    def none(cls, size: int) -> Self:
        """Return what is known of a new stream, where so many numbers describe an image."""
        nothing = np.zeros((0, size))
        return cls(nothing, np.zeros(0), nothing, nothing)

    def last(self, count: int) -> Numbers:
        """Return the appearances of so many last images, or of fewer if there are no more."""
        missing = count - len(self.unsearched)
        if missing <= 0:
            return self.unsearched[-count:]
        return np.concatenate([self.searched[-missing:], self.unsearched])

    def with_images(self, appearances: Numbers, most: int) -> KnownConditions:
        """Return the same with these among so many last images, and a state if there was none."""
        unsearched = np.concatenate([self.unsearched, appearances])[-most:]
        known = replace(self, unsearched=unsearched)
        return known if len(known.centres) else known.with_state(appearances.mean(0))

    def with_state(self, centre: Numbers) -> KnownConditions:
        """Return the same with one more state, shape (numbers,)."""
        centres, weights = np.concatenate([self.centres, centre[None]]), np.append(self.weights, 0)
        return replace(self, centres=centres, weights=weights)


class ConditionStates:
    """The states of a stream: finds them, and says which one each image belongs to.

    Args:
        describe: Describes images.
        most: How many states there may be.
        constants: See `ttapca.spectral.constants`.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> source = torch.rand(500, 2, generator=generator) + 0.5
        >>> conditions = ConditionStates(Appearances(source), most=4)
        >>> both = conditions.describe(torch.cat([source[:50], 9 * source[50:100]]))
        >>> _, states = conditions.told_apart(KnownConditions.none(2), both.numpy())
        >>> states.tolist() == [0] * 50 + [1] * 50
        True
    """

    def __init__(
        self,
        describe: Appearances,
        most: int = CONSTANTS.states,
        constants: Constants = CONSTANTS,
    ) -> None:
        self.describe = describe
        self.most = most
        self.constants = constants
        # How many images are looked at for a new state, how many show together whether they have
        # one condition, and how few can be a condition.
        self._recent = round(2 * constants.memory)
        self._enough, self._fewest = constants.block // 2, constants.block // 8

    @classmethod
    def of_source(
        cls,
        energies: Tensor | None,
        textures: Tensor | None,
        most: int,
        constants: Constants = CONSTANTS,
    ) -> ConditionStates | None:
        """Return what tells conditions apart, or None where too little is known of the source.

        Args:
            energies: Band energies of source images, shape (images, bands), or None.
            textures: Textures of the same images, shape (images, numbers), or None.
            most: How many states there may be; with 1, nobody tells them apart.
            constants: See `ttapca.spectral.constants`.
        """
        if most == 1 or energies is None:
            return None
        describe = Appearances(energies, textures, constants)
        return cls(describe, most, constants) if describe.known else None

    def nothing_known(self) -> KnownConditions:
        """Return what is known of a new stream."""
        return KnownConditions.none(self.describe.size)

    def told_apart(
        self, known: KnownConditions, appearances: Numbers
    ) -> tuple[KnownConditions, NDArray[np.int64]]:
        """Return what is known of a stream after some images, and the number of each one's state.

        Args:
            known: What was known of it before; not written into.
            appearances: Shape (images, numbers).
        """
        enough = self._enough
        before, known = known, known.with_images(appearances, self._recent)
        if self._worth_a_search(known):
            known = self._searched(known)
        # In a large batch, a search or its mean tells better than its outermost images.
        few = len(appearances) < enough and len(known.centres) < self.most
        if few and self._some_like_source(appearances, before, known.centres):
            known = known.with_state(np.zeros_like(appearances[0]))
        together = known.last(max(len(appearances), enough))
        mean = together.mean(0, keepdims=True)
        if len(together) >= enough and self._of_one_condition(together, mean, known.centres):
            far = bool(_squares(mean, known.centres).min() > self.constants.far**2)
            # Images of several small batches may have several conditions, which a search tells.
            if far and len(appearances) >= enough and len(known.centres) < self.most:
                known = known.with_state(mean[0])
            nearest = _nearest(mean, known.centres).repeat(len(appearances))
        else:
            nearest = _nearest(appearances, known.centres)
        centres, weights = _moved(known.centres, known.weights, appearances, nearest)
        weights = weights.clip(max=self.constants.memory)
        return replace(known, centres=centres, weights=weights), nearest

    def _searched(self, known: KnownConditions) -> KnownConditions:
        """Split states as long as there are two conditions in one."""
        recent = known.last(self._recent)
        centres, counts = known.centres, known.weights
        while len(centres) < self.most:
            apart = self.constants.apart
            if len(centres) > 1:  # a stream that is known to have several is cut more easily
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
            if _distance(stays, centres[state]) > _distance(leaves, centres[state]):
                stays, leaves = leaves, stays
            # What the state has seen belongs to the group that is nearer to it, but its centre
            # stood for both.
            centres = np.concatenate([centres, leaves[None]])
            centres[state] = stays
            counts = np.append(counts, 0)
            kept = counts.copy()
            kept[state] = 0.0
            start = centres
            for _ in range(STEPS):
                centres, _ = _moved(start, kept, recent, _nearest(recent, centres))
        return KnownConditions(centres, counts, recent, recent[:0])

    def _worth_a_search(self, known: KnownConditions) -> bool:
        """Return whether enough images have come that could have brought another condition."""
        new, block = len(known.unsearched), self.constants.block
        return new >= block // 4 and new + len(known.searched) >= block

    def _two_groups(self, rows: Numbers, apart: float) -> tuple[float, Numbers, Numbers] | None:
        """Split images in two groups that are clearly separate, if there are such.

        Args:
            rows: Appearances, shape (images, numbers).
            apart: The largest share of variance that may be left in the groups.

        Returns:
            By how much the split lowers the sum of squares, and the means of the groups.
        """
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
        """Return whether images are like the source, while no state is and none has such images.

        Args:
            rows: The images.
            before: What was known before these.
            centres: Of the states.
        """
        deviations, squares = self.constants.far, np.square(centres).sum(1)
        if squares.min() <= deviations**2:
            return False
        lengths = np.sqrt(squares)
        squares = _squares(rows, centres)
        states = squares.argmin(1)
        like = squares.min(1) - np.square(rows).sum(1) > 2 * deviations**2
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

    def _of_one_condition(self, rows: Numbers, mean: Numbers, centres: Numbers) -> bool:
        """Return whether images are about as near to their mean as to their nearest centres."""
        to_mean = np.square(rows - mean).sum() / (len(rows) - 1)
        # Those of two states that are just far enough apart are so much nearer to these.
        nearer = (self.constants.far / 2) ** 2
        return bool(to_mean - _squares(rows, centres).min(1).mean() < nearer)


def _squares(rows: Numbers, centres: Numbers) -> Numbers:
    """Return squared distances, shape (rows, centres)."""
    found: Numbers = np.square(rows[:, None] - centres).sum(-1)
    return found


def _nearest(rows: Numbers, centres: Numbers) -> NDArray[np.int64]:
    found: NDArray[np.int64] = _squares(rows, centres).argmin(1)
    return found


def _distance(one: Numbers, two: Numbers) -> float:
    return float(np.linalg.norm(one - two))


def _moved(
    centres: Numbers, counts: Numbers, rows: Numbers, nearest: NDArray[np.int64]
) -> tuple[Numbers, Numbers]:
    """Return the means of all that centres stand for, with the rows that are theirs, and counts."""
    means, total = centres.copy(), counts.copy()
    for state in set(nearest.tolist()):  # mostly it is one
        own = rows[nearest == state]
        total[state] += len(own)
        means[state] += (own - centres[state]).sum(0) / total[state]
    return means, total


def _two_means(places: Numbers) -> tuple[float, float, float]:
    """Cut numbers in two groups so that as little variance as possible is left in them.

    Returns:
        The share of variance that is left, where the cut is, and the distance of the means.

    Example:
        >>> _two_means(np.array([0.0, 1.0, 9.0, 10.0]))[1:]
        (5.0, 9.0)
    """
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
