"""The statistics that normalisation layers normalise with, as surfaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca._checks import Maybe, Number, check_option
from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.class_plan import ClassPlan
from ttapca.spectral.stream import ScaleGivenBack, Stream
from ttapca.support.batch_norms import (
    by_running_statistics,
    is_plain,
    moved_to_source,
    running_statistics,
    with_running_statistics,
)
from ttapca.support.channel_moments import (
    LARGE,
    can_be_quick,
    channel_moments,
    mixed_moments,
    normalised,
    some_places,
)
from ttapca.support.modules import device_and_dtype, find_layer
from ttapca.support.sample_norms import (
    SampleNorm,
    call_every_layer,
    channels_of,
    in_own_layout,
    is_sample_norm,
    normalised_alone,
)
from ttapca.support.tensors import as_on, at_least_float32
from ttapca.support.wrapping import Wrapper, is_replaced, wrap_forward

# What is known of a layer's channels before a stream starts: mean, variance, how many independent
# samples they count for, and how many samples were seen.
NOTHING_SEEN = (None, None, 0.0, 0.0)

# Share of the weight of a single image that remains if the image is as usual as any.
LEAST_ALONE = 1 / 3


class MixedStatistics(Surface):
    """What both kinds of statistics share: the options, and how layers are taken over.

    Args:
        alpha, prior, follow, alone: See `BatchNormStatistics`.

    Attributes:
        ends: `alpha` in the first and in the last layer.
        layers: The layers that were taken over, once attached, in the order of the model.
        watched: Paths of layers whose channel means of each sample are wanted.
        means: These means of the last pass by path, shape (batch, channels).
    """

    def __init__(
        self,
        alpha: float | tuple[float, float] = 1.0,
        *,
        prior: float | None = None,
        follow: bool = False,
        alone: float = 0.0,
    ) -> None:
        super().__init__()
        check_option("prior", prior, Maybe(Number(0)))
        check_option("alone", alone, Number(0, 1))
        self.ends = alpha if isinstance(alpha, tuple) else (alpha, alpha)
        for end in self.ends:
            check_option("alpha", end, Number(0, 1))
        self.prior = prior
        self.follow = follow
        self.alone = alone
        self.stream = Stream()
        self.layers: list[LayerStatistics] = []
        self.watched: frozenset[str] = frozenset()
        self.means: dict[str, Tensor] = {}

    def take_over(
        self, layers: Sequence[tuple[str, nn.Module, Normalise]], stream: Stream | None
    ) -> None:
        """Replace the `forward` of layers, given with path and normalisation in model order."""
        refuse_replaced([layer for _, layer, _ in layers])
        self.stream = stream or Stream()
        first, last = self.ends
        for number, (path, layer, normalise) in enumerate(layers):
            name = f"{type(self).__name__}/{number}"
            if self.follow:
                self.stream.declare(name, NOTHING_SEEN, by_condition=True)
            weight = first + (last - first) * number / max(1, len(layers) - 1)
            # A hook could only compute the output a second time.
            statistics = LayerStatistics(self, path, layer, normalise, name, weight)
            self.layers.append(statistics)
            self._handles.append(wrap_forward(layer, statistics))

    def weight_alone(self, samples: float) -> float:
        """Return the weight of few samples, for which the weight of a batch says little.

        A sample that is as usual as half of the source's has a third of it. It fades as samples
        come, and is 0 as soon as there are more than `prior` of them.
        """
        fading = (samples - 1) / self.prior if self.prior else float(samples > 1)
        if not self.alone or fading >= 1:
            return 0.0
        strength = LEAST_ALONE + (1 - LEAST_ALONE) * self.stream.unusual
        return self.alone * strength * min(1.0, 1 - fading)

    def start_batch(self) -> None:
        """Drop the moments of the batch before, which nobody settled."""
        for layer in self.layers:
            layer.own = {}

    def settle(self) -> None:
        """Add this batch to the stream again: by now more is known about its classes."""
        for layer in self.layers:
            layer.settle()

    def weights_in(self, values: Mapping[str, Any], shift: float) -> list[float]:
        """Return the weight of the test data in every layer that tells it.

        Args:
            values: Of the stream that the surface has joined, or of another one of that kind.
            shift: How surely that stream has shifted, from 0 to 1.
        """
        found = [layer.weight_in(values, shift) for layer in self.layers]
        return [weight for weight in found if weight is not None]

    def change(self, one: ClassPlan, other: ClassPlan) -> float:
        """Return by how much the statistics of any layer depend on which plan they go by, 0 to 1.

        That is the difference of the weights of the test data, and the share of images whose class
        is another one, times the weight that these images have.
        """
        found, stream = 0.0, self.stream
        for condition, rows in stream.groups:
            with stream.in_condition(condition):
                size = stream.samples - stream.past("samples") if rows is None else len(rows)
                differ = one.differs(other, rows)
                for layer in self.layers:
                    before = stream.aged(layer.past()[2], size)
                    count, then = (
                        plan.images(layer.path, rows, condition, size) for plan in (one, other)
                    )
                    weight, later = layer.weight_of(before + count), layer.weight_of(before + then)
                    new = then / max(before + then, 1.0)
                    found = max(found, abs(weight - later), later * new * differ)
        return found

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        first, last = self.ends
        alpha = f"{first}" if first == last else f"{first} to {last}"
        prior = "" if self.prior is None else f", prior={self.prior}"
        return f"alpha={alpha}{prior}, layers={len(self._handles)}"


def refuse_replaced(layers: Sequence[nn.Module]) -> None:
    """Raise `AttachError` where something else normalises in place of a layer."""
    for layer in layers:
        if is_replaced(layer):
            raise AttachError(
                "A normalisation layer takes one set of statistics; something has taken over a "
                f"{type(layer).__name__} of this model already. Call `detach()` on that first."
            )


class LayerStatistics(Wrapper):
    """Runs one layer with the statistics of a surface, while that is switched on."""

    replaces = True

    def __init__(
        self,
        surface: MixedStatistics,
        path: str,
        layer: nn.Module,
        normalise: Normalise,
        name: str,
        weight: float,
    ) -> None:
        self.surface = surface
        self.path = path
        self.layer = layer
        self.normalise = normalise
        self.name = name  # under which the stream holds what this layer has seen
        self.full_weight = weight  # of a large batch that has surely shifted
        # Moments and size of the batch alone, by condition.
        self.own: dict[int, tuple[tuple[Tensor, Tensor], int]] = {}

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        """Normalise a batch; the argument has the name that torch's own layers give it."""
        surface = self.surface
        if not surface.enabled:
            return forward(input)
        if self.path in surface.watched and self.path not in surface.means:
            surface.means[self.path] = _means_of_each(self.layer, input)
        run = functools.partial(self._run, forward)
        return surface.stream.by_condition(run, input) if surface.follow else run(input)

    def _run(self, forward: Callable[..., Any], samples: Tensor) -> Any:
        output = self.normalise(self.layer, self, samples, forward)
        return forward(samples) if output is None else output

    def weight(self, batch_size: int, *, maps: bool = True) -> float:
        """Return the weight of the test data in the mixture, given what was seen before.

        Args:
            batch_size: Images in the batch.
            maps: Whether each image has more than one number for each channel.
        """
        surface, weight, size = self.surface, self.full_weight, float(batch_size)
        if not surface.follow:
            if surface.prior is not None:
                # An empty batch says nothing, also beside a source that counts for no samples.
                weight *= size / (size + surface.prior) if size else 0.0
            return weight
        # What counts are the samples of the stream so far, not only those of this batch.
        stream = surface.stream
        _, _, samples, seen = self.past()
        before = stream.aged(samples, batch_size)
        size = before + self._count(batch_size)
        images = stream.aged(seen, batch_size) + batch_size
        alone = surface.weight_alone(images) if maps else 0.0
        if images <= 1 and not alone:
            # One number says nothing about a channel, so the first one changes nothing.
            if stream.counts(self.name):
                stream.write(self.name, (None, None, 0.0, 1.0))
            return 0.0
        return min(1.0, self.weight_of(size) + alone)

    def weight_of(self, samples: float) -> float:
        """Return the weight of so many independent samples of the stream."""
        weight = self.full_weight * self.surface.stream.shift
        if self.surface.prior is None:
            return weight
        return weight * samples / (samples + self.surface.prior) if samples else 0.0

    def _count(self, size: int) -> float:
        """Return how many independent samples so many of the batch are worth."""
        stream = self.surface.stream
        plan = stream.plan
        if plan is None:
            return float(size)
        return plan.images(self.path, stream.rows(size), stream.condition, size)

    def weight_in(self, values: Mapping[str, Any], shift: float) -> float | None:
        """Return the weight after the last batch; None where it depends on the size of a batch."""
        surface, weight = self.surface, self.full_weight
        if not surface.follow:
            return weight if surface.prior is None else None
        _, _, samples, _ = values[self.name]
        weight *= shift
        return (
            weight if surface.prior is None else weight * samples / max(samples + surface.prior, 1)
        )

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the channels in the batch, or in the stream up to it."""
        if not self.surface.follow:
            return channel_moments(x)
        moments, size = channel_moments(some_places(x)), x.shape[0]
        stream, past = self.surface.stream, self.past()
        together = self._together(moments, size, past)
        if stream.counts(self.name):
            self._write(together, size, past)
            if stream.plan is not None:
                self.own[stream.condition] = (moments, size)
        return together

    def settle(self) -> None:
        """Add this batch to the stream again: by now more is known about its classes."""
        stream = self.surface.stream
        for condition, (moments, size) in self.own.items():
            with stream.in_condition(condition):
                past = self.past()
                self._write(self._together(moments, size, past), size, past)
        self.own = {}

    def past(self) -> tuple[Any, Any, float, float]:
        """Return what was seen before this batch, without what its classes explain."""
        found: tuple[Any, Any, float, float] = self.surface.stream.past(self.name)
        return found

    def _write(
        self, moments: tuple[Tensor, Tensor], size: int, past: tuple[Any, Any, float, float]
    ) -> None:
        mean, var = moments
        if mean.requires_grad or var.requires_grad:
            mean, var = mean.detach(), var.detach()
        stream = self.surface.stream
        samples = stream.aged(past[2], size) + self._count(size)
        stream.write(self.name, (mean, var, samples, stream.aged(past[3], size) + size))

    def _together(
        self, moments: tuple[Tensor, Tensor], size: int, past: tuple[Any, Any, float, float]
    ) -> tuple[Tensor, Tensor]:
        """Return the moments of a batch, without what its classes explain, and of the past."""
        stream = self.surface.stream
        if stream.plan is not None:
            rows = stream.rows(size)
            moments = stream.plan.corrected(self.path, moments, rows, stream.condition)
        mean, var, samples, _ = past
        if mean is None:
            return moments
        before, count = stream.aged(samples, size), self._count(size)
        return mixed_moments(count / (before + count), moments, (mean, var))


# Normalises for one layer, given the layer, its statistics, its input and its own `forward`; None
# where that will do as it is.
Normalise = Callable[[Any, LayerStatistics, Tensor, Callable[..., Any]], Tensor | None]


class BatchNormStatistics(MixedStatistics):
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
        follow: Whether to follow the stream. Its `shift`, between 0 and 1, then multiplies the
            weight, so that data which have not shifted are normalised as in the source. And the
            statistics are those of the stream so far instead of the batch alone.
        alone: Weight of a single image that is very unusual, in every layer with feature maps, and
            if the stream is followed. It is added to the weight of a batch, and fades to 0 as there
            come to be more than `prior` images.
        required: Whether a model without BatchNorm is an error.

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
        follow: bool = False,
        alone: float = 0.0,
        required: bool = True,
    ) -> None:
        super().__init__(alpha, prior=prior, follow=follow, alone=alone)
        self._required = required

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over every BatchNorm layer that has running statistics."""
        super().attach(model, stream)
        layers = with_running_statistics(model)
        if self._required and not layers:
            raise AttachError(
                "Batch statistics need BatchNorm layers with running statistics; the model has "
                "none. Choose a method that does without them."
            )
        self.take_over(
            [
                (path, layer, _batch_norm if is_plain(layer) else _around_own_forward)
                for path, layer in layers.items()
            ],
            stream,
        )
        if layers:
            weight = sum(self.ends) / 2
            self.stream.given_back = ScaleGivenBack(weight, self.prior, needs_two=self.follow)


def _batch_norm(
    layer: _BatchNorm, statistics: LayerStatistics, x: Tensor, _forward: Callable[..., Any]
) -> Tensor:
    alpha = _batch_weight(statistics, x)
    mean, var, weight, bias = layer.running_mean, layer.running_var, layer.weight, layer.bias
    if alpha == 0.0:
        return F.batch_norm(x, mean, var, weight, bias, eps=layer.eps)
    batch_alone = alpha == 1.0 and not statistics.surface.follow
    # Of a large batch, our own moments are quicker than those of torch.
    if batch_alone and not (x.numel() >= LARGE and can_be_quick(x)):
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
    precise = at_least_float32(x)
    moments = mixed_moments(alpha, statistics.moments(precise), running_statistics(layer))
    return as_on(normalised(precise, moments, weight, bias, layer.eps), x)


def _around_own_forward(
    layer: _BatchNorm, statistics: LayerStatistics, x: Tensor, forward: Callable[..., Any]
) -> Any:
    """Run a layer that does more than BatchNorm, as those of timm, which have an activation."""
    alpha = _batch_weight(statistics, x)
    if alpha > 0.0:
        precise = at_least_float32(x)
        moments = mixed_moments(alpha, statistics.moments(precise), running_statistics(layer))
        x = as_on(moved_to_source(precise, moments, layer), x)
    return by_running_statistics(layer, functools.partial(forward, x))


def _batch_weight(statistics: LayerStatistics, x: Tensor) -> float:
    alpha = statistics.weight(x.shape[0], maps=_has_maps(x))
    if alpha == 1.0 and x.numel() == x.shape[1]:
        raise ShapeError(
            "Batch statistics need more than one value for each channel; found a batch of "
            f"shape {tuple(x.shape)}. Use a larger batch, or source or mixed statistics."
        )
    return alpha


class SampleNormStatistics(MixedStatistics):
    """Bring channels of GroupNorm and LayerNorm back to the mean and variance of the source.

    Such layers normalise every sample by itself: GroupNorm groups of channels, LayerNorm the
    channels of a token. Single channels still move when data shift. A channel is normalised by the
    mixture of its statistics in the batch and in the source (see `BatchNormStatistics`), and then
    given the mean and variance of the source again. With the weight 0 the layer is as it was.

    Args:
        source: Mean and variance of every channel before the layer's own scale and shift, by the
            layer's path, shape (2, channels); see `ttapca.fitting.source_channels`.
        alpha, prior, follow: See `BatchNormStatistics`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.GroupNorm(1, 2, affine=False))
        >>> source = {"0": torch.tensor([[0.0, 0.0], [1.0, 1.0]])}
        >>> statistics = SampleNormStatistics(source)
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
        """Take over the layers whose statistics are known."""
        super().attach(model, stream)
        for path, known in self._source.items():
            layer = find_layer(model, path)
            if not is_sample_norm(layer) or channels_of(layer) != known.shape[1]:
                raise AttachError(
                    "The filter was fitted on a network with a GroupNorm or LayerNorm of "
                    f"{known.shape[1]} channels at `{path}`; found {layer}. Fit it on this network."
                )
        layers: list[tuple[str, nn.Module, Normalise]] = []
        for path, layer in model.named_modules():  # a saved filter has them in another order
            if path in self._source:
                here = self._source[path].to(device_and_dtype(layer, model)[0])
                layers.append((path, layer, functools.partial(_sample_norm, here)))
        self.take_over(layers, stream)
        taken = [layer for _, layer, _ in layers]
        self._handles += call_every_layer(model, taken, self)


def _sample_norm(
    source: Tensor,
    layer: SampleNorm,
    statistics: LayerStatistics,
    x: Tensor,
    _forward: Callable[..., Any],
) -> Tensor | None:
    alpha = statistics.weight(x.shape[0])
    if alpha == 0.0:
        return None
    precise = normalised_alone(layer, at_least_float32(x))
    source_mean, source_var = source.to(precise)
    moments = mixed_moments(alpha, statistics.moments(precise), (source_mean, source_var))
    # To the mean and deviation of the source, and from there by the layer's own scale and shift.
    weight, bias = (source_var + layer.eps).sqrt(), source_mean
    if layer.weight is not None:
        weight, bias = weight * layer.weight, bias * layer.weight
    if layer.bias is not None:
        bias = bias + layer.bias
    found = normalised(precise, moments, weight, bias, layer.eps)
    return in_own_layout(layer, found).to(x.dtype)


def _means_of_each(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the channel means of each sample, as `fit` measures them."""
    values = normalised_alone(layer, at_least_float32(x)) if is_sample_norm(layer) else x
    return values.detach().flatten(2).mean(2).float() if values.dim() > 2 else values.float()


def _has_maps(x: Tensor) -> bool:
    """Return whether a sample has more than one number for each channel."""
    return x.numel() > x.shape[0] * x.shape[1]
