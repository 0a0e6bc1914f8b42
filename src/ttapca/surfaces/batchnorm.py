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

# From so many numbers on, `quick_moments` is quicker than torch's own statistics.
LARGE = 2**18

# Where the mean square is more than this many variances, their difference loses more than two of
# the seven digits of float32.
FAR_FROM_ZERO = 64.0


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
    if alpha == 1.0 and x.numel() == x.shape[1]:
        raise ShapeError(
            "Batch statistics need more than one value for each channel; found a batch of "
            f"shape {tuple(x.shape)}. Use a larger batch, or source or mixed statistics."
        )
    quick = _can_be_quick(x)
    if alpha == 1.0 and not quick:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, var = quick_moments(precise) if quick else _moments(precise)
    mean, var = _mixture(layer, alpha, mean, var)
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    shift = -mean * scale
    if layer.bias is not None:
        shift = shift + layer.bias
    channels = (1, -1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(channels), precise, scale.view(channels)).to(x.dtype)


def _can_be_quick(x: Tensor) -> bool:
    """Whether `quick_moments` may be used, and is worth it."""
    large = x.numel() >= max(LARGE, 2 * x.shape[1])
    plain = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return large and plain and x.device.type == "cpu"


def _mixture(
    layer: _BatchNorm, alpha: float, batch_mean: Tensor, batch_var: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the two populations together."""
    source_mean, source_var = layer.running_mean, layer.running_var
    if source_mean is None or source_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    between = alpha * (1 - alpha) * (batch_mean - source_mean).square()
    mean = torch.lerp(source_mean.to(batch_mean), batch_mean, alpha)
    return mean, torch.lerp(source_var.to(batch_var), batch_var, alpha) + between


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel, with gradients."""
    dimensions = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x, dim=dimensions, correction=0)
    return mean, var


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
