"""Run the model with other values of its adapted parameters: a teacher's, the source's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ttapca.support.wrapping import Result, surely


def with_values(
    parameters: Sequence[nn.Parameter], values: Sequence[Tensor], run: Callable[[], Result]
) -> Result:
    """Run something while values take the place of the parameters' own.

    Nothing is copied: a parameter uses the memory of its value meanwhile. The parameters have their
    own values again however it ends, also by an interrupt. A gradient must be taken inside if the
    forward pass was run inside, outside if outside.

    Args:
        parameters: Adapted parameters.
        values: One for each, of the same shape.
        run: What to run.

    Returns:
        What it returned.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> with_values([weight], [torch.tensor([5.0])], weight.item)
        5.0
        >>> weight.item()
        1.0
    """
    own = [parameter.data for parameter in parameters]

    def exchanged() -> Result:
        _set(parameters, [value.data for value in values])
        return run()

    return surely(exchanged, then=functools.partial(_set, parameters, own))


def _set(parameters: Sequence[nn.Parameter], data: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, data, strict=True):
        parameter.data = value


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
