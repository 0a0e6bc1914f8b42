"""The statistics that BatchNorm layers normalise with, as a surface."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.adaptation.surfaces.channel_streams import mixed
from ttapca.adaptation.surfaces.mixing import (
    LARGE,
    MixedStatistics,
    can_be_quick,
    normalised,
)
from ttapca.adaptation.surfaces.spectral import SpectralGains
from ttapca.errors import AttachError, ShapeError


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
        follow: A surface whose `shift` multiplies the weight.
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
        follow: SpectralGains | None = None,
        required: bool = True,
    ) -> None:
        super().__init__(alpha, prior=prior, follow=follow)
        self._required = required

    def attach(self, model: nn.Module) -> None:
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
        self.take_over([(layer, _normalise) for layer in layers])


def _normalise(layer: _BatchNorm, surface: BatchNormStatistics, number: int, x: Tensor) -> Tensor:
    """What a BatchNorm layer runs while the surface is attached."""
    alpha = surface.weight_in(number, len(x))
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
    if alpha == 1.0 and surface.memory is None and not large:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    if layer.running_mean is None or layer.running_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    source = (layer.running_mean, layer.running_var)
    moments = mixed(alpha, surface.moments_of(precise, number), source)
    return normalised(precise, moments, layer.weight, layer.bias, layer.eps).to(x.dtype)
