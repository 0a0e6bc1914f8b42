"""What moves an adapted parameter when there are no labels: pure functions of the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ttapca.errors import LayerOutputError

Objective = Callable[[Tensor], Tensor]


def softmax_entropy(logits: Tensor) -> Tensor:
    """Entropy of each prediction, in nats.

    Args:
        logits: Shape (batch, classes), or (batch, classes, ...) for dense predictions.

    Returns:
        Shape (batch,) or (batch, ...); float32 at least.

    Raises:
        LayerOutputError: When this is not a tensor with a class dimension.

    Example:
        >>> softmax_entropy(torch.zeros(1, 2)).tolist()  # log 2
        [0.6931471824645996]
    """
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        found = (
            f"shape {tuple(logits.shape)}"
            if isinstance(logits, Tensor)
            else f"a {type(logits).__name__}"
        )
        raise LayerOutputError(
            "The model must return logits as one tensor of shape (batch, classes, ...); found "
            f"{found}. Wrap the model in a module that returns its logits."
        )
    precise = torch.promote_types(logits.dtype, torch.float32)
    log_probabilities = logits.log_softmax(1, dtype=precise)
    return -(log_probabilities.exp() * log_probabilities).sum(1)


def mean_entropy(logits: Tensor) -> Tensor:
    """Mean of `softmax_entropy` over the batch: the objective of TENT and of the paper.

    Example:
        >>> round(mean_entropy(torch.zeros(5, 10)).item(), 4)  # log 10
        2.3026
    """
    return softmax_entropy(logits).mean()
