"""A stream that does not wait: a method that takes too long does not see every batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ttapca.adaptation.adapter import Adapter


class RealTime:
    """Predicts batches that arrive as fast as the untouched network can predict them.

    A batch waits for the adapter until the next one arrives; if the adapter is still busy then, the
    untouched network predicts the batch, and the adapter never sees it. A method that takes k times
    as long as the network so adapts to one batch in k. After Alfarra et al. (ICML 2024,
    https://arxiv.org/abs/2304.04795), where a late batch is not kept waiting.
    """

    def __init__(self, adapter: Adapter, clock: Callable[[], float] = time.process_time) -> None:
        self.adapter, self.clock = adapter, clock
        self.arrived = self.busy_until = 0.0  # seconds of the stream
        self.batches = self.adapted = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits for the batch that arrives now."""
        start = self.clock()
        with self.adapter.disabled():
            logits: Tensor = self.adapter(images)
        period = self.clock() - start
        self.batches += 1
        if self.busy_until <= self.arrived + period:
            start = self.clock()
            logits = self.adapter(images)
            took = self.clock() - start
            self.busy_until = max(self.busy_until, self.arrived) + took
            self.adapted += 1
        self.arrived += period
        return logits

    @property
    def share(self) -> float:
        """The share of batches that the adapter saw, in percent."""
        return 100 * self.adapted / self.batches
