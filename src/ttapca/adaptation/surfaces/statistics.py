"""The statistics that normalisation layers normalise with, as surfaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca._checks import Number, check_option
from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.channel_moments import (
    LARGE,
    can_be_quick,
    channel_moments,
    mixed,
    normalised,
)
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.stream import ScaleGivenBack, Stream
from ttapca.support.group_norm import normalised_groups
from ttapca.support.modules import device_and_dtype, find_layer
from ttapca.support.wrapping import Wrapper, WrapperHandle, is_replaced, wrap_forward

# What is known of a layer's channels before a stream: mean, variance, for how many samples they
# count, and whether a batch was met.
NOTHING_SEEN = (None, None, 0.0, False)


class MixedStatistics(Surface):
    """Normalisation with statistics of the test data and of the source, mixed.

    Args:
        alpha: Weight of the batch, from 0 (source) to 1 (batch). A pair is the weight in the first
            and in the last layer; it changes evenly in between.
        prior: How many samples the source statistics count for. The weight of a batch of n is then
            n / (n + prior) times `alpha`, after Schneider et al. (2020), whose variance leaves out
            the distance between the means.
        follow: Whether to follow the stream. Its `shift`, between 0 and 1, then multiplies the
            weight, so that data which have not shifted are normalised as the source; and what the
            stream remembers of earlier batches stands for the batch.
    """

    def __init__(
        self,
        alpha: float | tuple[float, float] = 1.0,
        *,
        prior: float | None = None,
        follow: bool = False,
    ) -> None:
        super().__init__()
        if prior is not None:
            check_option("prior", prior, Number(0))
        self.ends = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        for end in self.ends:
            check_option("alpha", end, Number(0, 1))
        self.prior = prior
        self.follow = follow
        self.stream = Stream()
        self._handles: list[WrapperHandle] = []

    def take_over(
        self, layers: Sequence[tuple[nn.Module, Normalise]], stream: Stream | None
    ) -> None:
        """Let layers normalise by something else than their own `forward`.

        Args:
            layers: In the order of the model, each with its normalisation.
            stream: What the statistics follow.
        """
        if self._handles:
            raise AttachError("A surface goes on one model; this one is attached already.")
        for layer, _ in layers:
            if is_replaced(layer):
                raise AttachError(
                    "A normalisation layer takes one set of statistics; something has taken over a "
                    f"{type(layer).__name__} of this model already. Call `detach()` on what did "
                    "first."
                )
        self.stream = stream or Stream()
        first, last = self.ends
        for number, (layer, normalise) in enumerate(layers):
            name = f"{type(self).__name__}/{number}"
            if self.follow:
                self.stream.declare(name, NOTHING_SEEN)
            weight = first + (last - first) * number / max(1, len(layers) - 1)
            # A hook could only compute the output a second time.
            statistics = LayerStatistics(self, layer, normalise, name, weight)
            self._handles.append(wrap_forward(layer, statistics))

    def detach(self) -> None:
        """Give every layer its own normalisation back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        first, last = self.ends
        alpha = f"{first}" if first == last else f"{first} to {last}"
        prior = "" if self.prior is None else f", prior={self.prior}"
        return f"alpha={alpha}{prior}, layers={len(self._handles)}"


class LayerStatistics(Wrapper):
    """Runs one layer with the statistics of a surface, while that is switched on.

    Args:
        surface: Whose statistics.
        layer: The layer.
        normalise: Computes its output.
        name: Under which the stream holds what was seen here.
        weight: Of a large batch that has surely shifted.
    """

    replaces = True

    def __init__(
        self,
        surface: MixedStatistics,
        layer: nn.Module,
        normalise: Normalise,
        name: str,
        weight: float,
    ) -> None:
        self.surface = surface
        self.layer = layer
        self.normalise = normalise
        self.name = name
        self.full_weight = weight

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        """Normalise a batch; the name of the argument is that of torch's own layers."""
        output = None
        if self.surface.enabled:
            output = self.normalise(self.layer, self, input)
        return forward(input) if output is None else output

    def weight(self, batch_size: int) -> float:
        """Weight of the test data in the mixture, with what was seen before this batch."""
        surface, weight, size = self.surface, self.full_weight, float(batch_size)
        if weight and surface.follow:
            stream = surface.stream
            _, _, samples, met = stream.past(self.name)
            size += stream.aged(samples, batch_size)
            if size <= 1 and not met:
                # One image says little of a channel. The second one finds that one was there.
                if stream.counts(self.name):
                    stream.write(self.name, (None, None, 0.0, True))
                return 0.0
            weight *= stream.shift
        return weight if surface.prior is None else weight * (size / (size + surface.prior))

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the channels in the batch, or in the stream up to it."""
        moments = channel_moments(x)
        if not self.surface.follow:
            return moments
        stream = self.surface.stream
        mean, var, samples, _ = stream.past(self.name)
        before = stream.aged(samples, len(x))
        if mean is not None:
            moments = mixed(len(x) / (before + len(x)), moments, (mean, var))
        if stream.counts(self.name):
            mean, var = (moment.detach() for moment in moments)
            stream.write(self.name, (mean, var, before + len(x), True))
        return moments


# The normalisation of one layer: given the layer, its statistics and its input. None where the
# layer's own will do.
Normalise = Callable[[Any, LayerStatistics, Tensor], Tensor | None]


class BatchNormStatistics(MixedStatistics):
    """Normalise with statistics of the source, of the test batch, or of a mixture of both.

    The mixture is that of two populations, the batch with weight alpha and the source with
    1 - alpha, so its variance holds the distance between their means:

        mean = alpha m_batch + (1 - alpha) m_source
        var  = alpha v_batch + (1 - alpha) v_source + alpha (1 - alpha) (m_batch - m_source)^2

    Running statistics are read and never written, in training mode as well. Gradients pass through
    the statistics of the batch.

    Args:
        alpha: See `MixedStatistics`, as for the next two.
        prior: How many samples the source statistics count for.
        follow: Whether to follow the stream.
        required: Whether a model without BatchNorm is an error.

    Example:
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
        follow: bool = False,
        required: bool = True,
    ) -> None:
        super().__init__(alpha, prior=prior, follow=follow)
        self._required = required

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over the normalisation of every BatchNorm layer that has running statistics."""
        # A layer without running statistics always uses those of the batch: there is no choice.
        layers = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        if self._required and not layers:
            raise AttachError(
                "Batch statistics need BatchNorm layers with running statistics; the model has "
                "none. Choose a method that does without them."
            )
        self.take_over([(layer, _batch_norm) for layer in layers], stream)
        if layers:
            weight = sum(self.ends) / 2
            self.stream.given_back = ScaleGivenBack(weight, self.prior, needs_two=self.follow)


def _batch_norm(layer: _BatchNorm, statistics: LayerStatistics, x: Tensor) -> Tensor:
    alpha = statistics.weight(len(x))
    if alpha == 0.0:
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )
    if alpha == 1.0 and x.numel() == x.shape[1]:
        raise ShapeError(
            "Batch statistics need more than one value for each channel; found a batch of "
            f"shape {tuple(x.shape)}. Use a larger batch, or source or mixed statistics."
        )
    large = x.numel() >= LARGE and can_be_quick(x)
    if alpha == 1.0 and not statistics.surface.follow and not large:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    if layer.running_mean is None or layer.running_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    source = (layer.running_mean, layer.running_var)
    moments = mixed(alpha, statistics.moments(precise), source)
    return normalised(precise, moments, layer.weight, layer.bias, layer.eps).to(x.dtype)


class GroupNormStatistics(MixedStatistics):
    """Bring the channels of GroupNorm layers back to the mean and variance they had in the source.

    GroupNorm normalises the groups of each image; single channels still move when data shift. A
    channel is normalised by the mixture of what it is in the batch and what it was in the source
    (see `BatchNormStatistics`), and given the source's mean and variance again. With the weight 0
    the layer is as it was.

    Args:
        source: Mean and variance of every channel before the layer's own scale and shift, by the
            layer's path, shape (2, channels); see `ttapca.support.group_norm`.
        alpha: See `MixedStatistics`, as for the next two.
        prior: How many samples the source statistics count for.
        follow: Whether to follow the stream.

    Example:
        >>> model = nn.Sequential(nn.GroupNorm(1, 2, affine=False))
        >>> source = {"0": torch.tensor([[0.0, 0.0], [1.0, 1.0]])}
        >>> statistics = GroupNormStatistics(source)
        >>> statistics.attach(model)
        >>> model(torch.tensor([[[0.0, 1.0], [8.0, 9.0]]])).round(decimals=2).tolist()
        [[[-1.0, 1.0], [-1.0, 1.0]]]
        >>> statistics.detach()
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        alpha: float | tuple[float, float] = 1.0,
        *,
        prior: float | None = None,
        follow: bool = False,
    ) -> None:
        super().__init__(alpha, prior=prior, follow=follow)
        self._source = dict(source)

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over the GroupNorm layers whose statistics are known."""
        layers: list[tuple[nn.Module, Normalise]] = []
        for path, known in self._source.items():
            layer = find_layer(model, path)
            if not isinstance(layer, nn.GroupNorm) or layer.num_channels != known.shape[1]:
                raise AttachError(
                    f"The filter was fitted on a network with a GroupNorm of {known.shape[1]} "
                    f"channels at `{path}`; found {layer}. Fit it on this network."
                )
            here = known.to(device_and_dtype(layer, model)[0])
            layers.append((layer, functools.partial(_group_norm, here)))
        self.take_over(layers, stream)


def _group_norm(
    source: Tensor, layer: nn.GroupNorm, statistics: LayerStatistics, x: Tensor
) -> Tensor | None:
    alpha = statistics.weight(len(x))
    if alpha == 0.0:
        return None
    precise = normalised_groups(layer, x.to(torch.promote_types(x.dtype, torch.float32)))
    source_mean, source_var = source.to(precise)
    moments = mixed(alpha, statistics.moments(precise), (source_mean, source_var))
    # To the source's mean and deviation, and from there by the layer's own scale and shift.
    weight, bias = (source_var + layer.eps).sqrt(), source_mean
    if layer.weight is not None:
        weight, bias = weight * layer.weight, bias * layer.weight
    if layer.bias is not None:
        bias = bias + layer.bias
    return normalised(precise, moments, weight, bias, layer.eps).to(x.dtype)
