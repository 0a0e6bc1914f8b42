"""Statistics of the test data and of the source, mixed: what surfaces of normalisation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.channel_streams import ChannelMoments, ChannelStreams
from ttapca.adaptation.surfaces.spectral import SpectralGains
from ttapca.errors import AttachError, OptionError
from ttapca.support.wrapping import Wrapper, WrapperHandle, is_replaced, wrap_forward

# The normalisation of one layer: given the layer, the surface, the layer's number and its input.
# None where the layer's own will do.
Normalise = Callable[[Any, Any, int, Tensor], Tensor | None]

# From so many numbers on, `quick_moments` is quicker than BatchNorm in training mode.
LARGE = 2**18

# Added to a variance before it is inverted, and subtracted again.
TINY_VARIANCE = 1e-12

# Where the mean square is more than this many variances, their difference loses more than two of
# the seven digits of float32.
FAR_FROM_ZERO = 64.0


class MixedStatistics(Surface):
    """Normalisation with a mixture of statistics, whose weight a size, a depth and a shift make.

    Args:
        alpha: Weight of the batch, from 0 (source) to 1 (batch). A pair is the weight in the first
            and in the last layer; it changes evenly in between.
        prior: How many samples the source statistics count for. The weight of a batch of n is then
            n / (n + prior) times `alpha`, after Schneider et al. (2020), whose variance leaves out
            the distance between the means.
        follow: A surface whose `shift`, between 0 and 1, multiplies the weight: data that have not
            shifted are normalised as the source. It must come first in the forward pass. The
            statistics remember a stream as long as it does: batches since the last reset, older
            ones counting less, stand for the batch.
    """

    def __init__(
        self,
        alpha: float | tuple[float, float] = 1.0,
        *,
        prior: float | None = None,
        follow: SpectralGains | None = None,
    ) -> None:
        super().__init__()
        if prior is not None and not 0.0 <= prior < float("inf"):
            raise OptionError(
                f"`prior`, a number of samples, is finite and not below 0; found {prior}."
            )
        ends = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        if not all(0.0 <= end <= 1.0 for end in ends):
            raise OptionError(
                f"`alpha`, the weight of the batch, is between 0 and 1; found {alpha}."
            )
        self.alpha = alpha
        self._ends = ends
        self._follow = (follow,)  # in a tuple: not a part of this surface
        self.prior = prior
        self._layers: list[nn.Module] = []
        self._handles: list[WrapperHandle] = []
        self._streams = ChannelStreams()

    def take_over(self, layers: Sequence[tuple[nn.Module, Normalise]]) -> None:
        """Let layers normalise by something else than their own `forward`.

        Args:
            layers: In the order of the model, each with its normalisation.
        """
        if self._layers:
            raise AttachError("A surface goes on one model; this one is attached already.")
        for layer, _ in layers:
            if is_replaced(layer):
                raise AttachError(
                    "A normalisation layer takes one set of statistics; something has taken over a "
                    f"{type(layer).__name__} of this model already. Call `detach()` on what did "
                    "first."
                )
        # A hook could only compute the output a second time.
        self._handles = [
            wrap_forward(layer, _Normalised(normalise, layer, self, number))
            for number, (layer, normalise) in enumerate(layers)
        ]
        self._layers = [layer for layer, _ in layers]

    def detach(self) -> None:
        """Give every layer its own normalisation back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._layers = []

    @property
    def memory(self) -> float | None:
        """How many samples a stream is remembered for; None where nothing but the batch counts."""
        (followed,) = self._follow
        return None if followed is None else followed.memory

    def start_batch(self) -> None:
        """Hear that a batch follows."""
        self._streams.start_batch()

    def forget_batch(self) -> None:
        """Go on from what was known before the batch."""
        self._streams.forget_batch()

    def snapshot(self) -> list[Tensor]:
        """What is known of the stream."""
        return self._streams.snapshot()

    def restore(self, snapshot: list[Tensor]) -> None:
        """Return to the state of a snapshot, bit for bit."""
        self._streams.restore(snapshot)

    def weight_in(self, number: int, batch_size: int) -> float:
        """Weight of a batch in one layer, with what is known of the stream before it."""
        if self._ends == (0.0, 0.0):
            return 0.0
        memory = self.memory
        size: float = batch_size
        if memory is not None:
            size = self._streams.size_with(number, batch_size, memory)
            if size <= 1 and not self._streams.goes_on(number):
                return 0.0  # one image says little of a channel, and must not wait for that
        return self.weight_of(size, number / max(1, len(self._layers) - 1))

    def moments_of(self, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of a layer's channels in the batch, or in the stream up to it."""
        batch = ChannelMoments(*channel_moments(x), float(len(x)))
        memory = self.memory
        seen = batch if memory is None else self._streams.take(number, batch, memory)
        return seen.mean, seen.var

    def weight_of(self, batch_size: float, depth: float = 1.0) -> float:
        """Weight of a batch of this size in the mixture.

        Args:
            batch_size: How many samples; of a stream, how many it counts for.
            depth: Of the layer, from 0 (the first) to 1 (the last).
        """
        first, last = self._ends
        weight = first + (last - first) * depth
        if self.prior is not None:
            weight *= batch_size / (batch_size + self.prior)
        (followed,) = self._follow
        return weight if followed is None else weight * followed.shift

    def mean_weight(self, batch_size: float) -> float:
        """Mean over layers of the weight of a batch that has surely shifted; 0 without layers."""
        if not self._layers:
            return 0.0
        if self.memory is not None and batch_size <= 1:
            return 0.0
        size = 1.0 if self.prior is None else batch_size / (batch_size + self.prior)
        return sum(self._ends) / 2 * size

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        prior = "" if self.prior is None else f", prior={self.prior}"
        return f"alpha={self.alpha}{prior}, layers={len(self._layers)}"


class _Normalised(Wrapper):
    """Runs a layer with the statistics of a surface, while that is switched on."""

    replaces = True

    def __init__(
        self, normalise: Normalise, layer: nn.Module, surface: MixedStatistics, number: int
    ) -> None:
        self.normalise = normalise
        self.layer = layer
        self.surface = surface
        self.number = number

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        """Normalise a batch; the name of the argument is that of torch's own layers."""
        output = None
        if self.surface.enabled:
            output = self.normalise(self.layer, self.surface, self.number, input)
        return forward(input) if output is None else output


def normalised(
    x: Tensor,
    moments: tuple[Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Every channel without its mean, over its deviation, times its weight, plus its bias.

    Args:
        x: Shape (batch, channels, ...).
        moments: Mean and variance, shape (channels,) each; gradients pass through them.
        weight: Shape (channels,), or None for 1.
        bias: Likewise, or None for 0.
        eps: Added to the variance.
    """
    mean, var = moments
    weight, bias = (None if value is None else value.to(x.dtype) for value in (weight, bias))
    if not torch.is_grad_enabled():
        # One pass instead of two; but no gradient would reach mean and variance.
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), x, scale.view(channels))


def can_be_quick(x: Tensor) -> bool:
    """Whether statistics without gradients will do, and are worth a way of their own."""
    several = x.numel() >= 2 * x.shape[1]
    plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return several and plain and x.device.type == "cpu"


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel, with gradients where there are any."""
    if can_be_quick(x):
        return quick_moments(x) if x.numel() >= LARGE else moments_of_few(x)
    dimensions = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x, dim=dimensions, correction=0)
    return mean, var


def moments_of_few(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of a small batch, without gradients.

    BatchNorm in training mode has both as by-products, and is several times as quick as torch's own
    `var_mean`: a single image waits for every call.

    Args:
        x: Shape (batch, channels, ...), float32 or float64.

    Example:
        >>> mean, var = moments_of_few(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> mean.tolist(), var.round(decimals=3).tolist()
        ([4.0], [5.0])
    """
    _, mean, inverse = torch.native_batch_norm(x, None, None, None, None, True, 0.0, TINY_VARIANCE)
    return mean, (inverse.square().reciprocal() - TINY_VARIANCE).clamp_(min=0)


def quick_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of a large batch, without gradients.

    On a processor torch's own `var_mean` takes as long as a convolution. Sums and norms of single
    feature maps are many times faster, and are added up in float64. The variance is then a
    difference of squares; where the mean is so far from zero that this would cost digits, and
    where feature maps do not lie in one piece, torch's statistics for training take over.

    Args:
        x: Shape (batch, channels, ...), float32 or float64.

    Example:
        >>> mean, var = quick_moments(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
        >>> mean.tolist(), var.round(decimals=3).tolist()
        ([4.0], [5.0])
    """
    count = x.numel() // x.shape[1]
    if x.is_contiguous() and x.dim() > 2:
        maps = x.flatten(2)  # (batch, channels, places)
        mean = maps.mean(2, dtype=x.dtype).double().mean(0)
        squares = torch.linalg.vector_norm(maps, dim=2).double().square().sum(0) / count
        var = squares - mean.square()
        if bool((squares < FAR_FROM_ZERO * var).all()):
            return mean.to(x.dtype), var.to(x.dtype)
    mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    # With momentum 1 the running statistics become those of the batch.
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    return mean, var * ((count - 1) / count)
