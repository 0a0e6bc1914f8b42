"""A sample of the source data that is chosen by position: the same one, however the data are read.

Kept are samples whose `position_hash` is below 1 / 2^k, with the smallest k for which there are not
too many. So the samples of parts merge into that of the whole, in whatever order they came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca.errors import NotEnoughDataError

# How many source samples are kept, and how many numbers at most (256 MB in float32): some hundred
# photographs of 224 x 224 pixels, which it takes to know how images vary.
SAMPLES = 2048
SAMPLED_NUMBERS = 2**26

# At most one sample in 8 is held out of a basis that measures it, and so many in all: if an eighth
# is fewer, other eighths are held out of other bases.
HELD_OUT = 8
ENOUGH = 512

# Multiples of the golden ratio, without their whole part, are spread evenly over 0 to 1.
GOLDEN_RATIO = 0.6180339887498949


def position_hash(positions: Tensor) -> Tensor:
    """Return a number from 0 to 1 for each position, spread evenly for positions of any range."""
    # A period in the data, such as classes that take turns, leaves no trace in a choice by it.
    return positions.double() * GOLDEN_RATIO % 1


@dataclass(frozen=True)
class Positions:
    """The positions of the samples of a part: the first one, and the step to the next."""

    first: int = 0
    step: int = 1

    def of(self, start: int, count: int) -> Tensor:
        """Return the positions of `count` samples of the part, from number `start` on."""
        return self.first + self.step * torch.arange(start, start + count)


class PositionSample:
    """Some samples of `size` numbers, evenly spread over a stream of unknown length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._limit = max(2, min(SAMPLES, SAMPLED_NUMBERS // size))
        self.seen = 0
        self._share = 1.0  # a power of 1/2: kept are samples whose number is below it
        self._count = 0
        self._rows: Tensor | None = None  # the first `_count` of `_limit` rows are filled
        self._positions = torch.empty(self._limit, dtype=torch.int64)  # of these rows, in any order

    def take(self, batch: Tensor, positions: Tensor) -> PositionSample:
        """Add samples, (samples, ...), at these positions, (samples,), and return self."""
        self.seen += len(batch)
        return self._add(batch, positions)

    def merge(self, other: PositionSample) -> PositionSample:
        """Add the samples of another one, which stays as it is, and return self."""
        self.seen += other.seen
        self._share = min(self._share, other._share)
        self._drop()
        if other._rows is None:
            return self
        return self._add(other._rows[: other._count], other._positions[: other._count])

    def _add(self, samples: Tensor, positions: Tensor) -> PositionSample:
        if self._rows is None:
            # One piece of memory for all: one per sample would fragment memory.
            self._rows = samples.new_empty(self._limit, self._size)
        chosen = self._below(positions)
        while self._count + len(chosen) > self._limit:
            self._share /= 2
            self._drop()
            chosen = self._below(positions)
        filled = slice(self._count, self._count + len(chosen))
        self._rows[filled] = samples[chosen.to(samples.device)].flatten(1)
        self._positions[filled] = positions[chosen]
        self._count += len(chosen)
        return self

    def _below(self, positions: Tensor) -> Tensor:
        return (position_hash(positions) < self._share).nonzero()[:, 0]

    def _drop(self) -> None:
        """Drop the samples that are no longer chosen."""
        if self._rows is None:
            return
        kept = self._below(self._positions[: self._count])
        if len(kept) < self._count:
            self._count = len(kept)
            self._rows[: self._count] = self._rows[kept.to(self._rows.device)]
            self._positions[: self._count] = self._positions[kept]

    def all(self) -> Tensor:
        """Return all kept samples in order of their positions, shape (samples, size)."""
        if self._rows is None:
            raise NotEnoughDataError("Calibration needs data; found none.")
        positions, rows = self._positions[: self._count], self._rows[: self._count]
        if bool((positions.diff() > 0).all()):
            return rows
        return rows[positions.argsort().to(rows.device)]

    def folds(self, groups: Sequence[Any] | None = None) -> list[Tensor]:
        """Return which rows of `all` to hold out together; at most an eighth, or groups."""
        if groups is not None:
            rows: dict[Any, list[int]] = {}
            for row, group in enumerate(groups):
                rows.setdefault(group, []).append(row)
            folds: list[list[int]] = [[] for _ in range(min(HELD_OUT, len(rows)))]
            for own in sorted(rows.values(), key=len, reverse=True):  # each into the smallest fold
                min(folds, key=len).extend(own)
            return [torch.tensor(sorted(fold)) for fold in folds]
        step = math.ceil(self._count * HELD_OUT / self.seen)
        number = math.ceil(min(self._count, ENOUGH) * step / self._count)
        return [torch.arange(first, self._count, step) for first in range(min(number, self._count))]

    def positions(self) -> Tensor:
        """Return the positions of the rows of `all`."""
        return self._positions[: self._count].sort().values

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory for rows to come."""
        rows = None if self._rows is None else self._rows[: self._count].to("cpu", copy=True)
        return {**vars(self), "_rows": rows, "_positions": self._positions[: self._count].clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take that memory again."""
        positions = torch.empty(state["_limit"], dtype=torch.int64)
        vars(self).update(state, _rows=None, _positions=positions, _count=0)
        if state["_rows"] is not None:
            self._add(state["_rows"], state["_positions"])
