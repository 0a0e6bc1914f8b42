"""Which images of a data set are used, and in which order they come.

A folder of pictures is read class by class. Its first images are of one class, and a method that
learns from its batches then sees one class at a time: its numbers are of another problem. So images
that lie class by class are chosen by lot, as many of each class, and shuffled. Images whose classes
are mixed already, as those of CIFAR are, stay as they lie: their first thousand are a fair sample,
and numbers that were published for them can be found again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.images import Images
from ttapca.errors import OptionError, did_you_mean

Order = Literal["auto", "shuffled", "sorted", "stored"]

# Images lie class by class where the class changes from one image to the next less than half as
# often as it would by chance.
FEW_CHANGES = 0.5


@dataclass(frozen=True, eq=False)
class Choice:
    """Which images were chosen, and how.

    Attributes:
        rows: Their numbers, in the order in which they come, shape (chosen,).
        total: How many images there were to choose from.
        per_class: How many are of each class, for people; empty where they are the first ones.
        arrangement: What their order is, for people.

    Example:
        >>> print(choose(np.array([0, 0, 0, 1, 1, 1]), 4, order="sorted"))
        4 of 6 images, 2 of each class, class by class
    """

    rows: NDArray[np.int64]
    total: int
    per_class: str
    arrangement: str

    @property
    def first(self) -> bool:
        """Whether they are the first ones, as they lie."""
        return np.array_equal(self.rows, np.arange(len(self.rows)))

    @property
    def drawn(self) -> bool:
        """Whether some were drawn by lot from all."""
        return len(self.rows) < self.total and bool(self.per_class)

    @property
    def selection(self) -> str:
        """Which ones they are, for people."""
        count = f"{len(self.rows):,}"
        if len(self.rows) == self.total:
            return f"all {count} images"
        if self.per_class:
            return f"{count} of {self.total:,} images, {self.per_class}"
        return f"the first {count} of {self.total:,} images"

    def __str__(self) -> str:
        """One line for a person."""
        return f"{self.selection}, {self.arrangement}"

    def of(self, images: Images) -> Images:
        """The chosen images; a view where they are the first ones, and a copy elsewhere.

        Args:
            images: Those whose labels were chosen from.
        """
        return images[: len(self.rows)] if self.first else images.subset(self.rows)


def choose(
    labels: NDArray[np.int64], limit: int | None = None, *, order: Order = "auto", seed: int = 0
) -> Choice:
    """Choose images by their labels.

    With a limit, images that lie class by class are drawn by lot, as many of each class; of images
    whose classes are mixed already, the first ones are taken. Images of a single class are drawn by
    lot too, for nothing tells how they lie.

    Args:
        labels: Of all images, shape (n,).
        limit: How many to choose at most; all by default.
        order: `auto` shuffles what lies class by class and leaves the rest as it lies; `shuffled`
            always draws and shuffles; `sorted` goes class by class; `stored` takes them as they
            lie.
        seed: Of the lot and of the shuffle.

    Raises:
        OptionError: When an option makes no sense.

    Example:
        >>> by_class = np.repeat(np.arange(10), 500)
        >>> choice = choose(by_class, 700)
        >>> print(choice)
        700 of 5,000 images, 70 of each class, shuffled with seed 0
        >>> np.bincount(by_class[choice.rows]).tolist()
        [70, 70, 70, 70, 70, 70, 70, 70, 70, 70]
        >>> print(choose(np.tile(np.arange(10), 500), 700))
        the first 700 of 5,000 images, as they lie
    """
    _check(limit, order, seed)
    random = np.random.default_rng(seed)
    drawn = order == "shuffled" or lies_by_class(labels)
    count = len(labels) if limit is None else min(limit, len(labels))
    rows = np.arange(count)
    if drawn and count < len(labels):
        rows = np.sort(_drawn_evenly(labels, count, random))
    per_class = _per_class(labels, rows) if drawn else ""
    if order == "sorted":
        rows = rows[np.argsort(labels[rows], kind="stable")]
        return Choice(rows, len(labels), per_class, "class by class")
    if drawn and order != "stored":
        rows = random.permutation(rows)
        return Choice(rows, len(labels), per_class, f"shuffled with seed {seed}")
    return Choice(rows, len(labels), per_class, "as they lie")


def lies_by_class(labels: NDArray[np.int64]) -> bool:
    """Whether images of one class lie together, as in a folder of pictures.

    Args:
        labels: Shape (n,).

    Example:
        >>> lies_by_class(np.array([0, 0, 0, 1, 1, 1])), lies_by_class(np.array([0, 1, 0, 1]))
        (True, False)
    """
    if len(labels) < 2:
        return False
    shares = np.bincount(labels) / len(labels)
    by_chance = (len(labels) - 1) * (1 - float(np.square(shares).sum()))
    return bool(np.count_nonzero(np.diff(labels)) <= FEW_CHANGES * by_chance)


def _check(limit: int | None, order: str, seed: int) -> None:
    if order not in get_args(Order):
        raise OptionError(
            f"An order is one of {', '.join(get_args(Order))}; found `{order}`."
            f"{did_you_mean(order, get_args(Order))}"
        )
    if limit is not None and limit < 1:
        raise OptionError(f"A limit is a whole number of at least 1; found {limit}.")
    if seed < 0:
        raise OptionError(f"A seed is a whole number of at least 0; found {seed}.")


def _drawn_evenly(
    labels: NDArray[np.int64], count: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Numbers of images by lot: one of each class in turn, until there are enough."""
    lot = random.permutation(len(labels))
    together = np.argsort(labels[lot], kind="stable")
    in_order = labels[lot][together]
    turn = np.empty_like(together)
    turn[together] = np.arange(len(lot)) - np.searchsorted(in_order, in_order)
    drawn: NDArray[np.int64] = lot[np.argsort(turn, kind="stable")][:count]
    return drawn


def _per_class(labels: NDArray[np.int64], rows: NDArray[np.int64]) -> str:
    there = np.unique(labels)
    counts = np.bincount(labels[rows], minlength=len(labels) and int(labels.max()) + 1)[there]
    if len(there) < 2:
        return "by lot"
    low, high = int(counts.min()), int(counts.max())
    return f"{low:,} of each class" if low == high else f"{low:,} to {high:,} of each class"
