"""Other values of the adapted weights for a while: of a teacher, of a probe, of the source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ttapca.adaptation.optimisation import Stepper
from ttapca.spectral.stream import set_values
from ttapca.support.outputs import log_softmax
from ttapca.support.wrapping import Result, surely


def with_values(
    parameters: Sequence[nn.Parameter], values: Sequence[Tensor], run: Callable[[], Result]
) -> Result:
    """Return what `run` returns while the parameters have other values.

    Nothing is copied: a parameter uses the memory of its value meanwhile. The parameters have their
    own values again however it ends, also by an interrupt. Take a gradient inside if the forward
    pass was run inside, and outside if it was run outside.

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


def put_back(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Set parameters to copies of values; their old tensors are not written into."""
    set_values(parameters, [value.clone() for value in values])


class TaughtSteps(Stepper):
    """Gradient steps of a student, after each of which its teacher follows: t <- m t + (1 - m) s.

    The weights of the student are the parameters that are moved. Those of the teacher are kept as
    values, one for each of them, and put in their place whenever the teacher is asked.
    """

    keeps: ClassVar[tuple[str, ...]] = ("teacher",)
    remembers_start = True

    def __init__(self, *, teacher_momentum: float, **stepping: Any) -> None:
        super().__init__(**stepping)
        self.teacher_momentum = teacher_momentum
        self.teacher: list[Tensor] | None = None  # None while they are the source's

    @property
    def teacher_weights(self) -> list[Tensor]:
        """One tensor for each parameter of the student."""
        return self.start if self.teacher is None else self.teacher

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher towards the student."""
        kept = self.teacher_momentum
        self.teacher = [
            torch.add(kept * teacher, student, alpha=1 - kept)
            for teacher, student in zip(self.teacher_weights, self.descent.parameters, strict=True)
        ]


def surprise_of(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the cross-entropy of each prediction of the student to that of the teacher.

    Of logits of shape (batch, classes, ...) become values of shape (batch, ...). No gradients pass
    through the teacher's.

    Example:
        >>> round(surprise_of(torch.zeros(1, 2), torch.tensor([[9.0, 0.0]])).item(), 4)  # log 2
        0.6931
    """
    guesses = log_softmax(student)
    wanted = teacher.detach().softmax(1, dtype=guesses.dtype)
    return -(wanted * guesses).sum(1)
