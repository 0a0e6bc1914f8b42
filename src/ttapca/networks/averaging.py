"""A moving average of a network's weights, which often predicts better than the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class AveragedWeights:
    """An exponential moving average of parameters and buffers.

    Early on the decay is lower, (1 + n) / (10 + n) after n updates, so that the random start is
    forgotten soon.

    Args:
        network: What is averaged.
        decay: Weight of the past, below 1.

    Attributes:
        tensors: The average, by the names of the state dict.

    Example:
        >>> network = nn.Linear(1, 1)
        >>> averaged = AveragedWeights(network, 0.999)
        >>> averaged.update(number=0)
        >>> sorted(averaged.tensors)
        ['bias', 'weight']
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay = decay
        self._live: dict[str, Tensor] = dict(network.state_dict())  # shares memory with the network
        self.tensors = {name: tensor.clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Take the network's present weights in.

        Args:
            number: How many updates there were before.
        """
        decay = min(self._decay, (1 + number) / (10 + number))
        for name, live in self._live.items():
            if live.is_floating_point():
                self.tensors[name].lerp_(live, 1 - decay)
            else:
                self.tensors[name].copy_(live)  # counters are not averaged

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a saved average, which has the names and shapes of this one."""
        for name, average in self.tensors.items():
            average.copy_(tensors[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network the averaged weights for a while."""
        before = {name: live.clone() for name, live in self._live.items()}
        self._set(self.tensors)
        try:
            yield
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, tensors: dict[str, Tensor]) -> None:
        for name, live in self._live.items():
            live.copy_(tensors[name])
