"""The mean of source samples at a layer, for each class that the network predicts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ttapca.support.tensors import at_least_float32

# One mean for each class and number of a sample: 1,000 classes of 224 x 224 pixels are too many.
MOST_NUMBERS = 2**25


class ClassMeans:
    """Adds up samples, each weighted by its class probabilities.

    Example:
        >>> means = ClassMeans()
        >>> means.add(torch.tensor([[1.0], [5.0]]), torch.eye(2))
        >>> [found.tolist() for found in means.found()]  # nearer to 3, the mean of all
        [[[2.0], [4.0]], [0.5, 0.5]]
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._weights: Tensor | None = None

    def add(self, samples: Tensor, shares: Tensor) -> None:
        """Add samples, shape (samples, ...), and their probabilities, (samples, classes)."""
        flat = at_least_float32(samples.detach().flatten(1))
        shape = (shares.shape[1], flat.shape[1])
        if len(shares) != len(flat) or shape[0] * shape[1] > MOST_NUMBERS:
            return
        self._add((shares.to(flat).T @ flat).cpu().double(), shares.sum(0).cpu().double())

    def merge(self, other: ClassMeans) -> None:
        """Add what others have added up."""
        if other._sums is not None and other._weights is not None:
            self._add(other._sums, other._weights)

    def _add(self, sums: Tensor, weights: Tensor) -> None:
        if self._sums is not None and self._weights is not None:
            if self._sums.shape != sums.shape:
                return
            sums, weights = self._sums + sums, self._weights + weights
        self._sums, self._weights = sums, weights

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same of."""
        if self._sums is None or self._weights is None:
            return {}
        return {"sums": self._sums, "weights": self._weights}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> ClassMeans:
        """Make class means of what `tensors` returned."""
        means = cls()
        means._sums, means._weights = tensors.get("sums"), tensors.get("weights")
        return means

    def found(self) -> tuple[Tensor, Tensor] | None:
        """Return means, shape (classes, size), and shares, (classes,); None where there are none.

        Each class has one more sample, which is the mean of all, so that a rare class is not far by
        chance.
        """
        if self._sums is None or self._weights is None:
            return None
        sums, weights = self._sums, self._weights
        total = weights.sum()
        if not (torch.isfinite(sums).all() and torch.isfinite(weights).all() and total > 0):
            return None
        mean = sums.sum(0) / total
        return (sums + mean) / (weights[:, None] + 1), weights / total
