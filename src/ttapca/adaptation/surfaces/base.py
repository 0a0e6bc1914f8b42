"""What every surface can do."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Surface(nn.Module):
    """A part of a model that may change at test time.

    A surface's own parameters are what gradient steps may move. `attach` remembers their values and
    `reset` puts these back, bit for bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start: list[Tensor] = []
        self._enabled = True

    def attach(self, model: nn.Module) -> None:
        """Put the surface on a model; raises `AttachError` when it does not fit."""
        raise NotImplementedError

    def detach(self) -> None:
        """Take the surface away, leaving no trace; harmless when it is not attached."""
        raise NotImplementedError

    def start_batch(self) -> None:
        """Hear that a batch follows, which may take several forward passes."""

    @property
    def left_out(self) -> bool:
        """Whether the batch was kept out of a stream because it held NaN or infinity."""
        return False

    def forget_batch(self) -> None:
        """Undo what the passes since `start_batch` changed by themselves: the batch was broken."""

    @property
    def enabled(self) -> bool:
        """Whether the surface acts; set it to switch."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value

    def remember(self) -> None:
        """Take the present state for the one that `reset` returns to."""
        self._start = self.snapshot()

    def snapshot(self) -> list[Tensor]:
        """The present state of the parameters, for `restore`."""
        return [parameter.detach().clone() for parameter in self.parameters()]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        """Return to the state of a snapshot, bit for bit."""
        for parameter, value in zip(self.parameters(), snapshot, strict=True):
            parameter.copy_(value)

    def reset(self) -> None:
        """Return to the remembered state."""
        self.restore(self._start)
