"""Some of the model's own weights as a surface: copies that stand in for them.

The copies take the place of the originals during a forward pass and only then. So gradient steps
move the copies, the model's parameters and its state dict stay what they were, and switching off
costs nothing. A new stream starts with the originals: no second snapshot is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError
from ttapca.spectral.stream import Stream
from ttapca.support.wrapping import Wrapper, WrapperHandle, surely, wrap_forward, wrappers_of

# Where a parameter lives: the module that owns it, and its name there.
Place = tuple[nn.Module, str]
Select = Callable[[nn.Module], list[Place]]


class Weights(Surface):
    """Copies of chosen parameters, in force while the model computes.

    Args:
        select: Chooses the parameters of a model; a function of a module, so that it can be
            pickled.
        what: What they are, for errors: "affine parameters of normalisation layers".
    """

    undone = False  # as a part of a stream

    def __init__(self, select: Select, what: str) -> None:
        super().__init__()
        self.copies = nn.ParameterList()
        self._select = select
        self._what = what
        self._places: list[list[Place]] = []  # tied weights: one copy, several places
        self._originals: list[Tensor] = []  # while the copies stand in for them
        self._handle: WrapperHandle | None = None

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Copy the chosen parameters and let the copies stand in for them."""
        if self._handle is not None:
            raise AttachError("A surface goes on one model; this one is attached already.")
        places = self._select(model)
        if not places:
            raise AttachError(
                f"This method moves the {self._what}; the model has none. Choose a method that "
                "moves something else."
            )
        if any(isinstance(wrapper, _WithCopies) for wrapper in wrappers_of(model)):
            raise AttachError(
                "A model's weights have one stand-in; something has taken them over already. Call "
                "`detach()` on what did first."
            )
        by_original: dict[nn.Parameter, list[Place]] = {}
        for module, name in places:
            by_original.setdefault(getattr(module, name), []).append((module, name))
        self._places = list(by_original.values())
        self.copies = nn.ParameterList(
            nn.Parameter(original.detach().clone()) for original in by_original
        )
        self._handle = wrap_forward(model, _WithCopies(self))
        if stream is not None:
            stream.keep(self._what, self)

    def detach(self) -> None:
        """Let the originals be all there is."""
        self.step_back()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def start_batch(self) -> None:
        """Begin with the originals in place, whatever an earlier call was cut off by."""
        self.step_back()

    def contents(self) -> list[Tensor]:
        """The copies' values; see `ttapca.spectral.stream.Part`."""
        return [copy.data for copy in self.copies]

    def put(self, contents: Sequence[Tensor]) -> None:
        """Let the copies have these values."""
        self.step_back()
        for copy, value in zip(self.copies, contents, strict=True):
            copy.data = value.to(copy)

    def start(self) -> list[Tensor]:
        """The originals' values."""
        self.step_back()
        return [original.detach().clone() for original in self._in_place()]

    def run_with_copies(self, forward: Callable[[], Any]) -> Any:
        """Run a forward pass in which the copies stand in; nested passes find them there."""
        if self._originals or not self._enabled:
            return forward()
        return surely(functools.partial(self._stand_in, forward), then=self.step_back)

    def _stand_in(self, forward: Callable[[], Any]) -> Any:
        originals = self._in_place()
        if self.copies[0].device != originals[0].device:
            self.to(originals[0].device)  # the model was moved without its adapter
        # Remembered before the first copy is put in place: from here on there is a way back.
        self._originals = originals
        self._put(self.copies)
        return forward()

    def step_back(self) -> None:
        """Put the originals back, if the copies are in their places."""
        if self._originals:
            self._put(self._originals)
            self._originals = []

    def _in_place(self) -> list[Tensor]:
        """What the model has now: moving a model may replace its parameters."""
        return [getattr(module, name) for (module, name), *_ in self._places]

    def _put(self, parameters: Iterable[Tensor]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                setattr(module, name, parameter)

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        return f"{self._what}: {sum(copy.numel() for copy in self.copies):,} numbers"


class _WithCopies(Wrapper):
    """Runs the model with copies of its weights."""

    def __init__(self, surface: Weights) -> None:
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self.surface.run_with_copies(functools.partial(forward, *args, **kwargs))


class NormAffine(Weights):
    """Scale and shift of the normalisation layers: BatchNorm's, or where there is none, others'.

    Example:
        >>> surface = NormAffine()
        >>> surface.attach(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        >>> sum(copy.numel() for copy in surface.parameters())
        8
        >>> surface.detach()
    """

    def __init__(self) -> None:
        super().__init__(norm_affine, "scale and shift of normalisation layers")


def norm_affine(model: nn.Module) -> list[Place]:
    """Scale and shift of all BatchNorm layers, else of all LayerNorm and GroupNorm layers.

    Example:
        >>> [name for _, name in norm_affine(nn.Sequential(nn.GroupNorm(2, 4)))]
        ['weight', 'bias']
    """
    for kinds in ((_BatchNorm,), (nn.LayerNorm, nn.GroupNorm)):
        places: list[Place] = [
            (module, name)
            for module in model.modules()
            if isinstance(module, kinds)
            for name in ("weight", "bias")
            if isinstance(getattr(module, name), nn.Parameter)
        ]
        if places:
            return places
    return []


def all_parameters(model: nn.Module) -> list[Place]:
    """Every parameter of real numbers that a model has.

    Example:
        >>> [name for _, name in all_parameters(nn.Linear(3, 2, bias=False))]
        ['weight']
    """
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point()
    ]
