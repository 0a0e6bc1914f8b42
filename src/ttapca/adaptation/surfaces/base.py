"""`Surface`: a part of a model that is put on, switched, and taken away without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ttapca.errors import AttachError
from ttapca.spectral.stream import Stream
from ttapca.support.wrapping import Patches, Result, is_replaced, surely


class Surface(nn.Module):
    """A part of a model that may change at test time.

    When it is attached, a surface declares to the stream all that changes over time; the stream
    then resets, saves and exchanges it.
    """

    stream: Stream  # that it reads and writes, once attached

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True  # whether the surface acts; set it to switch
        self.patches = Patches()  # its hooks and wrappers on the model

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Put the surface on a model, with a stream, by default one of its own.

        A subclass continues after the check that is made here.
        """
        del model
        if self.patches.noted:
            raise AttachError("A surface goes on one model; this one is attached already.")
        self.stream = stream or Stream()

    def run_with(self, run: Callable[[], Result], **values: Any) -> Result:
        """Run something while attributes of the surface have other values."""
        before = {name: getattr(self, name) for name in values}

        def inside() -> Result:
            vars(self).update(values)
            return run()

        return surely(inside, then=functools.partial(vars(self).update, before))

    def detach(self) -> None:
        """Take the surface away without a trace; harmless when it is not attached."""
        self.patches.remove()


def refuse_replaced(layers: Iterable[nn.Module]) -> None:
    """Raise `AttachError` if something else normalises in place of a layer."""
    for layer in layers:
        if is_replaced(layer):
            raise AttachError(
                "A normalisation layer takes one set of statistics; something has taken over a "
                f"{type(layer).__name__} of this model already. Call `detach()` on that first."
            )
