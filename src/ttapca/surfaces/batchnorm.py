"""The statistics that BatchNorm layers normalise with, as a surface."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import AttachError, OptionError, ShapeError
from ttapca.surfaces.base import Surface
from ttapca.surfaces.spectral import SpectralGains

# Below this share of the mean square, a variance computed as a difference has lost its digits.
CANCELLED = 1e-3


class BatchNormStatistics(Surface):
    """Normalise with statistics of the source, of the test batch, or of a mixture of both.

    The mixture is that of two populations, the batch with weight alpha and the source with
    1 - alpha, so its variance holds the distance between their means:

        mean = alpha m_batch + (1 - alpha) m_source
        var  = alpha v_batch + (1 - alpha) v_source + alpha (1 - alpha) (m_batch - m_source)^2

    Running statistics are read and never written, in training mode as well. Gradients pass through
    the statistics of the batch.

    Args:
        alpha: Weight of the batch, from 0 (source) to 1 (batch). A pair is the weight in the first
            and in the last layer; it changes evenly in between.
        prior: How many samples the source statistics count for. The weight of a batch of n is then
            n / (n + prior) times `alpha`, after Schneider et al. (2020), whose variance leaves out
            the distance between the means.
        follow: A surface whose `shift`, between 0 and 1, multiplies the weight: data that have not
            shifted are normalised as the source. It must come first in the forward pass.
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
        self._required = required
        self._layers: list[_BatchNorm] = []

    def attach(self, model: nn.Module) -> None:
        """Take over the normalisation of every BatchNorm layer that has running statistics."""
        if self._layers:
            raise AttachError("A surface goes on one model; this one is attached already.")
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
        for layer in layers:
            if "forward" in vars(layer):
                raise AttachError(
                    "A BatchNorm layer takes one set of statistics; something has taken over a "
                    "layer of this model already. Call `detach()` on what did first."
                )
        for number, layer in enumerate(layers):
            # Shadowing `forward` on the instance leaves buffers, keys and hooks as they are, and
            # is undone by deleting it. A hook could only compute the output a second time.
            layer.forward = functools.partial(  # type: ignore[method-assign]
                _forward, layer, self, number / max(1, len(layers) - 1)
            )
        self._layers = layers

    def detach(self) -> None:
        """Give every layer its own normalisation back."""
        for layer in self._layers:
            del layer.forward
        self._layers = []

    def weight_of(self, batch_size: int, depth: float = 1.0) -> float:
        """Weight of a batch of this size in the mixture.

        Args:
            batch_size: How many samples.
            depth: Of the layer, from 0 (the first) to 1 (the last).
        """
        first, last = self._ends
        weight = first + (last - first) * depth
        if self.prior is not None:
            weight *= batch_size / (batch_size + self.prior)
        (followed,) = self._follow
        return weight if followed is None else weight * followed.shift

    def mean_weight(self, batch_size: int) -> float:
        """Mean over layers of the weight of a batch that has surely shifted; 0 without layers."""
        if not self._layers:
            return 0.0
        size = 1.0 if self.prior is None else batch_size / (batch_size + self.prior)
        return sum(self._ends) / 2 * size

    def extra_repr(self) -> str:
        """What `print(adapter)` shows."""
        prior = "" if self.prior is None else f", prior={self.prior}"
        return f"alpha={self.alpha}{prior}, layers={len(self._layers)}"


def _forward(layer: _BatchNorm, surface: BatchNormStatistics, depth: float, x: Tensor) -> Tensor:
    """What a BatchNorm layer runs while the surface is attached."""
    if not surface.enabled:
        return type(layer).forward(layer, x)
    alpha = surface.weight_of(len(x), depth)
    if alpha == 0.0:
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )
    if alpha == 1.0:
        if x.numel() == x.shape[1]:
            raise ShapeError(
                "Batch statistics need more than one value for each channel; found a batch of "
                f"shape {tuple(x.shape)}. Use a larger batch, or source or mixed statistics."
            )
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    return _mixed(layer, alpha, x)


def _mixed(layer: _BatchNorm, alpha: float, x: Tensor) -> Tensor:
    """Normalise with the mixture: one pass for the statistics, one for scale and shift."""
    source_mean, source_var = layer.running_mean, layer.running_var
    if source_mean is None or source_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    batch_mean, batch_var = _moments(precise)
    between = alpha * (1 - alpha) * (batch_mean - source_mean).square()
    mean = torch.lerp(source_mean.to(batch_mean), batch_mean, alpha)
    var = torch.lerp(source_var.to(batch_var), batch_var, alpha) + between
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    shift = -mean * scale
    if layer.bias is not None:
        shift = shift + layer.bias
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), precise, scale.view(channels)).to(x.dtype)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel.

    By the sum of squares, which is many times faster on a CPU than `torch.var_mean` and as good
    unless the mean is far larger than the spread; then that one is asked after all.
    """
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)  # (batch, channels, places)
    mean = flat.mean(2).mean(0)
    norms = torch.linalg.vector_norm(flat, dim=2)
    power = norms.square().sum(0) / (flat.shape[0] * flat.shape[2])
    var = power - mean.square()
    # An exported program cannot look at its numbers.
    if torch.compiler.is_exporting() or bool((var < CANCELLED * power).any()):
        var, mean = torch.var_mean(flat, dim=(0, 2), correction=0)
    return mean, var
