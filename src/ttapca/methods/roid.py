"""`roid`: weighted likelihood ratios, an ensemble with the source, and a corrected prior.

Marsden, Doebler and Yang, "Universal Test-time Adaptation through Weight Ensembling, Diversity
Weighting, and Prior Correction" (WACV 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

from ttapca.adaptation.objectives import class_marginal, soft_likelihood_ratio
from ttapca.adaptation.optimisation import GradientSteps, Run, adam
from ttapca.adaptation.surfaces import NormAffine
from ttapca.errors import LayerOutputError, OptionError, ShapeError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Stepping, Wishes, statistics_surface
from ttapca.methods.views import Jitter
from ttapca.support.logits import log_softmax
from ttapca.support.modules import map_first_tensor

# All are the official code's; the learning rate is its for CIFAR-10-C.
LEARNING_RATE = 1e-3
SOURCE_MOMENTUM = 0.99
# In place of the official chain of colour, affine and noise transformations.
VIEWS = Jitter(shift=1 / 16, brightness=0.4, contrast=0.3, flip=True)
TEMPERATURE = 1 / 3
MEAN_MOMENTUM = 0.9
LARGEST_PROBABILITY = 0.99


def _roid(
    wishes: Wishes,
    *,
    momentum: float = SOURCE_MOMENTUM,
    temperature: float = TEMPERATURE,
    consistency: bool = True,
    prior_correction: bool = True,
    seed: int = 0,
    statistics: Statistics = "batch",
    gain: AnyGain = "relu",
) -> Plan:
    mover = EnsembledSteps(
        momentum=momentum,
        temperature=temperature,
        views=VIEWS if consistency else None,
        seed=seed,
        prior_correction=prior_correction,
        # The official code returns the logits from before the update.
        stepping=wishes.steps_by(adam, lr=LEARNING_RATE, logits="before"),
    )
    below = wishes.filter_below(gain)
    surfaces = [*statistics_surface(statistics, below), NormAffine(), *below]
    return Plan(surfaces, mover)


class EnsembledSteps(GradientSteps):
    """Likelihood ratios of samples weighted by certainty and diversity, pulled to the source.

    With `prediction_weights` w_i, the loss of a batch of n is

        1/n sum_i w_i (SLR(x_i) + SCE(x_i, view of x_i))

    where SLR is the soft likelihood ratio and SCE the symmetric cross-entropy between the
    predictions for an image and for another view of it. After each step all that was moved becomes
    momentum times itself plus (1 - momentum) times where it started.

    Args:
        momentum: Weight of the adapted against the source weights.
        temperature: Of the samples' weights; small ones prefer few samples.
        views: Makes the views; without, there is no consistency term.
        seed: Of their draws.
        prior_correction: Whether predictions are weighted by the batch's own class marginal.
        stepping: How to step.

    Raises:
        OptionError: When an option makes no sense.
    """

    keeps = (*GradientSteps.keeps, "mean")
    remembers_start = True

    def __init__(
        self,
        *,
        momentum: float,
        temperature: float,
        views: Jitter | None,
        seed: int,
        prior_correction: bool,
        stepping: Stepping,
    ) -> None:
        clipped = functools.partial(soft_likelihood_ratio, clip=LARGEST_PROBABILITY)
        super().__init__(clipped, **stepping, seed=seed)
        if not 0.0 < momentum <= 1.0:
            raise OptionError(
                "`momentum`, the weight of the adapted weights in the ensemble with the source, is "
                f"above 0 and at most 1; found {momentum!r}."
            )
        if not 0.0 < temperature < float("inf"):
            raise OptionError(f"`temperature` is a finite number above 0; found {temperature!r}.")
        self.momentum = momentum
        self.temperature = temperature
        self.prior_correction = prior_correction
        self.mean: Tensor | None = None
        self._views = views
        self._next_mean: Tensor | None = None

    def reset(self) -> None:
        """Forget the optimiser's moments, the mean prediction and how far the draws went."""
        super().reset()
        self.mean = None

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """The weighted loss of a batch, with one more forward pass for the views."""
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise LayerOutputError(
                "Samples are weighted by one prediction each, so logits have the shape (batch, "
                f"classes); found {found}. Choose another method for dense predictions."
            )
        predictions = log_softmax(logits).detach().exp()  # (batch, classes)
        mean = predictions.new_full(predictions.shape[1:], 1 / predictions.shape[1])
        if self.mean is not None:
            mean = self.mean.to(predictions)
        self._next_mean = torch.lerp(predictions.mean(0), mean, MEAN_MOMENTUM)
        weights = prediction_weights(predictions, mean, self.temperature)
        each = self.objective(logits)
        if self._views is not None:
            args, kwargs = map_first_tensor(self._view, inputs, options)
            each = each + symmetric_cross_entropy(logits, run(*args, **kwargs))
        return (weights * each).mean()

    def _view(self, images: Tensor) -> Tensor:
        if self._views is None or images.dim() != 4:
            raise ShapeError(
                "Views are made of images of shape (batch, channels, height, width); found "
                f"{tuple(images.shape)}. Switch them off with `consistency=False`."
            )
        return self._views(images, self.generator)

    def moved(self) -> None:
        """Take the batch into the mean prediction, and pull the weights to the source."""
        self.mean = self._next_mean
        with torch.no_grad():
            for parameter, start in zip(self.descent.parameters, self.start, strict=True):
                parameter.lerp_(start.to(parameter), 1 - self.momentum)

    def output(self, logits: Tensor) -> Tensor:
        """The logits, whose softmax is the corrected prediction."""
        return corrected_by_prior(logits) if self.prior_correction else logits

    def tensors(self) -> list[Tensor]:
        """The optimiser's state, the source weights, the mean prediction."""
        mean = [] if self.mean is None else [self.mean]
        return [*super().tensors(), *mean]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert where the parameters started as well."""
        super().apply(fn)


def prediction_weights(predictions: Tensor, mean: Tensor, temperature: float) -> Tensor:
    """How much each sample counts: exp(diversity certainty / temperature), or nothing.

    Diversity is 1 - cos(prediction, mean prediction), certainty the negative entropy, each brought
    to [0, 1] over the batch (to 0 where all samples are equal, so that each then counts 1). Samples
    whose diversity is below the batch's mean count nothing.

    Args:
        predictions: Shape (batch, classes).
        mean: Running mean prediction, shape (classes,).
        temperature: Above 0.

    Returns:
        Shape (batch,).

    Example:
        >>> predictions = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> prediction_weights(predictions, torch.tensor([0.8, 0.2]), 1.0).tolist()
        [0.0, 1.0]
    """
    diversity = _to_unit_range(1 - F.cosine_similarity(mean.unsqueeze(0), predictions, dim=1))
    certainty = _to_unit_range(-torch.special.entr(predictions).sum(1))
    weights = torch.exp(diversity * certainty / temperature)
    return weights.masked_fill(diversity < diversity.mean(), 0.0)


def _to_unit_range(values: Tensor) -> Tensor:
    low, high = values.aminmax()
    spread = high - low
    # Equal samples have no spread to divide by; NaN stays NaN, so that the step is skipped.
    return (values - low) / torch.where(spread == 0, torch.ones_like(spread), spread)


def symmetric_cross_entropy(logits: Tensor, others: Tensor) -> Tensor:
    """Mean of the two cross-entropies between two predictions for the same samples.

    Args:
        logits: Shape (batch, classes).
        others: Likewise.

    Returns:
        Shape (batch,).

    Example:
        >>> symmetric_cross_entropy(torch.zeros(1, 2), torch.zeros(1, 2)).item()  # log 2
        0.6931471824645996
    """
    log_p, log_q = log_softmax(logits), log_softmax(others)
    return -(log_p.exp() * log_q + log_q.exp() * log_p).sum(1) / 2


def corrected_by_prior(logits: Tensor) -> Tensor:
    """Weight predictions by the class marginal of their batch, smoothed towards uniform.

    Args:
        logits: Shape (batch, classes).

    Returns:
        Logits whose softmax is proportional to prediction times smoothed marginal.

    Example:
        >>> corrected_by_prior(torch.zeros(3, 4)).softmax(1)[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    batch, classes = logits.shape
    marginal = class_marginal(logits)
    # The fewer samples speak for a marginal, the nearer to uniform it is taken.
    smoothing = max(1 / batch, 1 / classes) / marginal.max()
    smoothed = (marginal + smoothing) / (1 + smoothing * classes)
    return logits + smoothed.log().to(logits.dtype)


ROID = Recipe(
    "scale and shift of the normalisation layers, learned by weighted likelihood ratios and pulled "
    "to the source",
    _roid,
)
