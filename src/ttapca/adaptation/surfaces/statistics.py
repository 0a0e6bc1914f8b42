"""What normalisation layers do with statistics of others, and BatchNorm with those of a batch.

Statistics that follow a stream are in `ttapca.adaptation.surfaces.stream_statistics`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca._checks import Maybe, Number, check_option
from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.stream import ScaleGivenBack, Stream
from ttapca.support.channel_moments import (
    LARGE,
    can_be_quick,
    channel_moments,
    mixed_moments,
    normalised,
)
from ttapca.support.norm_layers import (
    by_running_statistics,
    in_own_layout,
    is_plain,
    normalised_alone,
    running_statistics,
    with_running_statistics,
)
from ttapca.support.tensors import as_on, at_least_float32
from ttapca.support.wrapping import Wrapper, is_replaced

Forward = Callable[..., Any]
Moments = tuple[Tensor, Tensor]  # mean and variance


class BatchNormStatistics(Surface):
    """BatchNorm with statistics of the source, of the test batch, or of a mixture of both.

    The mixture is that of two populations, the batch with weight alpha and the source with
    1 - alpha, so its variance includes the distance between their means:

        mean = alpha m_batch + (1 - alpha) m_source
        var  = alpha v_batch + (1 - alpha) v_source + alpha (1 - alpha) (m_batch - m_source)^2

    Running statistics are read and never written, in training mode as well. Gradients pass through
    the statistics of the batch.

    Args:
        alpha: Weight of the batch, from 0 (source) to 1 (batch). A pair is the weight in the first
            and in the last layer; in between it changes evenly.
        prior: How many samples the source statistics count for. The weight of a batch of n is then
            n / (n + prior) times `alpha`, after Schneider et al. (2020), whose variance leaves out
            the distance between the means.
        required: Whether a model without BatchNorm is an error.

    Attributes:
        ends: `alpha` in the first and in the last layer.
        layers: Those that were taken over, once attached, in the order of the model.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(1, affine=False)).eval()
        >>> statistics = BatchNormStatistics(alpha=1.0)
        >>> statistics.attach(model)
        >>> [round(value, 2) for value in model(torch.tensor([[5.0], [7.0]])).flatten().tolist()]
        [-1.0, 1.0]
        >>> statistics.detach()
    """

    def __init__(
        self,
        alpha: float | tuple[float, float] = 1.0,
        *,
        prior: float | None = None,
        required: bool = True,
    ) -> None:
        super().__init__()
        check_option("prior", prior, Maybe(Number(0)))
        self.ends = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        for end in self.ends:
            check_option("alpha", end, Number(0, 1))
        self.prior = prior
        self.layers: list[BatchNormLayer] = []
        self._required = required

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over every BatchNorm layer that has running statistics."""
        super().attach(model, stream)
        layers = list(with_running_statistics(model).values())
        if self._required and not layers:
            raise AttachError(
                "Batch statistics need BatchNorm layers with running statistics; the model has "
                "none. Choose a method that does without them."
            )
        refuse_replaced(layers)
        first, last = self.ends
        for number, layer in enumerate(layers):
            weight = first + (last - first) * number / max(1, len(layers) - 1)
            # A hook could only compute the output a second time.
            self.layers.append(BatchNormLayer(self, layer, weight))
            self.patches.wrap(layer, self.layers[-1])
        if layers:
            self.stream.given_back = ScaleGivenBack(sum(self.ends) / 2, self.prior)

    @property
    def mean_weight(self) -> float | None:
        """Weight of the batch, averaged over the layers; None if it depends on its size."""
        return None if self.prior is not None or not self.layers else sum(self.ends) / 2

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        first, last = self.ends
        alpha = f"{first}" if first == last else f"{first} to {last}"
        prior = "" if self.prior is None else f", prior={self.prior}"
        return f"alpha={alpha}{prior}, layers={len(self.layers)}"


def refuse_replaced(layers: Sequence[nn.Module]) -> None:
    """Raise `AttachError` where something else normalises in place of a layer."""
    for layer in layers:
        if is_replaced(layer):
            raise AttachError(
                "A normalisation layer takes one set of statistics; something has taken over a "
                f"{type(layer).__name__} of this model already. Call `detach()` on that first."
            )


class BatchNormLayer(Wrapper):
    """Runs one layer with the statistics of a surface, while that is switched on.

    Attributes:
        weight: Of a large batch.
    """

    replaces = True

    def __init__(self, surface: BatchNormStatistics, layer: _BatchNorm, weight: float) -> None:
        self.surface, self.kind, self.weight = surface, BatchNormKind(layer), weight

    def __call__(self, forward: Forward, /, input: Tensor) -> Any:
        """Normalise a batch; the argument has the name that torch's own layers give it."""
        if not self.surface.enabled:
            return forward(input)
        alpha, kind, layer = self._weight_of(input), self.kind, self.kind.layer
        if alpha == 0.0:
            return kind.plain(input, forward)
        # Of a large batch, our own moments are quicker than those of torch.
        quick = input.numel() >= LARGE and can_be_quick(input)
        if alpha == 1.0 and kind.is_plain and not quick:
            return F.batch_norm(
                input, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
            )
        values = kind.values(input)
        moments = mixed_moments(alpha, channel_moments(values), running_statistics(layer))
        return kind.normalised(values, moments, input, forward)

    def _weight_of(self, x: Tensor) -> float:
        size, prior = len(x), self.surface.prior
        alpha = self.weight
        if prior is not None:
            # An empty batch says nothing, also beside a source that counts for no samples.
            alpha *= size / (size + prior) if size else 0.0
        if alpha == 1.0 and x.numel() == x.shape[1]:
            raise ShapeError(
                "Batch statistics need more than one value for each channel; found a batch of "
                f"shape {tuple(x.shape)}. Use a larger batch, or source or mixed statistics."
            )
        return alpha


class NormKind:
    """What a layer does beside normalising by given moments; values have channels second.

    Attributes:
        layer: The layer.
        channels: How many it has.
    """

    layer: Any
    channels: int

    def values(self, x: Tensor) -> Tensor:
        """Return what is normalised, shape (batch, channels, ...)."""
        return at_least_float32(x)

    def source(self, like: Tensor) -> Moments:
        """Return mean and variance of the source."""
        raise NotImplementedError

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what a normalised channel is multiplied by, and what is added to it."""
        raise NotImplementedError

    def plain(self, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples by itself."""
        return forward(x)

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of normalised, scaled values of x."""
        del forward
        return as_on(values, x)

    def has_maps(self, x: Tensor) -> bool:
        """Return whether a sample has more than one number for each channel."""
        return x.dim() > 2 and math.prod(x.shape[1:]) > self.channels

    def normalised(self, values: Tensor, moments: Moments, x: Tensor, forward: Forward) -> Any:
        """Return what the layer makes of samples, all by the same moments."""
        weight, bias = self.scale(values)
        found = normalised(values, moments, weight, bias, self.layer.eps)
        return self.finished(found, x, forward)

    def normalised_each(
        self, values: Tensor, moments: Moments, of: Tensor, x: Tensor, forward: Forward
    ) -> Any:
        """Return what the layer makes of samples, each by the moments of its group."""
        (mean, var), (weight, bias) = moments, self.scale(values)
        scale = torch.rsqrt(var + self.layer.eps)
        if weight is not None:
            scale = scale * as_on(weight, scale)
        shift = -mean * scale
        if bias is not None:
            shift = shift + as_on(bias, shift)
        shape = (values.shape[0], self.channels, *[1] * (values.dim() - 2))
        found = torch.addcmul(shift[of].view(shape), values, scale[of].view(shape))
        return self.finished(found, x, forward)


class BatchNormKind(NormKind):
    """BatchNorm; one that does more than normalise is given values as the source would have them.

    Those of timm have an activation.

    Attributes:
        is_plain: Whether it only normalises.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer, self.channels, self.is_plain = layer, layer.num_features, is_plain(layer)

    def source(self, like: Tensor) -> Moments:
        """See `NormKind`."""
        mean, var = running_statistics(self.layer)
        return as_on(mean, like), as_on(var, like)

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `NormKind`."""
        if self.is_plain:
            return self.layer.weight, self.layer.bias
        mean, var = self.source(like)
        return (var + self.layer.eps).sqrt(), mean

    def plain(self, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        if not self.is_plain:
            return by_running_statistics(self.layer, functools.partial(forward, x))
        layer = self.layer
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        values = as_on(values, x)
        if self.is_plain:
            return values
        return by_running_statistics(self.layer, functools.partial(forward, values))


class SampleNormKind(NormKind):
    """GroupNorm and LayerNorm."""

    def __init__(self, layer: Any, source: Tensor) -> None:
        self.layer, self.channels, self._source = layer, source.shape[1], source

    def values(self, x: Tensor) -> Tensor:
        """See `NormKind`."""
        return normalised_alone(self.layer, at_least_float32(x))

    def source(self, like: Tensor) -> Moments:
        """See `NormKind`."""
        mean, var = as_on(self._source, like)
        return mean, var

    def scale(self, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `NormKind`."""
        # To the mean and deviation of the source, and from there as the layer itself does.
        mean, var = self.source(like)
        weight, bias = (var + self.layer.eps).sqrt(), mean
        if self.layer.weight is not None:
            own = as_on(self.layer.weight, like)
            weight, bias = weight * own, bias * own
        if self.layer.bias is not None:
            bias = bias + as_on(self.layer.bias, like)
        return weight, bias

    def finished(self, values: Tensor, x: Tensor, forward: Forward) -> Any:
        """See `NormKind`."""
        del forward
        return in_own_layout(self.layer, values).to(x.dtype)
