"""What moves an adapted parameter when there are no labels: pure functions of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ttapca.support.logits import log_softmax, softmax_entropy

Objective = Callable[[Tensor], Tensor]


def mean_entropy(logits: Tensor) -> Tensor:
    """Mean of `softmax_entropy` over the batch: the objective of TENT and of the paper.

    Example:
        >>> round(mean_entropy(torch.zeros(5, 10)).item(), 4)  # log 10
        2.3026
    """
    return softmax_entropy(logits).mean()


def class_marginal(logits: Tensor) -> Tensor:
    """Mean prediction of a batch, shape (classes,).

    Example:
        >>> class_marginal(torch.tensor([[0.0, 0.0], [0.0, 0.0]])).tolist()
        [0.5, 0.5]
    """
    probabilities = log_softmax(logits).exp()
    return probabilities.mean([d for d in range(logits.dim()) if d != 1])


def negative_entropy(distribution: Tensor) -> Tensor:
    """Sum of p log p: least for the uniform distribution, so that lowering it spreads predictions.

    Args:
        distribution: Shape (classes,).

    Example:
        >>> round(negative_entropy(torch.tensor([0.5, 0.5])).item(), 4)  # -log 2
        -0.6931
    """
    # The logarithm of a class that no sample has any probability for would spoil the gradient.
    positive = distribution.clamp(min=torch.finfo(distribution.dtype).tiny)
    return (positive * positive.log()).sum()


def information_maximisation(logits: Tensor) -> Tensor:
    """Mean entropy minus the entropy of the mean prediction: the objective of SHOT.

    Each prediction is to be certain, and all of them together diverse.

    Example:
        >>> round(information_maximisation(torch.tensor([[9.0, 0.0], [0.0, 9.0]])).item(), 2)
        -0.69
    """
    return mean_entropy(logits) + negative_entropy(class_marginal(logits))


def soft_likelihood_ratio(logits: Tensor, *, clip: float | None = None) -> Tensor:
    """Expected log ratio of all other classes to one: sum_c p_c log((1 - p_c) / p_c).

    Unlike the entropy it does not saturate: a certain prediction still has a gradient.

    Args:
        logits: Shape (batch, classes, ...).
        clip: Probabilities above this count as this, and have no gradient.

    Returns:
        Shape (batch,) or (batch, ...).

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
        # 1 - p loses all digits where p is near 1, as that of the first class may be alone.
        others = log_probabilities.exp().scatter(1, top, 0.0)
        rest = torch.log1p(-others).scatter(1, top, _log_rest(log_probabilities, top))
    return (log_probabilities.exp() * (rest - log_probabilities)).sum(1)


def hard_likelihood_ratio(logits: Tensor) -> Tensor:
    """Log ratio of all other classes to the predicted one: log((1 - p) / p).

    Args:
        logits: Shape (batch, classes, ...).

    Returns:
        Shape (batch,) or (batch, ...).

    Example:
        >>> hard_likelihood_ratio(torch.tensor([[50.0, 0.0]])).item()
        -50.0
    """
    log_probabilities = log_softmax(logits)
    top = log_probabilities.argmax(1, keepdim=True)
    return (_log_rest(log_probabilities, top) - log_probabilities.gather(1, top)).squeeze(1)


def _log_rest(log_probabilities: Tensor, top: Tensor) -> Tensor:
    """Logarithm of the probability of all classes but the first, to full precision."""
    return log_probabilities.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
