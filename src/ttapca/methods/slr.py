"""`slr+it`: likelihood ratios, diverse predictions, and a trainable input transformation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ttapca._checks import Number
from ttapca.adaptation.optimisation import (
    GradientSteps,
    Logits,
    class_marginal,
    negative_entropy,
)
from ttapca.adaptation.surfaces import InputTransform, NormAffine
from ttapca.methods.method import (
    CLASSES,
    Assembly,
    Count,
    GradientMethod,
    NotNegative,
    Positive,
    Seed,
    register,
)
from ttapca.support.outputs import log_softmax

Likelihood = Literal["soft", "hard"]
BelowOne = Annotated[float, Number(0, below=1)]


@register("slr+it", paper="Mummadi et al. (2021, arXiv 2106.14999)")
@dataclass(frozen=True, kw_only=True)
class SLR(GradientMethod):
    """An input transformation, scale and shift, learned by likelihood ratios and diversity.

    Learning rate, weight and momentum are those of the paper, as quoted by
    github.com/westend11/dsait4205-reproduction-g8.

    Attributes:
        likelihood: `soft` weighs every class by its probability, `hard` takes the predicted one.
        confidence_weight: Weight of the likelihood ratio (delta).
        marginal_momentum: Weight of the past in the running class marginal (kappa).
        channels: Number of channels of the images; by default those of the first convolution.
        seed: Draws the weights of the input transformation.
    """

    outputs = CLASSES

    lr: Positive = 6e-4
    logits: Logits = "after"
    likelihood: Likelihood = "soft"
    confidence_weight: NotNegative = 0.025
    marginal_momentum: BelowOne = 0.9
    channels: Count | None = None
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """Return the transformation, scale and shift, moved by the objective."""
        objective = DiverseLikelihood(
            self.likelihood, self.confidence_weight, self.marginal_momentum
        )
        transform = InputTransform(self.channels, seed=self.seed)
        predictor = GradientSteps(objective, reads="classes", **self.stepping())
        return self.assembly(transform, NormAffine(), predictor=predictor)


class DiverseLikelihood:
    """Negative entropy of the running class marginal, plus a weighted likelihood ratio.

    The running marginal is p_t = momentum p_(t-1) + (1 - momentum) m_t, with m_t the mean
    prediction of a batch; gradients pass through m_t alone. It starts at the first batch's mean
    prediction, so that its gradient has the same size at every batch.

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
        self.ratio = soft_likelihood_ratio if likelihood == "soft" else hard_likelihood_ratio
        self.confidence = confidence
        self.momentum = momentum
        self.marginal: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the objective on one batch, and update the running marginal."""
        batch = class_marginal(logits)  # (classes,)
        past = batch.detach() if self.marginal is None else self.marginal.to(batch)
        running = self.momentum * past + (1 - self.momentum) * batch
        # The step on a batch that is not finite is skipped, and must not spoil the past either.
        if bool(torch.isfinite(running).all()):
            self.marginal = running.detach()
        return negative_entropy(running) + self.confidence * self.ratio(logits).mean()


def soft_likelihood_ratio(logits: Tensor, *, clip: float | None = None) -> Tensor:
    """Return the expected log ratio of all other classes to one: sum_c p_c log((1 - p_c) / p_c).

    Unlike the entropy it does not saturate: a certain prediction still has a gradient.

    Args:
        logits: Shape (batch, classes, ...).
        clip: Probabilities above this count as this, and have no gradient.

    Example:
        >>> soft_likelihood_ratio(torch.zeros(1, 3)).item()  # log 2
        0.6931471824645996
    """
    log_probabilities = log_softmax(logits)
    if clip is not None:
        log_probabilities = log_probabilities.clamp(max=math.log(clip))
        rest = torch.log1p(-log_probabilities.exp())
    else:
        top = log_probabilities.argmax(1, keepdim=True)
        # 1 - p loses all digits where p is near 1, which only the first class can be.
        others = log_probabilities.exp().scatter(1, top, 0.0)
        rest = torch.log1p(-others).scatter(1, top, _log_rest(log_probabilities, top))
    return (log_probabilities.exp() * (rest - log_probabilities)).sum(1)


def hard_likelihood_ratio(logits: Tensor) -> Tensor:
    """Return the log ratio of all other classes to the predicted one: log((1 - p) / p).

    Example:
        >>> hard_likelihood_ratio(torch.tensor([[50.0, 0.0]])).item()
        -50.0
    """
    log_probabilities = log_softmax(logits)
    top = log_probabilities.argmax(1, keepdim=True)
    return (_log_rest(log_probabilities, top) - log_probabilities.gather(1, top)).squeeze(1)


def _log_rest(log_probabilities: Tensor, top: Tensor) -> Tensor:
    """Return the log probability of all classes but the predicted one, to full precision."""
    return log_probabilities.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
