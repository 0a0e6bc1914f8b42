"""What every surface can do."""

from __future__ import annotations

from torch import nn

from ttapca.spectral.stream import Stream


class Surface(nn.Module):
    """A part of a model that may change at test time.

    A surface's own parameters are what gradient steps may move. Whatever a stream changes in it,
    the surface declares to that stream when it is attached: the stream then resets it, saves it and
    exchanges it for another stream's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Put the surface on a model.

        Args:
            model: Any module.
            stream: What the surface reads and writes; by default one of its own.

        Raises:
            AttachError: The surface does not fit the model.
        """
        raise NotImplementedError

    def detach(self) -> None:
        """Take the surface away, leaving no trace; harmless when it is not attached."""
        raise NotImplementedError

    def start_batch(self) -> None:
        """Hear that a batch follows: a place to tidy up what an interrupt has left."""

    @property
    def enabled(self) -> bool:
        """Whether the surface acts; set it to switch."""
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value
