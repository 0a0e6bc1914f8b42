"""What every surface can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ttapca.errors import AttachError
from ttapca.spectral.stream import Stream
from ttapca.support.wrapping import Patches, Wrapper, wrappers_of


class CommonSwitch:
    """Switches all surfaces of an adapter at once.

    Attributes:
        enabled: Whether they act.
    """

    def __init__(self) -> None:
        self.enabled = True


class Surface(nn.Module):
    """A part of a model that may change at test time.

    Gradient steps may move a surface's parameters. When it is attached, a surface declares to the
    stream all that changes over time; the stream then resets, saves and exchanges it.

    Attributes:
        patches: What the surface has put on a model.
        switch: Switches the surface together with others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self.switch = CommonSwitch()
        self.patches = Patches()

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Put the surface on a model; a subclass continues after the check that is made here.

        Args:
            model: Any module.
            stream: What the surface reads and writes; by default a stream for this surface alone.

        Raises:
            AttachError: The surface does not fit the model, or is attached already.
        """
        del model, stream
        if self.attached:
            raise AttachError("A surface goes on one model; this one is attached already.")

    @property
    def attached(self) -> bool:
        """Whether the surface is on a model."""
        return bool(self.patches)

    def detach(self) -> None:
        """Take the surface away without a trace; harmless when it is not attached."""
        self.patches.remove()

    def start_batch(self) -> None:
        """Tidy up what an interrupted call may have left, before the next batch."""

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass of a model that an `AroundForward` was put on."""
        return forward(*args, **kwargs)

    @property
    def enabled(self) -> bool:
        """Whether the surface acts; set it to switch."""
        return self._enabled and self.switch.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = value


class AroundForward(Wrapper):
    """Lets a surface run the forward pass of a model."""

    def __init__(self, surface: Surface) -> None:
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self.surface.run(forward, args, kwargs)


def has_surface(model: nn.Module, kind: type[Surface]) -> bool:
    """Return whether a surface of this kind runs the forward pass of a model already."""
    return any(
        isinstance(wrapper, AroundForward) and isinstance(wrapper.surface, kind)
        for wrapper in wrappers_of(model)
    )
