"""`iabn` and `unmix-tns`: BatchNorm with statistics of each image, for streams in any order."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Count, NotNegative, Positive, Seed
from ttapca.adaptation.surfaces import Surface
from ttapca.adaptation.surfaces.base import refuse_replaced
from ttapca.adaptation.surfaces.trainable import AroundForward
from ttapca.errors import AttachError
from ttapca.methods.method import Assembly, Method, register
from ttapca.spectral.stream import Stream
from ttapca.support.norm_layers import BatchNormKind, Forward, Moments, with_running_statistics

BATCH = 64  # samples by which the momentum of `unmix-tns` is meant, as in the official code
USUAL_MOMENTUM = 0.1  # of a BatchNorm layer that has none
START = 0.5  # share of the source's variance that the first components have between them


@register("iabn", paper="Gong et al. (NeurIPS 2022)")
@dataclass(frozen=True, kw_only=True)
class IABN(Method):
    """BatchNorm that is corrected by an image's own statistics, if these are far off.

    With mean mu and variance v of the source, and mu_x and v_x those of one channel of an image of
    L places, the image is normalised by

        mu + S(mu_x - mu; k sqrt(v / L))        v + S(v_x - v; k v sqrt(2 / (L - 1)))

    where S(d; w) = sign(d) max(|d| - w, 0): what sampling explains is left alone. It is the layer
    of NOTE, without its memory and its steps, on a network that was trained with plain BatchNorm.
    The paper: https://arxiv.org/abs/2208.05117.

    Attributes:
        width: Standard deviations that are taken for chance (k).
    """

    width: NotNegative = 4.0

    def assemble(self) -> Assembly:
        """Return statistics that look at every image by itself."""
        return Assembly([CorrectedStatistics(self.width)])


@register("unmix-tns", paper="Tomar et al. (ICLR 2024)")
@dataclass(frozen=True, kw_only=True)
class UnMixTNS(Method):
    """BatchNorm by a mixture of an image's statistics with components of the stream.

    A layer keeps K components, means m_k and variances v_k. An image with mean mu and variance v
    belongs to them by p_k = softmax_k(cos(mu, m_k) / tau), and is normalised by the moments of the
    mixture of all components, each moved towards the image:

        m'_k = (1 - p_k) m_k + p_k mu        v'_k = (1 - p_k) v_k + p_k v

    Each component then follows the images of a batch by its momentum times the mean of
    p_k (mu - m_k), the variance likewise. They start around the source, scattered at random. The
    paper: https://arxiv.org/abs/2401.08328.

    Attributes:
        components: How many (K).
        temperature: How evenly an image belongs to them (tau).
        seed: Scatters them.
    """

    components: Count = 16
    temperature: Positive = 0.07
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """Return statistics that follow a stream by their components."""
        return Assembly([UnmixedStatistics(self)])


class OwnStatistics(Surface):
    """Runs every BatchNorm layer that has running statistics in a way of its own."""

    required = False  # whether a model without such layers is an error

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over the layers."""
        super().attach(model, stream)
        layers = list(with_running_statistics(model).values())
        if self.required and not layers:
            raise AttachError(
                "Statistics of samples need BatchNorm layers with running statistics; the model "
                "has none. Choose a method that does without them."
            )
        refuse_replaced(layers)
        for number, layer in enumerate(layers):
            kind = BatchNormKind(layer)
            self.declare(number, kind)
            run = functools.partial(self._run_layer, number, kind)
            self.patches.wrap(layer, AroundForward(self, run, replaces=True))

    def declare(self, number: int, kind: BatchNormKind) -> None:
        """Declare what a stream keeps of a layer."""

    def _run_layer(
        self, number: int, kind: BatchNormKind, forward: Forward, /, input: Tensor
    ) -> Any:
        """Normalise a batch."""
        raise NotImplementedError


class EachImagesStatistics(OwnStatistics):
    """BatchNorm by each image's own moments, or the source's if a channel is a single number."""

    required = True

    def _run_layer(
        self, number: int, kind: BatchNormKind, forward: Forward, /, input: Tensor
    ) -> Any:
        """Normalise each image of a batch."""
        if not self.enabled:
            return forward(input)
        places = math.prod(input.shape[2:])
        if places < 2 or not len(input):
            return kind.plain(input, forward)
        values = kind.values(input)
        var, mean = torch.var_mean(values.flatten(2), dim=2, correction=0)  # (batch, channels)
        moments = self.moments(number, kind, (mean, var), places)
        each = torch.arange(len(input), device=input.device)
        return kind.normalised_each(values, moments, each, input, forward)

    def moments(self, number: int, kind: BatchNormKind, own: Moments, places: int) -> Moments:
        """Return the moments that images are normalised by, given their own; (batch, channels)."""
        raise NotImplementedError


class CorrectedStatistics(EachImagesStatistics):
    """Statistics of the source, corrected by those of an image; see `IABN`."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def moments(self, number: int, kind: BatchNormKind, own: Moments, places: int) -> Moments:
        """Return what is left of an image's distance to the source beyond chance."""
        del number
        (mean, var), (source_mean, source_var) = own, kind.source(own[0])
        var = var * (places / (places - 1))
        certain = source_var + kind.layer.eps
        by_chance = self.width * (certain / places).sqrt()
        mean = source_mean + _shrunk(mean - source_mean, by_chance)
        by_chance = self.width * certain * math.sqrt(2 / (places - 1))
        var = source_var + _shrunk(var - source_var, by_chance)
        return mean, var.clamp(min=0)


def _shrunk(distance: Tensor, width: Tensor) -> Tensor:
    """Return distances that are smaller by a width, and at least zero; the sign stays."""
    return distance.sign() * (distance.abs() - width).clamp(min=0)


class UnmixedStatistics(EachImagesStatistics):
    """Components of a stream, mixed for each image; see `UnMixTNS`."""

    def __init__(self, options: UnMixTNS) -> None:
        super().__init__()
        self.options = options

    def declare(self, number: int, kind: BatchNormKind) -> None:
        """Scatter the components of a layer around the source."""
        mean, var = kind.source(kind.layer.running_mean)
        count = self.options.components
        means = mean.expand(count, -1)
        if count > 1:
            generator = torch.Generator().manual_seed(self.options.seed + number)
            noise = torch.randn(means.shape, generator=generator).to(mean)
            means = means + math.sqrt(START * count / (count - 1)) * var.sqrt() * noise
            var = (1 - START) * var
        self.stream.declare(f"components/{number}", (means.clone(), var.repeat(count, 1)))

    def moments(self, number: int, kind: BatchNormKind, own: Moments, places: int) -> Moments:
        """Return the moments of the mixture, and let the components follow the images."""
        del places
        name = f"components/{number}"
        counts = self.stream.counts(name)
        means, variances = (each.to(own[0]) for each in self.stream.past(name))  # (K, channels)
        likeness = F.normalize(own[0], dim=1) @ F.normalize(means, dim=1).T  # (batch, K)
        share = (likeness / self.options.temperature).softmax(1).unsqueeze(2)
        to_mean = share * (own[0].unsqueeze(1) - means)  # (batch, K, channels)
        to_var = share * (own[1].unsqueeze(1) - variances)
        if counts:
            momentum = kind.layer.momentum or USUAL_MOMENTUM
            momentum = 1 - (1 - momentum) ** (len(own[0]) / BATCH)
            moved = (means + momentum * to_mean.mean(0), variances + momentum * to_var.mean(0))
            if all(bool(torch.isfinite(each).all()) for each in moved):
                self.stream.write(name, tuple(each.detach() for each in moved))
            else:
                self.stream.left_out = True
        mixed = means + to_mean
        mean = mixed.mean(1)
        var = (variances + to_var).mean(1) + mixed.square().mean(1) - mean.square()
        return mean, var.clamp(min=0)
