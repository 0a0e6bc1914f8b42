"""Surfaces that gradient steps move: copies of the model's weights, and an input transformation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import skip_init

from ttapca._checks import Maybe, Whole, check_option
from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.stream import ParameterValues, Stream, set_values
from ttapca.support.modules import device_and_dtype, map_first_tensor
from ttapca.support.wrapping import Wrapper, surely, wrappers_of

WIDTH = 16  # channels inside the residual network of an input transformation

# A parameter of a model: the module that owns it, and its name there.
Slot = tuple[nn.Module, str]
Select = Callable[[nn.Module], list[Slot]]


class AroundForward(Wrapper):
    """Lets a surface run the forward pass of a model."""

    def __init__(self, surface: Weights | InputTransform) -> None:
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self.surface.run(forward, args, kwargs)


def _has_surface(model: nn.Module, kind: type[Surface]) -> bool:
    return any(
        isinstance(wrapper, AroundForward) and isinstance(wrapper.surface, kind)
        for wrapper in wrappers_of(model)
    )


class Weights(Surface):
    """Copies of some of the model's weights, which take their place during a forward pass.

    Gradient steps move the copies, so the model's own parameters and its state dict stay as they
    were. A new stream starts with the model's own values.

    Args:
        select: Chooses the parameters of a model; a function of a module, so that it can be
            pickled.
        what: What they are, for errors: "affine parameters of normalisation layers".
    """

    def __init__(self, select: Select, what: str) -> None:
        super().__init__()
        self.copies = nn.ParameterList()
        self._select = select
        self._what = what
        self._slots: list[list[Slot]] = []  # tied weights: one copy, several slots
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
        if _has_surface(model, Weights):
            raise AttachError(
                "Only one surface can replace a model's weights; something has taken them over "
                "already. Call `detach()` on that first."
            )
        self._slots = list(by_original.values())
        self.copies = nn.ParameterList(
            nn.Parameter(original.detach().clone()) for original in by_original
        )
        self.patches.wrap(model, AroundForward(self))
        self.stream.keep(self._what, self)

    def detach(self) -> None:
        """Leave the model with its own weights alone."""
        self.step_back()
        super().detach()

    def contents(self) -> list[Tensor]:
        """Return the values of the copies; see `ttapca.spectral.stream.Part`."""
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

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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
        """Put the originals back where the copies are in their place."""
        if self._originals:
            self._put(self._originals)
            self._originals = []

    def _in_place(self) -> list[Tensor]:
        """Return what the model has now: moving a model may replace its parameters."""
        return [getattr(module, name) for (module, name), *_ in self._slots]

    def _put(self, parameters: Iterable[Tensor]) -> None:
        for parameter, slots in zip(parameters, self._slots, strict=True):
            for module, name in slots:
                setattr(module, name, parameter)

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        return f"{self._what}: {sum(copy.numel() for copy in self.copies):,} numbers"


class NormAffine(Weights):
    """Scale and shift of the BatchNorm layers; without these, of all other normalisation layers.

    Example:
        >>> surface = NormAffine()
        >>> surface.attach(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        >>> sum(copy.numel() for copy in surface.parameters())
        8
        >>> surface.detach()
    """

    def __init__(self) -> None:
        super().__init__(norm_affine, "scale and shift of normalisation layers")


def norm_affine(model: nn.Module) -> list[Slot]:
    """Return scale and shift of all BatchNorm layers, else of all LayerNorm and GroupNorm layers.

    Example:
        >>> [name for _, name in norm_affine(nn.Sequential(nn.GroupNorm(2, 4)))]
        ['weight', 'bias']
    """
    for kinds in ((_BatchNorm,), (nn.LayerNorm, nn.GroupNorm)):
        slots: list[Slot] = [
            (module, name)
            for module in model.modules()
            if isinstance(module, kinds)
            for name in ("weight", "bias")
            if isinstance(getattr(module, name), nn.Parameter)
        ]
        if slots:
            return slots
    return []


def all_parameters(model: nn.Module) -> list[Slot]:
    """Return every floating-point parameter of a model.

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


class InputTransform(Surface):
    """A trainable change of the input: d(x) = scale (mix x + (1 - mix) r(x)) + shift.

    It is to undo, as far as it can, what happened to the images: Mummadi et al., "Test-Time
    Adaptation to Distribution Shift by Confidence Maximization and Input Transformation" (2021).
    r is a small convolutional network, `mix` (tau) a number, `scale` (gamma) and `shift` (beta) one
    number per channel. It starts as the identity, bit for bit: mix = 1, scale = 1, shift = 0.

    Args:
        channels: Number of channels of the images; by default those of the model's first
            convolution.
        seed: Draws the weights of r; the caller's random state is not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3))
        >>> transform = InputTransform()
        >>> transform.attach(model)
        >>> x = torch.zeros(2, 3, 8, 8)
        >>> with torch.no_grad():
        ...     _ = transform.shift.fill_(1.0)
        >>> torch.equal(model(x), model[0](x + 1))
        True
        >>> transform.detach()
    """

    mix: nn.Parameter
    scale: nn.Parameter
    shift: nn.Parameter

    def __init__(self, channels: int | None = None, *, seed: int = 0) -> None:
        super().__init__()
        check_option("channels", channels, Maybe(Whole(1)))
        self.channels = channels
        self.seed = seed
        self.residual: nn.Module = nn.Identity()
        self._inside = False  # whether a forward pass of the model is running

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Make the transformation, as the identity, and put it in front of the model."""
        super().attach(model, stream)
        if _has_surface(model, InputTransform):
            raise AttachError(
                "A model has one input transformation; something has put one in front already. "
                "Call `detach()` on that first."
            )
        channels = self.channels if self.channels is not None else _channels_of(model)
        device, dtype = device_and_dtype(model, model)
        self.residual = _residual(channels, self.seed).to(device, dtype)
        one = torch.ones((), device=device, dtype=dtype)
        self.mix = nn.Parameter(one.clone())
        self.scale = nn.Parameter(one.repeat(channels))
        self.shift = nn.Parameter(torch.zeros_like(self.scale))
        self.patches.wrap(model, AroundForward(self))
        self.stream.keep("input transformation", ParameterValues(self.parameters()))

    def forward(self, images: Tensor) -> Tensor:
        """Transform a batch.

        Args:
            images: Shape (batch, channels, height, width); left as it was.

        Raises:
            ShapeError: These are no such images.
        """
        channels = len(self.scale)
        if images.dim() != 4 or images.shape[1] != channels:
            raise ShapeError(
                f"The input transformation takes images of shape (batch, {channels}, height, "
                f"width); found {tuple(images.shape)}. Give the number of channels by `channels=`, "
                "or choose a method that leaves the input as it is."
            )
        if images.device != self.scale.device:
            self.to(images.device)  # the model was moved without its adapter
        mixed: Tensor = self.mix * images + (1 - self.mix) * self.residual(images)
        return self.scale.view(-1, 1, 1) * mixed + self.shift.view(-1, 1, 1)

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        numbers = sum(parameter.numel() for parameter in self.parameters())
        return f"input transformation: {numbers:,} numbers"

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward pass on transformed images; nested passes are not transformed again."""
        if self._inside or not self.enabled:
            return forward(*args, **kwargs)
        return surely(functools.partial(self._enter, forward, args, kwargs), then=self._leave)

    def _enter(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._inside = True
        args, kwargs = map_first_tensor(self, args, kwargs)
        return forward(*args, **kwargs)

    def _leave(self) -> None:
        self._inside = False


def _channels_of(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return module.in_channels
    raise AttachError(
        "The input transformation takes as many channels as the model's first convolution; the "
        "model has no convolution. Give the number by `channels=`."
    )


def _residual(channels: int, seed: int) -> nn.Module:
    """Return the network r: two convolutions that keep the size of an image."""
    generator = torch.Generator().manual_seed(seed)
    # Made without values, so that torch draws none from the caller's random state.
    layers = [
        skip_init(nn.Conv2d, taken, given, 3, padding=1)  # type: ignore[no-untyped-call]
        for taken, given in ((channels, WIDTH), (WIDTH, channels))
    ]
    with torch.no_grad():
        for layer in layers:
            # He initialisation, always in float64 so that every precision has the same weights.
            draw = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
            layer.weight.copy_(draw * math.sqrt(2 / layer.weight[0].numel()))
            layer.bias.zero_()
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])
