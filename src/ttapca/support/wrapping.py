"""Put wrappers around a module's `forward`, and hooks on it, and take them off in any case.

After an interrupt (Ctrl-C) torch calls no hook: one pass is changed around `forward` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import nn

Result = TypeVar("Result")


class Switch(Protocol):
    """Something that is switched on or off, such as a surface."""

    enabled: bool


class Wrapper:
    """Runs in place of a module's `forward`; a class, so that copies and pickles carry it along."""

    replaces = False  # whether it computes something else than the `forward` that it wraps

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run, given the wrapped `forward` and the arguments of the call."""
        raise NotImplementedError


class WrappedForward:
    """Replaces the `forward` of one instance by wrappers around it, the outermost last."""

    def __init__(self, module: nn.Module, wrapper: Wrapper) -> None:
        self._module = module
        self.shadowed: Callable[..., Any] | None = vars(module).get("forward")  # of somebody else
        self.wrappers: list[Wrapper] = [wrapper]

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
        others = [other for other in self.wrappers if other is not wrapper]
        if others or vars(self._module).get("forward") is not self:
            self.wrappers = others
        elif self.shadowed is None:
            del self._module.forward
        else:
            self._module.forward = self.shadowed


class EvaluationMode(Wrapper):
    """Keeps modules in evaluation mode, also after `train()`; `owner` put this on a model."""

    def __init__(self, modules: list[nn.Module], owner: object) -> None:
        self._modules, self.owner = modules, owner

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        for module in self._modules:
            if module.training:
                module.training = False
        return forward(*args, **kwargs)


@dataclass(eq=False)
class Patches:
    """Wrappers and hooks that were put on modules together, and come off together."""

    # Each is noted before it is put on. So `remove` takes off all of them, even if an interrupt cut
    # off putting them on, and may be called again if it was interrupted itself.
    noted: list[tuple[nn.Module, Wrapper | Callable[..., Any]]] = field(default_factory=list)

    def wrap(self, module: nn.Module, wrapper: Wrapper) -> None:
        """Run a wrapper in place of a module's `forward`, around those that run there already."""
        self.noted.append((module, wrapper))
        wrapped = vars(module).get("forward")
        if isinstance(wrapped, WrappedForward):
            wrapped.wrappers = [*wrapped.wrappers, wrapper]
        else:
            module.forward = WrappedForward(module, wrapper)

    def hook_output(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call `hook(module, args, output)` after a module."""
        self.noted.append((module, hook))
        module.register_forward_hook(hook)

    def hook_input(
        self, module: nn.Module, hook: Callable[..., Any], *, first: bool = False
    ) -> None:
        """Call `hook(module, args, kwargs)` before a module; it may return other arguments."""
        self.noted.append((module, hook))
        module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)

    def remove(self) -> None:
        """Take all of them off; a second call does nothing."""
        for module, patch in reversed(self.noted):
            take_off(module, patch)
        self.noted = []


def take_off(module: nn.Module, patch: Wrapper | Callable[..., Any]) -> None:
    """Take a wrapper or hook off a module, if it is there."""
    wrapped = vars(module).get("forward")
    if isinstance(wrapped, WrappedForward) and isinstance(patch, Wrapper):
        wrapped.remove(patch)
    # The handle that torch returns for a hook may be lost to an interrupt before it is kept.
    for hooks, with_kwargs in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for number in [number for number, hook in hooks.items() if hook is patch]:
            with_kwargs.pop(number, None)
            del hooks[number]


@contextmanager
def temporary_patches() -> Iterator[Patches]:
    """Yield patches that come off at the end of the block."""
    patches = Patches()
    with finally_do(patches.remove):
        yield patches


def wrappers_of(module: nn.Module) -> list[Wrapper]:
    """Return the wrappers around a module's `forward`, from the innermost on."""
    found = vars(module).get("forward")
    return found.wrappers if isinstance(found, WrappedForward) else []


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module runs something else than its own `forward`."""
    found = vars(module).get("forward")
    if isinstance(found, WrappedForward):
        return found.shadowed is not None or any(each.replaces for each in found.wrappers)
    return found is not None


def surely(run: Callable[[], Result], then: Callable[[], object]) -> Result:
    """Return what `run` returns, and call `then` afterwards, however `run` ends."""
    # It is called twice, as an interrupt may come within: it must go on there, or do nothing.
    try:
        try:
            return run()
        finally:
            then()
    finally:
        then()


@contextmanager
def finally_do(then: Callable[[], object]) -> Iterator[None]:
    """Call something twice at the end of a block that begins before the change; see `surely`."""
    try:
        try:
            yield
        finally:
            then()
    finally:
        then()
