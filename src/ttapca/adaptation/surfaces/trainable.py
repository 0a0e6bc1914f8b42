"""Copies of a model's weights, which gradient steps move in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError
from ttapca.spectral.stream import Stream, set_values
from ttapca.support.wrapping import Wrapper, surely, wrappers_of

# A parameter of a model: the module that owns it, and its name there.
Slot = tuple[nn.Module, str]
Select = Callable[[nn.Module], list[Slot]]


class AroundForward(Wrapper):
    """Lets a method of a surface run a module."""

    def __init__(
        self, surface: Surface, run: Callable[..., Any], *, replaces: bool = False
    ) -> None:
        self.surface, self.run, self.replaces = surface, run, replaces

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self.run(forward, *args, **kwargs)


def has_surface(model: nn.Module, kind: type[Surface]) -> bool:
    """Return whether a surface of this kind runs the forward pass of a model already."""
    return any(
        isinstance(wrapper, AroundForward) and isinstance(wrapper.surface, kind)
        for wrapper in wrappers_of(model)
    )


class Weights(Surface):
    """Copies of the weights that `select` chooses, which steps move and forward passes use."""

    def __init__(self, select: Select, what: str) -> None:
        super().__init__()
        self.copies = nn.ParameterList()
        self._select = select
        self._what = what
        self._places: list[list[Slot]] = []  # tied weights: one copy, several places
        self._originals: list[Tensor] = []  # filled while the copies are in their place

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Copy the chosen parameters, and use the copies in forward passes."""
        super().attach(model, stream)
        by_original: dict[nn.Parameter, list[Slot]] = {}
        for module, name in self._select(model):
            by_original.setdefault(getattr(module, name), []).append((module, name))
        if not by_original:
            raise AttachError(
                f"This method moves the {self._what}; the model has none. Choose a method that "
                "moves something else."
            )
        if has_surface(model, Weights):
            raise AttachError(
                "Only one surface can replace a model's weights; something has taken them over "
                "already. Call `detach()` on that first."
            )
        self._places = list(by_original.values())
        self.copies = nn.ParameterList(
            nn.Parameter(original.detach().clone()) for original in by_original
        )
        self.patches.wrap(model, AroundForward(self, self.run))
        self.stream.keep(self._what, self)

    def detach(self) -> None:
        """Leave the model with its own weights alone."""
        self.step_back()
        super().detach()

    def contents(self) -> list[Tensor]:
        """Return the values of the copies."""
        return [copy.data for copy in self._listed()]

    def _listed(self) -> list[nn.Parameter]:
        # Not `list(self.copies)`, which would take half the time of a switch between streams.
        return [copy for copy in self.copies._parameters.values() if copy is not None]

    def put(self, contents: Sequence[Tensor]) -> None:
        """Give the copies these values."""
        self.step_back()
        set_values(self._listed(), contents)

    def start(self) -> list[Tensor]:
        """Return the values of the originals."""
        self.step_back()
        return [original.detach().clone() for original in self._in_place()]

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with the copies in place; nested passes find them there."""
        if self._originals or not self.enabled:
            return forward(*args, **kwargs)
        inside = functools.partial(forward, *args, **kwargs)
        return surely(functools.partial(self._with_copies, inside), then=self.step_back)

    def _with_copies(self, forward: Callable[[], Any]) -> Any:
        originals = self._in_place()
        if self.copies[0].device != originals[0].device:
            self.to(originals[0].device)  # the model was moved without its adapter
        # Remembered before the first copy is put in place: from here on there is a way back.
        self._originals = originals
        self._put(self.copies)
        return forward()

    def step_back(self) -> None:
        """Put the originals back if the copies are in their place."""
        if self._originals:
            self._put(self._originals)
            self._originals = []

    def _in_place(self) -> list[Tensor]:
        """Return the parameters of the model now: moving it may replace them."""
        return [getattr(module, name) for (module, name), *_ in self._places]

    def _put(self, parameters: Iterable[Tensor]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                setattr(module, name, parameter)


class NormAffine(Weights):
    """Scale and shift of the BatchNorm layers; without these, of all other normalisation layers."""

    def __init__(self) -> None:
        super().__init__(norm_affine, "scale and shift of normalisation layers")


def norm_affine(model: nn.Module) -> list[Slot]:
    """Return scale and shift of all BatchNorm layers, or else of LayerNorm and GroupNorm layers."""
    for kinds in ((_BatchNorm,), (nn.LayerNorm, nn.GroupNorm)):
        places: list[Slot] = [
            (module, name)
            for module in model.modules()
            if isinstance(module, kinds)
            for name in ("weight", "bias")
            if isinstance(getattr(module, name), nn.Parameter)
        ]
        if places:
            return places
    return []


def all_parameters(model: nn.Module) -> list[Slot]:
    """Return every floating-point parameter of a model."""
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point()
    ]
