"""Mean and variance of a layer's channels over a stream of batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ChannelMoments(NamedTuple):
    """Of every channel.

    Attributes:
        mean: Shape (channels,).
        var: Likewise.
        samples: Images behind them; older ones count less.
    """

    mean: Tensor
    var: Tensor
    samples: float

    def after(self, past: ChannelMoments | None, memory: float) -> ChannelMoments:
        """The same with what came before; after `memory` samples that counts 1 / e.

        Example:
            >>> zero, one = torch.zeros(1), torch.ones(1)
            >>> first, then = ChannelMoments(zero, zero, 10.0), ChannelMoments(one, zero, 10.0)
            >>> both = then.after(first, memory=1e9)
            >>> float(both.mean), float(both.var), round(both.samples)
            (0.5, 0.25, 20)
        """
        if past is None:
            return self
        old = past.samples * math.exp(-self.samples / memory)
        share = self.samples / (old + self.samples)
        between = share * (1 - share) * (self.mean - past.mean).square()
        mean = torch.lerp(past.mean.to(self.mean), self.mean, share)
        var = torch.lerp(past.var.to(self.var), self.var, share) + between
        return ChannelMoments(mean, var, old + self.samples)


class ChannelStreams:
    """What several layers have seen of a stream.

    A batch may take several passes: the first one after `start_batch` counts, and every pass is
    seen together with what came before the batch.
    """

    def __init__(self) -> None:
        self._past: dict[int, ChannelMoments] = {}
        self._present: dict[int, ChannelMoments] = {}
        self._heard: set[int] | None = None  # nobody listens before the first batch

    def start_batch(self) -> None:
        """Let what was seen be the past, unless it is broken."""
        for layer, seen in self._present.items():
            if bool(torch.isfinite(seen.mean.sum() + seen.var.sum())):
                self._past[layer] = seen
        self._present = {}
        self._heard = set()

    def size_with(self, layer: int, batch_size: int, memory: float) -> float:
        """How many samples count, this batch among them."""
        past = self._past.get(layer)
        old = 0.0 if past is None else past.samples * math.exp(-batch_size / memory)
        return old + batch_size

    def take(self, layer: int, batch: ChannelMoments, memory: float) -> ChannelMoments:
        """The batch with what came before, which is kept if this pass counts."""
        both = batch.after(self._past.get(layer), memory)
        if self._heard is not None and layer not in self._heard:
            self._heard.add(layer)
            self._present[layer] = both._replace(mean=both.mean.detach(), var=both.var.detach())
        return both

    def snapshot(self) -> list[Tensor]:
        """All of it as tensors, four to a layer, for `restore`."""
        known = self._past | self._present
        return [
            part
            for layer, seen in sorted(known.items())
            for part in (
                torch.tensor(layer),
                seen.mean,
                seen.var,
                torch.tensor(seen.samples, dtype=torch.float64),
            )
        ]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Return to the state of a snapshot."""
        fours = [snapshot[start : start + 4] for start in range(0, len(snapshot), 4)]
        self._past = {
            int(layer): ChannelMoments(mean, var, float(samples))
            for layer, mean, var, samples in fours
        }
        self._present = {}
