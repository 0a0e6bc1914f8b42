"""`slr+it`: likelihood ratios, diverse predictions, and a trainable input transformation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ttapca._checks import Number
from ttapca.adaptation.objectives import (
    class_marginal,
    hard_likelihood_ratio,
    negative_entropy,
    soft_likelihood_ratio,
)
from ttapca.adaptation.optimisation import GradientSteps, Logits
from ttapca.adaptation.surfaces import InputTransform, NormAffine
from ttapca.methods.method import (
    Assembly,
    Count,
    GradientMethod,
    NotNegative,
    Positive,
    Seed,
    register,
)

Likelihood = Literal["soft", "hard"]
BelowOne = Annotated[float, Number(0, below=1)]


@register("slr+it", paper="Mummadi et al. (2021, arXiv 2106.14999)")
@dataclass(frozen=True, kw_only=True)
class SLR(GradientMethod):
    """An input transformation, scale and shift, learned by likelihood ratios and diversity.

    Learning rate, weight and momentum are the paper's, as quoted by
    github.com/westend11/dsait4205-reproduction-g8.

    Attributes:
        likelihood: `soft` weighs every class by its probability, `hard` takes the predicted one.
        confidence_weight: Weight of the likelihood ratio (delta).
        marginal_momentum: Weight of the past in the running class marginal (kappa).
        channels: Of the images; by default what the model's first convolution takes.
        seed: Draws the weights of the input transformation.
    """

    lr: Positive = 6e-4
    logits: Logits = "after"
    likelihood: Likelihood = "soft"
    confidence_weight: NotNegative = 0.025
    marginal_momentum: BelowOne = 0.9
    channels: Count | None = None
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """The objective moves the transformation, scale and shift."""
        objective = DiverseLikelihood(
            self.likelihood, self.confidence_weight, self.marginal_momentum
        )
        mover = GradientSteps(objective, **self.stepping())
        transform = InputTransform(self.channels, seed=self.seed)
        made = self.assembly(NormAffine(), mover)
        # In front of what else is moved, behind the statistics.
        place = next(n for n, each in enumerate(made.surfaces) if isinstance(each, NormAffine))
        made.surfaces.insert(place, transform)
        return made


class DiverseLikelihood:
    """Negative entropy of the running class marginal, plus a weighted likelihood ratio.

    With p_t the running marginal and m_t the mean prediction of a batch, p_t = momentum p_(t-1) +
    (1 - momentum) m_t, with gradients through m_t alone. The running marginal starts at the first
    batch's own, so that its value is right from there on and its gradient has the same size at
    every batch.

    Args:
        likelihood: `soft` weighs every class by its probability, `hard` takes the predicted one.
        confidence: Weight of the likelihood ratio.
        momentum: Weight of the past in the running marginal.

    Example:
        >>> objective = DiverseLikelihood()
        >>> round(objective(torch.zeros(4, 2)).item(), 4)  # -log 2
        -0.6931
    """

    keeps = ("marginal",)

    def __init__(
        self, likelihood: Likelihood = "soft", confidence: float = 0.025, momentum: float = 0.9
    ) -> None:
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
