"""Run something around a module's `forward`, and clean up after it in any case.

Torch calls no forward hook after an interrupt (Ctrl-C, or any other exception that is not an
`Exception`), not even one that was registered to be called always. So whatever must be taken out
when a pass is over is put in and taken out around `forward` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

Result = TypeVar("Result")


class Wrapper:
    """Runs in place of a module's `forward`; a class, so that copies and pickles carry it along.

    Attributes:
        replaces: Whether it computes something else than the `forward` that it wraps.
    """

    replaces = False

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run, given the wrapped `forward` and the arguments of the call."""
        raise NotImplementedError


class WrappedForward:
    """Replaces the `forward` of one module by wrappers around it.

    It is an attribute of the instance, where `nn.Module` looks first. Parameters, buffers, keys and
    hooks stay as they are, and removing it leaves no trace.

    Attributes:
        shadowed: A `forward` that somebody else had put on the instance; usually None.
        wrappers: From the innermost to the outermost.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.shadowed: Callable[..., Any] | None = vars(module).get("forward")
        self.wrappers: list[Wrapper] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the outermost wrapper."""
        return self._run(len(self.wrappers), *args, **kwargs)

    def _run(self, depth: int, /, *args: Any, **kwargs: Any) -> Any:
        if depth > 0:
            inner = functools.partial(self._run, depth - 1)
            return self.wrappers[depth - 1](inner, *args, **kwargs)
        if self.shadowed is not None:
            return self.shadowed(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)

    def remove(self, wrapper: Wrapper) -> None:
        """Remove one wrapper, and with the last one itself; a second call does nothing."""
        self.wrappers = [other for other in self.wrappers if other is not wrapper]
        if self.wrappers or vars(self._module).get("forward") is not self:
            return
        if self.shadowed is None:
            del self._module.forward
        else:
            self._module.forward = self.shadowed


class WrapperHandle:
    """Removes a wrapper again."""

    def __init__(self, wrapped: WrappedForward, wrapper: Wrapper) -> None:
        self._wrapped = wrapped
        self._wrapper = wrapper

    def remove(self) -> None:
        """Remove the wrapper; a second call does nothing."""
        self._wrapped.remove(self._wrapper)


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> WrapperHandle:
    """Run a wrapper in place of a module's `forward`, and return a handle to remove it.

    Example:
        >>> import torch
        >>> class Doubled(Wrapper):
        ...     def __call__(self, forward, /, x):
        ...         return 2 * forward(x)
        >>> layer = nn.Identity()
        >>> handle = wrap_forward(layer, Doubled())
        >>> layer(torch.tensor(3.0)).item()
        6.0
        >>> handle.remove()
        >>> layer(torch.tensor(3.0)).item()
        3.0
    """
    wrapped = vars(module).get("forward")
    if not isinstance(wrapped, WrappedForward):
        wrapped = WrappedForward(module)
        module.forward = wrapped
    wrapped.wrappers = [*wrapped.wrappers, wrapper]
    return WrapperHandle(wrapped, wrapper)


def wrappers_of(module: nn.Module) -> list[Wrapper]:
    """Return the wrappers around a module's `forward`, from the innermost on."""
    found = vars(module).get("forward")
    return found.wrappers if isinstance(found, WrappedForward) else []


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module runs something else than its own `forward`, whoever changed it."""
    found = vars(module).get("forward")
    if isinstance(found, WrappedForward):
        return found.shadowed is not None or any(each.replaces for each in found.wrappers)
    return found is not None


def surely(run: Callable[[], Result], then: Callable[[], None]) -> Result:
    """Return what `run` returns, and call `then` afterwards, however `run` ends.

    An interrupt (Ctrl-C) may come at any moment, even in the middle of `then`, so `then` is called
    twice: it must continue where it was cut off, and do nothing when everything is done.

    Example:
        >>> surely(lambda: 1 + 1, then=lambda: None)
        2
    """
    try:
        try:
            return run()
        finally:
            then()
    finally:
        then()
