"""Sums over the channels of normalisation layers, in all and by class; sums of parts add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

VALUES = "values:"  # before the path of a layer
BY_CLASS = "by_class:"
SQUARES = "squares:"
OTHER_ROWS = "other_rows:"
LOOKS = ("looks", "looks_shares", "looks_weights")


@dataclass(eq=False)
class ChannelSums:
    """What `ttapca.fitting.source_channels` has measured so far.

    Attributes:
        measured: How many images.
        other_rows: Paths of layers whose rows are not images, which are left out.
        weights: Sum of the probabilities of each class, shape (classes,); None without classes.
        looks: Late layers of each image, its class probabilities, and for how many images it
            counts, one row each.
    """

    measured: int = 0
    other_rows: set[str] = field(default_factory=set)
    weights: Tensor | None = None
    looks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    # By path: sums of means and of mean squares, and for how many images, shape (3, channels).
    _values: dict[str, Tensor] = field(default_factory=dict)
    _by_class: dict[str, Tensor] = field(default_factory=dict)  # (classes, 2, channels)
    _squares: dict[str, Tensor] = field(default_factory=dict)  # of channel means, (channels,)

    def add_values(self, path: str, moments: Tensor, images: float) -> None:
        """Add sums over images of channel means and of mean squares, shape (2, channels)."""
        sums = torch.cat([moments, torch.full_like(moments[:1], images)])
        self._values[path] = self._values.get(path, 0.0) + sums

    def knows(self, classes: int) -> bool:
        """Return whether sums by so many classes can be added."""
        return self.weights is None or len(self.weights) == classes

    def add_classes(
        self, weights: Tensor, by_class: Mapping[str, Tensor], squares: Mapping[str, Tensor]
    ) -> None:
        """Add weights of classes, and the weighted sums of layers, in float64."""
        self.weights = weights if self.weights is None else self.weights + weights
        for path, sums in by_class.items():
            self._by_class[path] = self._by_class.get(path, 0.0) + sums
        for path, sums in squares.items():
            self._squares[path] = self._squares.get(path, 0.0) + sums

    def merge(self, other: ChannelSums) -> None:
        """Add what others have measured."""
        self.measured += other.measured
        self.other_rows |= other.other_rows
        for path, sums in other._values.items():
            self._values[path] = self._values.get(path, 0.0) + sums
        if other.weights is not None and self.knows(len(other.weights)):
            self.add_classes(other.weights, other._by_class, other._squares)
            self.looks += other.looks

    def means(self) -> dict[str, Tensor]:
        """Return the means and mean squares of channels by path, shape (2, channels)."""
        return {
            path: sums[:2] / sums[2]
            for path, sums in self._values.items()
            if path not in self.other_rows
        }

    def classes(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the weights of classes and the sums of layers that are finite."""
        weights = self.weights
        if weights is None or not torch.isfinite(weights).all():
            return None, {}
        return weights, {
            path: sums
            for path, sums in self._by_class.items()
            if path not in self.other_rows and sums.isfinite().all()
        }

    @property
    def squares(self) -> dict[str, Tensor]:
        """The sums of squared channel means by path, shape (channels,)."""
        return dict(self._squares)

    def looked(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the rows of `looks` as one table each; None if there are none of one kind."""
        widths = {(each.shape[1], shares.shape[1]) for each, shares, _ in self.looks}
        if len(widths) != 1:
            return None
        features, shares, weights = (torch.cat(each) for each in zip(*self.looks, strict=True))
        return features, shares, weights

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same sums of."""
        found = {"measured": torch.tensor(self.measured)}
        if self.weights is not None:
            found["weights"] = self.weights
        found |= {VALUES + path: sums for path, sums in self._values.items()}
        found |= {BY_CLASS + path: sums for path, sums in self._by_class.items()}
        found |= {SQUARES + path: sums for path, sums in self._squares.items()}
        looked = self.looked()
        if looked is not None:
            found |= dict(zip(LOOKS, looked, strict=True))
        return found | {OTHER_ROWS + path: torch.empty(0) for path in self.other_rows}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> ChannelSums:
        """Make sums of what `tensors` returned."""

        def named(prefix: str) -> dict[str, Tensor]:
            cut = len(prefix)
            return {name[cut:]: each for name, each in tensors.items() if name.startswith(prefix)}

        return cls(
            measured=int(tensors["measured"]),
            other_rows=set(named(OTHER_ROWS)),
            weights=tensors.get("weights"),
            looks=[tuple(tensors[name] for name in LOOKS)] if LOOKS[0] in tensors else [],  # type: ignore[list-item]
            _values=named(VALUES),
            _by_class=named(BY_CLASS),
            _squares=named(SQUARES),
        )
