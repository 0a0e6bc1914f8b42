"""Put a spectral filter at a named layer of any model, and take it away without a trace.

The filter is not made part of the model: a hook on the layer holds it. So the model keeps its
modules, parameters, buffers and state-dict keys, loads and saves its checkpoints as before, and an
optimiser over `model.parameters()` never sees the filter. The hooks are instances of classes of
this file, not closures, so that `copy.deepcopy` and pickling carry them along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ttapca.errors import AttachError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import GainName
from ttapca.support.modules import device_and_dtype, find_layer


class _FilterHook:
    """What a layer's hooks hold: the filter, and whether it is on."""

    def __init__(self, layer: nn.Module, spectral_filter: SpectralFilter) -> None:
        self.filter = spectral_filter
        self.enabled = True
        self.handle = self.register(layer)

    def register(self, layer: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def run(self, samples: Tensor) -> Tensor:
        if samples.device != self.filter.mean.device:
            self.filter.to(samples.device)  # the model was moved; nobody else moves the filter
        filtered: Tensor = self.filter(samples)
        return filtered


class _OutputHook(_FilterHook):
    """Filters what a layer returns."""

    def register(self, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return self.run(output) if self.enabled else None


class _InputHook(_FilterHook):
    """Filters what an affine layer is given."""

    def register(self, layer: nn.Module) -> RemovableHandle:
        return layer.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.enabled:
            return None
        samples, *rest = args or (kwargs["input"],)
        return (self.run(samples), *rest), {k: v for k, v in kwargs.items() if k != "input"}


class Attachment:
    """A filter at a layer of a model: the handle that `attach` returns.

    Attributes:
        filter: The filter, whose `gains()` tell what it does and whose `gain` can be learned.
    """

    def __init__(self, layer: nn.Module, spectral_filter: SpectralFilter) -> None:
        self.filter = spectral_filter
        _forget_compiled()
        hook = _InputHook if spectral_filter.basis.at_input else _OutputHook
        self._hook = hook(layer, spectral_filter)

    @property
    def enabled(self) -> bool:
        """Whether the filter acts; set it to switch."""
        return self._hook.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._hook.enabled = value

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch the filter off for a while: the model's outputs are then bit-identical."""
        before = self.enabled
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = before

    def detach(self) -> None:
        """Take the filter away for good; a second call does nothing."""
        self._hook.handle.remove()


def attach(
    model: nn.Module, fitted: FittedFilter, gain: GainName | None = None, **options: object
) -> Attachment:
    """Put a fitted filter at its layer.

    Args:
        model: The model that the filter was fitted on, or one with the same layer.
        fitted: The filter.
        gain: Which gains it has, `relu`, `exponential` or `multiplicative`, or in closed form
            `wiener`, `match`, `two-sided`, `pulled`; without, all are 1.
        **options: Of the gain, see `ttapca.spectral.gains`.

    Returns:
        A handle to switch the filter off and to take it away.

    Raises:
        LayerNotFoundError: The model has no such layer.
        AttachError: The layer carries a filter already, or has other weights than at the fit.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        >>> data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> attachment = attach(model, ttapca.fit(model, "0", data, n_components=2))
        >>> with attachment.disabled():
        ...     plain = model(data)
        >>> attachment.detach()
        >>> torch.equal(model(data), plain)
        True
    """
    layer = find_layer(model, fitted.layer)
    if carries_filter(layer):
        raise AttachError(
            f"A layer carries one filter; `{fitted.layer}` has one already. Call `detach()` on "
            "what put it there first."
        )
    fitted.basis.check_layer(layer, fitted.layer, fitted.shape, fitted.mean_.numel())
    device, dtype = device_and_dtype(layer, model)
    precise = torch.promote_types(dtype, torch.float32)
    # Narrowed before it is moved: not every device has float64.
    spectral_filter = fitted.spectral_filter(gain, dtype=precise, **options).to(device)
    return Attachment(layer, spectral_filter)


def carries_filter(layer: nn.Module) -> bool:
    """Whether a filter is attached at a layer."""
    return bool(_filter_hooks(layer))


def detach_filter(layer: nn.Module) -> None:
    """Take the filter off a layer, if there is one: for who has lost its `Attachment`."""
    for hook in _filter_hooks(layer):
        hook.handle.remove()


def _filter_hooks(layer: nn.Module) -> list[_FilterHook]:
    # nn.Module offers no public way to list its hooks.
    hooks: list[object] = [
        *layer._forward_hooks.values(),
        *layer._forward_pre_hooks.values(),
    ]
    return [hook for hook in hooks if isinstance(hook, _FilterHook)]


def _forget_compiled() -> None:
    """Let compiled models be compiled anew, so that they see a new hook.

    `torch.compile` does not check for hooks that come after it, and would go on without the filter.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
