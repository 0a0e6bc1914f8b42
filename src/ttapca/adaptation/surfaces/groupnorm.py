"""The statistics of channels after GroupNorm, as a surface."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.channel_streams import mixed
from ttapca.adaptation.surfaces.mixing import (
    MixedStatistics,
    Normalise,
    normalised,
)
from ttapca.adaptation.surfaces.spectral import SpectralGains
from ttapca.errors import AttachError
from ttapca.support.group_norm import normalised_groups
from ttapca.support.modules import device_and_dtype, find_layer


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
        follow: A surface whose `shift` multiplies the weight.

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
        follow: SpectralGains | None = None,
    ) -> None:
        super().__init__(alpha, prior=prior, follow=follow)
        self._source = dict(source)

    def attach(self, model: nn.Module) -> None:
        """Take over the GroupNorm layers whose statistics are known."""
        layers: list[tuple[nn.Module, Normalise]] = []
        for path, statistics in self._source.items():
            layer = find_layer(model, path)
            if not isinstance(layer, nn.GroupNorm) or layer.num_channels != statistics.shape[1]:
                raise AttachError(
                    f"The filter was fitted on a network with a GroupNorm of {statistics.shape[1]} "
                    f"channels at `{path}`; found {layer}. Fit it on this network."
                )
            here = statistics.to(device_and_dtype(layer, model)[0])
            layers.append((layer, functools.partial(_normalise, here)))
        self.take_over(layers)


def _normalise(
    source: Tensor, layer: nn.GroupNorm, surface: GroupNormStatistics, number: int, x: Tensor
) -> Tensor | None:
    """What a GroupNorm layer runs while the surface is attached."""
    alpha = surface.weight_in(number, len(x))
    if alpha == 0.0:
        return None
    precise = normalised_groups(layer, x.to(torch.promote_types(x.dtype, torch.float32)))
    source_mean, source_var = source.to(precise)
    moments = mixed(alpha, surface.moments_of(precise, number), (source_mean, source_var))
    # To the source's mean and deviation, and from there by the layer's own scale and shift.
    weight, bias = (source_var + layer.eps).sqrt(), source_mean
    if layer.weight is not None:
        weight, bias = weight * layer.weight, bias * layer.weight
    if layer.bias is not None:
        bias = bias + layer.bias
    return normalised(precise, moments, weight, bias, layer.eps).to(x.dtype)
