"""A trainable transformation in front of a network, as a surface.

It is to undo, as far as it can, what happened to the images: Mummadi et al., "Test-Time Adaptation
to Distribution Shift by Confidence Maximization and Input Transformation" (2021).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ttapca._checks import Maybe, Whole, check_option
from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.stream import ParameterValues, Stream
from ttapca.support.modules import device_and_dtype, map_first_tensor
from ttapca.support.wrapping import Wrapper, WrapperHandle, surely, wrap_forward, wrappers_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class InputTransform(Surface):
    """Change what a model is given: d(x) = scale (mix x + (1 - mix) r(x)) + shift.

    r is a small convolutional network, `mix` (tau) a number, `scale` (gamma) and `shift` (beta) one
    number for each channel. It starts as the identity, bit for bit: mix = 1, scale = 1, shift = 0.

    Args:
        channels: Of the images; by default what the model's first convolution takes.
        width: Channels inside r.
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

    def __init__(self, channels: int | None = None, *, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        check_option("channels", channels, Maybe(Whole(1)))
        check_option("width", width, Whole(1))
        self.channels = channels
        self.width = width
        self.seed = seed
        self.residual: nn.Module = nn.Identity()
        self._inside = False  # of a forward pass of the model
        self._handle: WrapperHandle | None = None

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Make the transformation, as the identity, and put it in front of the model."""
        if self._handle is not None:
            raise AttachError("A surface goes on one model; this one is attached already.")
        if any(isinstance(wrapper, _Transformed) for wrapper in wrappers_of(model)):
            raise AttachError(
                "A model has one input transformation; something has put one in front already. "
                "Call `detach()` on what did first."
            )
        channels = self.channels if self.channels is not None else _channels_of(model)
        device, dtype = device_and_dtype(model, model)
        self.residual = _residual(channels, self.width, self.seed).to(device, dtype)
        one = torch.ones((), device=device, dtype=dtype)
        self.mix = nn.Parameter(one.clone())
        self.scale = nn.Parameter(one.repeat(channels))
        self.shift = nn.Parameter(torch.zeros_like(self.scale))
        self._handle = wrap_forward(model, _Transformed(self))
        if stream is not None:
            stream.keep("input transformation", ParameterValues(self.parameters()))

    def detach(self) -> None:
        """Take the transformation away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def start_batch(self) -> None:
        """Begin outside of any pass, whatever an earlier call was cut off by."""
        self._leave()

    def forward(self, images: Tensor) -> Tensor:
        """Transform a batch.

        Args:
            images: Shape (batch, channels, height, width); left as it was.

        Raises:
            ShapeError: When these are no such images.
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
        """What `print(adapter)` shows."""
        numbers = sum(parameter.numel() for parameter in self.parameters())
        return f"input transformation: {numbers:,} numbers"

    def run_transformed(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward pass on transformed images; nested passes transform nothing again."""
        if self._inside or not self._enabled:
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


class _Transformed(Wrapper):
    """Runs the model on transformed images."""

    def __init__(self, surface: InputTransform) -> None:
        self.surface = surface

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one pass."""
        return self.surface.run_transformed(forward, args, kwargs)


def _channels_of(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, CONVOLUTIONS):
            return module.in_channels
    raise AttachError(
        "The input transformation takes as many channels as the model's first convolution; the "
        "model has no convolution. Give the number by `channels=`."
    )


def _residual(channels: int, width: int, seed: int) -> nn.Module:
    """The network r: two convolutions that keep the size of an image."""
    generator = torch.Generator().manual_seed(seed)
    # Made without values, so that torch draws none from the caller's random state.
    layers = [
        skip_init(nn.Conv2d, taken, given, 3, padding=1)  # type: ignore[no-untyped-call]
        for taken, given in ((channels, width), (width, channels))
    ]
    with torch.no_grad():
        for layer in layers:
            # He initialisation, always in float64 so that every precision has the same weights.
            draw = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
            layer.weight.copy_(draw * math.sqrt(2 / layer.weight[0].numel()))
            layer.bias.zero_()
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])
