"""`slr+it`: likelihood ratios, diverse predictions, and a trainable input transformation.

Mummadi et al., "Test-Time Adaptation to Distribution Shift by Confidence Maximization and Input
Transformation" (2021, arXiv 2106.14999).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ttapca.adaptation.objectives import (
    class_marginal,
    hard_likelihood_ratio,
    negative_entropy,
    soft_likelihood_ratio,
)
from ttapca.adaptation.surfaces import InputTransform, NormAffine
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Wishes, statistics_surface

Likelihood = Literal["soft", "hard"]

# The values of the paper, as quoted by github.com/westend11/dsait4205-reproduction-g8.
LEARNING_RATE = 6e-4
CONFIDENCE_WEIGHT = 0.025
MARGINAL_MOMENTUM = 0.9


def _slr(
    wishes: Wishes,
    *,
    likelihood: Likelihood = "soft",
    confidence: float = CONFIDENCE_WEIGHT,
    momentum: float = MARGINAL_MOMENTUM,
    channels: int | None = None,
    seed: int = 0,
    statistics: Statistics = "batch",
    gain: AnyGain = "relu",
) -> Plan:
    objective = DiverseLikelihood(likelihood, confidence=confidence, momentum=momentum)
    below = wishes.filter_below(gain)
    surfaces = [
        *statistics_surface(statistics, below),
        InputTransform(channels, seed=seed),
        NormAffine(),
        *below,
    ]
    return Plan(surfaces, wishes.descent(objective, lr=LEARNING_RATE))


class DiverseLikelihood:
    """Negative entropy of the running class marginal, plus a weighted likelihood ratio.

    With p_t the running marginal and m_t the mean prediction of a batch, p_t = momentum p_(t-1) +
    (1 - momentum) m_t, with gradients through m_t alone. The running marginal starts at the first
    batch's own, so that its value is right from there on and its gradient has the same size at
    every batch.

    Args:
        likelihood: `soft` weighs every class by its probability, `hard` takes the predicted one.
        confidence: Weight of the likelihood ratio (delta).
        momentum: Weight of the past in the running marginal (kappa).

    Raises:
        OptionError: When an option makes no sense.

    Example:
        >>> objective = DiverseLikelihood()
        >>> round(objective(torch.zeros(4, 2)).item(), 4)  # -log 2
        -0.6931
    """

    keeps = ("marginal",)

    def __init__(
        self,
        likelihood: Likelihood = "soft",
        *,
        confidence: float = CONFIDENCE_WEIGHT,
        momentum: float = MARGINAL_MOMENTUM,
    ) -> None:
        if likelihood not in get_args(Likelihood):
            raise OptionError(f"`likelihood` is one of soft, hard; found {likelihood!r}.")
        if not 0.0 <= confidence < float("inf"):
            raise OptionError(
                "`confidence`, the weight of the likelihood ratio, is finite and not below 0; "
                f"found {confidence!r}."
            )
        if not 0.0 <= momentum < 1.0:
            raise OptionError(
                "`momentum`, the weight of the past, is at least 0 and below 1; found "
                f"{momentum!r}."
            )
        self.likelihood: Likelihood = likelihood
        self.confidence = confidence
        self.momentum = momentum
        self.marginal: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The objective on one batch, which the running marginal takes in.

        Args:
            logits: Shape (batch, classes, ...).
        """
        ratio = soft_likelihood_ratio if self.likelihood == "soft" else hard_likelihood_ratio
        batch = class_marginal(logits)  # (classes,)
        past = batch.detach() if self.marginal is None else self.marginal.to(batch)
        running = self.momentum * past + (1 - self.momentum) * batch
        # The step on a batch that is not finite is skipped; the past must not be spoiled either.
        if bool(torch.isfinite(running).all()):
            self.marginal = running.detach()
        return negative_entropy(running) + self.confidence * ratio(logits).mean()

    def reset(self) -> None:
        """Forget the running marginal."""
        self.marginal = None


SLR_IT = Recipe(
    "an input transformation, and scale and shift of the normalisation layers, learned by "
    "likelihood ratios and diversity",
    _slr,
)
