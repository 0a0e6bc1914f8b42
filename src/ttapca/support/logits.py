"""What logits say: probabilities and their entropy, after a check that they are logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ttapca.errors import LayerOutputError


def softmax_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each prediction, in nats.

    Args:
        logits: Shape (batch, classes), or (batch, classes, ...) for dense predictions.

    Returns:
        Shape (batch,) or (batch, ...); float32 at least.

    Raises:
        LayerOutputError: This is not a tensor with two classes or more.

    Example:
        >>> softmax_entropy(torch.zeros(1, 2)).tolist()  # log 2
        [0.6931471824645996]
    """
    log_probabilities = log_softmax(logits)
    return -(log_probabilities.exp() * log_probabilities).sum(1)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log probabilities of logits, shape (batch, classes, ...), in float32 at least.

    Raises:
        LayerOutputError: This is not a tensor with two classes or more.

    Example:
        >>> log_softmax(torch.zeros(1, 2)).exp().tolist()
        [[0.5, 0.5]]
    """
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        is_tensor = isinstance(logits, Tensor)
        found = f"shape {tuple(logits.shape)}" if is_tensor else f"a {type(logits).__name__}"
        raise LayerOutputError(
            "The model must return logits as one tensor of shape (batch, classes, ...); found "
            f"{found}. Say how to find them: "
            "`logits=lambda output: output.logits`."
        )
    if logits.shape[1] < 2:
        raise LayerOutputError(
            "A method that lowers entropy needs logits of two classes or more; the model returns "
            f"{logits.shape[1]}, and the softmax of one logit is always 1. Return two, whose "
            "softmax is a sigmoid: torch.cat([torch.zeros_like(z), z], 1). An adapter does so by "
            "itself; see `ttapca.support.outputs`."
        )
    precise = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(1, dtype=precise)
