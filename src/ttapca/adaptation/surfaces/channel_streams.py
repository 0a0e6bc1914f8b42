"""Mean and variance of a layer's channels over a stream of batches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def mixed(
    alpha: float, batch: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of two populations together, given those of each.

    Args:
        alpha: Weight of the batch.
        batch: Its mean and variance.
        source: The same.

    Example:
        >>> one, four = torch.tensor(1.0), torch.tensor(4.0)
        >>> [float(value) for value in mixed(0.5, (one, one), (one + 2, four))]
        [2.0, 3.5]
    """
    (batch_mean, batch_var), (source_mean, source_var) = batch, source
    source_mean, source_var = source_mean.to(batch_mean), source_var.to(batch_var)
    between = batch_mean - source_mean
    var = torch.lerp(source_var, batch_var, alpha)
    var = torch.addcmul(var, between, between, value=alpha * (1 - alpha))
    return torch.add(source_mean, between, alpha=alpha), var


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
        both = mixed(share, (self.mean, self.var), (past.mean, past.var))
        return ChannelMoments(*both, old + self.samples)


class ChannelStreams:
    """What several layers have seen of a stream.

    A batch may take several passes: the first one after `start_batch` counts, and every pass is
    seen together with what came before the batch.
    """

    def __init__(self) -> None:
        self._past: dict[int, ChannelMoments] = {}
        self._present: dict[int, ChannelMoments] = {}
        self._heard: set[int] | None = None  # nobody listens before the first batch
        self._asked: set[int] = set()
        self._begun: set[int] = set()

    def start_batch(self) -> None:
        """Let what was seen be the past, unless it is broken."""
        self._past = self._known()
        self._present = {}
        self._heard = set()
        self._begun |= self._asked

    def forget_batch(self) -> None:
        """Let the batch have no part in what follows."""
        self._present = {}

    def goes_on(self, layer: int) -> bool:
        """Whether this layer has been asked so for an earlier batch of the same stream."""
        self._asked.add(layer)
        return layer in self._begun

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
        """All of it as tensors, for `restore`: which layers have begun, then four to a layer."""
        return [
            torch.tensor(sorted(self._begun | self._asked), dtype=torch.int64),
            *self._moments(),
        ]

    def _moments(self) -> list[Tensor]:
        return [
            part
            for layer, seen in sorted(self._known().items())
            for part in (
                torch.tensor(layer),
                seen.mean,
                seen.var,
                torch.tensor(seen.samples, dtype=torch.float64),
            )
        ]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Return to the state of a snapshot."""
        begun, *moments = snapshot or [torch.zeros(0, dtype=torch.int64)]
        fours = [moments[start : start + 4] for start in range(0, len(moments), 4)]
        self._past = {
            int(layer): ChannelMoments(mean, var, float(samples))
            for layer, mean, var, samples in fours
        }
        self._present = {}
        self._asked, self._begun = set(), set(begun.tolist())

    def _known(self) -> dict[int, ChannelMoments]:
        """What the next batch comes after: broken batches leave no trace."""
        whole = {
            layer: seen
            for layer, seen in self._present.items()
            if bool(torch.isfinite(seen.mean.sum() + seen.var.sum()))
        }
        return self._past | whole
