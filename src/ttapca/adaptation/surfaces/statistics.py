"""BatchNorm as a surface, with statistics of the source, the batch, or both."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca._checks import Maybe, Number, check_option
from ttapca.adaptation.surfaces.base import Surface, refuse_replaced
from ttapca.errors import AttachError, ShapeError
from ttapca.spectral.stream import ScaleGivenBack, Stream
from ttapca.support import norm_layers as norms
from ttapca.support.wrapping import Wrapper


class BatchNormStatistics(Surface):
    """BatchNorm with statistics of the source, of the test batch, or of a mixture of both.

    The mixture is that of two populations, the batch with weight alpha and the source with
    1 - alpha, so its variance includes the distance between their means:

        mean = alpha m_batch + (1 - alpha) m_source
        var  = alpha v_batch + (1 - alpha) v_source + alpha (1 - alpha) (m_batch - m_source)^2

    Running statistics are read and never written. Gradients pass through those of the batch.

    Args:
        alpha: Weight of the batch, from 0 (source) to 1 (batch). A pair is the weight in the first
            and in the last layer; in between it changes evenly.
        prior: How many samples the source statistics count for. The weight of a batch of n is then
            n / (n + prior) times `alpha`, after Schneider et al. (2020), whose variance leaves out
            the distance between the means.
        required: Whether a model without BatchNorm is an error.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(1, affine=False)).eval()
        >>> BatchNormStatistics(alpha=1.0).attach(model)
        >>> model(torch.tensor([[5.0], [7.0]])).flatten().round().tolist()
        [-1.0, 1.0]
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
        layers = list(norms.with_running_statistics(model).values())
        if self._required and not layers:
            raise AttachError(
                "Batch statistics need BatchNorm layers with running statistics; the model has "
                "none. Choose a method that does without them."
            )
        refuse_replaced(layers)
        self.layers = []
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


class BatchNormLayer(Wrapper):
    """Runs one layer with the statistics of a surface; `weight` is that of a large batch."""

    replaces = True

    def __init__(self, surface: BatchNormStatistics, layer: _BatchNorm, weight: float) -> None:
        self.surface, self.kind, self.weight = surface, norms.BatchNormKind(layer), weight

    def __call__(self, forward: norms.Forward, /, input: Tensor) -> Any:
        """Normalise a batch; the argument has the name that torch's own layers give it."""
        if not self.surface.enabled:
            return forward(input)
        alpha, kind, layer = self._weight_of(input), self.kind, self.kind.layer
        if alpha == 0.0:
            return kind.plain(input, forward)
        # Of a large batch, our own moments are quicker than those of torch.
        quick = input.numel() >= norms.LARGE and norms.can_be_quick(input)
        if alpha == 1.0 and kind.is_plain and not quick:
            return F.batch_norm(
                input, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
            )
        values = kind.values(input)
        moments = norms.mixed_moments(
            alpha, norms.channel_moments(values), norms.running_statistics(layer)
        )
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
