"""Run the model with other values of its adapted parameters: a teacher's, the source's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ttapca.spectral.stream import set_values
from ttapca.support.wrapping import Result, surely


def with_values(
    parameters: Sequence[nn.Parameter], values: Sequence[Tensor], run: Callable[[], Result]
) -> Result:
    """Run something while the parameters have other values, and return what it returned.

    Nothing is copied: a parameter uses the memory of its value meanwhile. The parameters have their
    own values again however it ends, also by an interrupt. Take a gradient inside if the forward
    pass was run inside, and outside if it was run outside.

    Example:
        >>> import torch
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


def put_back(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Set parameters to copies of values; what they had before is not written into."""
    set_values(parameters, [value.clone() for value in values])
