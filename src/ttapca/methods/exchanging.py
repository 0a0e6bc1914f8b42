"""Run the model with other values of its adapted parameters: a teacher's, the source's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def exchanged(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Let values take the place of the parameters' own, and give those back however it ends.

    Nothing is copied: parameter and value trade their memory. A gradient must be taken inside if
    the forward pass was run inside, outside if outside.

    Args:
        parameters: Adapted parameters.
        values: One for each, of the same shape; what is done to a parameter inside is done to its
            value.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> with exchanged([weight], [torch.tensor([5.0])]):
        ...     print(weight.item())
        5.0
        >>> weight.item()
        1.0
    """
    _trade(parameters, values)
    try:
        yield
    finally:
        _trade(parameters, values)


def _trade(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data, value.data = value.data, parameter.data


def copies_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies that gradients do not reach.

    Example:
        >>> copies_of([nn.Parameter(torch.ones(2))])
        [tensor([1., 1.])]
    """
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def put_back(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Set parameters to values, in place."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
