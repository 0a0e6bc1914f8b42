"""`roid`: weighted likelihood ratios, an ensemble with the source, and a corrected prior."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca._checks import Number, Positive, Seed
from ttapca.adaptation.optimisation import GradientSteps, Run, class_marginal, log_predictions
from ttapca.adaptation.surfaces import NormAffine
from ttapca.errors import ShapeError
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.methods.slr import soft_likelihood_ratio
from ttapca.methods.views import Jitter
from ttapca.support.inputs import map_first_tensor
from ttapca.support.outputs import log_softmax

# In place of the official chain of colour, affine and noise transformations.
VIEWS = Jitter(shift=1 / 16, brightness=0.4, contrast=0.3, flip=True)
# As in the official code.
MEAN_MOMENTUM = 0.9  # of the running mean prediction
LARGEST_PROBABILITY = 0.99  # where likelihood ratios are clipped

PriorCorrection = Literal["logits", "probabilities", "none"]


@register("roid", paper="Marsden et al. (WACV 2024)")
@dataclass(frozen=True, kw_only=True)
class ROID(GradientMethod):
    """Scale and shift, learned by weighted likelihood ratios and pulled to the source.

    With `prediction_weights` w_i, the loss of a batch of n samples is

        1/n sum_i w_i (SLR(y_i) + SCE(y_i, y of another view of x_i))
        SLR(y) = - sum_c y_c log(y_c / (1 - y_c))

    with SCE the symmetric cross-entropy between two predictions. After each step the weights
    become m theta + (1 - m) theta_0, with theta_0 the source's, and predictions y are corrected by
    the smoothed class marginal p of their batch. The paper: https://arxiv.org/abs/2306.00650.

    All defaults are those of the official code, the learning rate for CIFAR-10-C. It returns the
    logits from before the update, multiplied by p: on streams that are sorted by class this is far
    stronger than the weighted probabilities y_c p_c / sum_k y_k p_k.

    Attributes:
        source_momentum: Share of the adapted weights after each step (m).
        temperature: Temperature of the samples' weights; low ones prefer few samples.
        consistency: Whether an image and another view of it are to be predicted alike.
        class_prior_correction: `logits` are multiplied by the class marginal of their batch, as in
            the official code, or `probabilities`, or `none`.
        seed: Draws the views; 0 by default.
    """

    outputs = CLASSES

    source_momentum: Annotated[float, Number(above=0, high=1)] = 0.99
    temperature: Positive = 1 / 3
    consistency: bool = True
    class_prior_correction: PriorCorrection = "logits"
    seed: Seed | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not self.consistency:
            self.refuse("seed", "without `consistency` no views are drawn")

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by weighted samples."""
        return self.assembly(NormAffine(), predictor=EnsembledSteps(self))


class EnsembledSteps(GradientSteps):
    """Lowers the weighted loss of `ROID`, and pulls the weights to the source."""

    keeps = ("mean",)
    remembers_start = True

    def __init__(self, options: ROID) -> None:
        clipped = functools.partial(soft_likelihood_ratio, clip=LARGEST_PROBABILITY)
        super().__init__(clipped, reads="classes", **options.stepping(), seed=options.seed or 0)
        self.options = options
        self.mean: Tensor | None = None
        self._next_mean: Tensor | None = None

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return the weighted loss of a batch, with one more forward pass for the views."""
        predictions = log_predictions(logits).detach().exp()  # (batch, classes)
        mean = predictions.new_full(predictions.shape[1:], 1 / predictions.shape[1])
        if self.mean is not None:
            mean = self.mean.to(predictions)
        self._next_mean = torch.lerp(predictions.mean(0), mean, MEAN_MOMENTUM)
        weights = prediction_weights(predictions, mean, self.options.temperature)
        each = self.objective(logits)
        if self.options.consistency:
            args, kwargs = map_first_tensor(self._view, inputs, options)
            each = each + _symmetric_cross_entropy(logits, run(*args, **kwargs))
        return (weights * each).mean()

    def _view(self, images: Tensor) -> Tensor:
        if images.dim() != 4:
            raise ShapeError(
                "Views are made of images of shape (batch, channels, height, width); found "
                f"{tuple(images.shape)}. Switch them off with `consistency=False`."
            )
        return VIEWS(images, self.generator)

    def moved(self) -> None:
        """Update the mean prediction with the batch, and pull the weights to the source."""
        self.mean = self._next_mean
        with torch.no_grad():
            for parameter, start in zip(self.descent.parameters, self.start, strict=True):
                parameter.lerp_(start.to(parameter), 1 - self.options.source_momentum)

    def output(self, logits: Tensor) -> Tensor:
        """Return logits whose softmax is the corrected prediction."""
        correction = self.options.class_prior_correction
        if correction == "none":
            return logits
        prior = smoothed_prior(logits)
        return logits * prior if correction == "logits" else logits + prior.log()


def prediction_weights(predictions: Tensor, mean: Tensor, temperature: float) -> Tensor:
    """Return how much each sample counts, (batch,): exp(diversity certainty / temperature)."""
    # Diversity is 1 - cos(prediction, mean prediction), certainty the negative entropy, each scaled
    # to [0, 1] over the batch (to 0 if all samples are equal, so that each then counts 1). Samples
    # whose diversity is below the batch's mean count 0.
    diversity = _to_unit_range(1 - F.cosine_similarity(mean.unsqueeze(0), predictions, dim=1))
    certainty = _to_unit_range(-torch.special.entr(predictions).sum(1))
    weights = torch.exp(diversity * certainty / temperature)
    return weights.masked_fill(diversity < diversity.mean(), 0.0)


def _to_unit_range(values: Tensor) -> Tensor:
    low, high = values.aminmax()
    spread = high - low
    # Equal samples have no spread to divide by; NaN stays NaN, so that the step is skipped.
    return (values - low) / torch.where(spread == 0, torch.ones_like(spread), spread)


def _symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Return the mean of both cross-entropies between two predictions of the same samples."""
    log_p, log_q = log_softmax(logits), log_softmax(others)
    return -(log_p.exp() * log_q + log_q.exp() * log_p).sum(1) / 2


def smoothed_prior(logits: Tensor) -> Tensor:
    """Return the class marginal of a batch, smoothed towards uniform; shape (classes,)."""
    batch, classes = logits.shape
    marginal = class_marginal(logits)
    # The fewer samples a marginal rests on, the more it is smoothed.
    smoothing = max(1 / batch, 1 / classes) / marginal.max()
    return ((marginal + smoothing) / (1 + smoothing * classes)).to(logits.dtype)
