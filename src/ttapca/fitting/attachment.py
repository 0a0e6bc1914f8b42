"""A fitted filter at a layer of a model: how it is put on and taken off again.

A hook on the layer holds the filter. So the model keeps its modules, parameters and state-dict
keys, and an optimiser over `model.parameters()` never sees the filter. The hooks are instances of
classes, not closures, so that `copy.deepcopy` and pickling carry them along.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import AttachError, LayerNotFoundError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import Gain, GainName
from ttapca.support.modules import device_and_dtype, find_layer
from ttapca.support.wrapping import Patches, Switch, finally_do, take_off


class _FilterHook:
    """Filters what a layer returns; held by the layer's hooks."""

    def __init__(self, spectral_filter: SpectralFilter, switch: Switch) -> None:
        self.filter, self.switch = spectral_filter, switch

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return self._run(output) if self.switch.enabled else None

    def _run(self, samples: Tensor) -> Tensor:
        if samples.device != self.filter.mean.device:
            self.filter.to(samples.device)  # the model was moved, and its hooks do not follow
        filtered: Tensor = self.filter(samples)
        return filtered


class _InputHook(_FilterHook):
    """Filters what a layer is given."""

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.switch.enabled:
            return None
        if args:
            return (self._run(args[0]), *args[1:]), kwargs
        return (), {**kwargs, "input": self._run(kwargs["input"])}


class Attachment:
    """A filter at a layer of a model: the handle that `attach` returns.

    Attributes:
        filter: The filter, whose `gains()` tell its effect and whose `gain` can be learned.
        enabled: Whether the filter acts; set it to switch.
    """

    def __init__(self, spectral_filter: SpectralFilter) -> None:
        self.filter = spectral_filter
        self.enabled = True
        self._patches = Patches()

    def put_on(
        self, layer: nn.Module, switch: Switch | None = None, patches: Patches | None = None
    ) -> None:
        """Put the filter on a layer; other switches and patches are those of an adapter."""
        if "torch._dynamo" in sys.modules:
            # A compiled model does not notice hooks that come later: compile it anew.
            torch.compiler.reset()
        patches = self._patches if patches is None else patches
        if self.filter.basis.at_input:
            patches.hook_input(layer, _InputHook(self.filter, switch or self))
        else:
            patches.hook_output(layer, _FilterHook(self.filter, switch or self))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch the filter off for a while: the model's outputs are then bit-identical."""
        with finally_do(functools.partial(setattr, self, "enabled", self.enabled)):
            self.enabled = False
            yield

    def detach(self) -> None:
        """Take the filter away for good; a second call does nothing."""
        self._patches.remove()


def attach(
    model: nn.Module,
    fitted: FittedFilter,
    gain: GainName | type[Gain] | None = None,
    *,
    strict: bool = False,
    **options: object,
) -> Attachment:
    """Put a fitted filter at its layer, and return a handle to switch it off and to take it away.

    Args:
        model: The model that the filter was fitted on, or one with the same layer.
        fitted: The filter.
        gain: Name or class of its gains, see `ttapca.spectral.gains`; without, all gains are 1.
        strict: Refuse a model with other weights than that of the fit, instead of a warning.
        **options: Options of the gain.

    Raises:
        LayerNotFoundError: The model has no such layer.
        AttachError: The layer carries a filter already, or its weights are others.
        OptionError: There is no such gain or option, or its value makes no sense.

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
    layer, attachment = prepare(model, fitted, gain, strict=strict, **options)
    try:
        attachment.put_on(layer)
    except BaseException:
        attachment.detach()
        raise
    return attachment


def prepare(
    model: nn.Module,
    fitted: FittedFilter,
    gain: GainName | type[Gain] | None = None,
    *,
    strict: bool = False,
    **options: object,
) -> tuple[nn.Module, Attachment]:
    """Return the layer of a filter, and what `attach` puts there; see `attach`."""
    try:
        layer = find_layer(model, fitted.layer)
    except LayerNotFoundError as error:
        raise LayerNotFoundError(
            f"The filter was fitted at the layer `{fitted.layer}`. {error} Fit a filter on this "
            "model."
        ) from None
    if carries_filter(layer):
        raise AttachError(
            f"A layer carries one filter; `{fitted.layer}` has one already. Call `detach()` on "
            "what put it there first."
        )
    fitted.basis.check_layer(layer, fitted.layer, fitted.shape, math.prod(fitted.output_shape))
    fitted.check_weights(model, strict=strict)
    device, dtype = device_and_dtype(layer, model)
    precise = torch.promote_types(dtype, torch.float32)
    # Converted before it is moved: not every device has float64.
    spectral_filter = fitted.spectral_filter(gain, dtype=precise, **options).to(device)
    return layer, Attachment(spectral_filter)


def carries_filter(layer: nn.Module) -> bool:
    """Return whether a filter is attached at a layer."""
    return bool(_filter_hooks(layer))


def detach_filter(layer: nn.Module) -> None:
    """Take the filter off a layer, if there is one, without its `Attachment`."""
    for hook in _filter_hooks(layer):
        take_off(layer, hook)


def _filter_hooks(layer: nn.Module) -> list[_FilterHook]:
    # nn.Module offers no public way to list its hooks.
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, _FilterHook)]
