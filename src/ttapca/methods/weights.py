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
    """Return what `run` returns while the parameters have other values."""
    # Nothing is copied, and an interrupt changes nothing. Take a gradient inside if the forward
    # pass was run inside, and outside if it was run outside.
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
    """Steps of a student, whose weights are moved; its teacher follows: t <- m t + (1 - m) s."""

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
    """Return the cross-entropy of each prediction of the student to the teacher's, (batch, ...)."""
    guesses = log_softmax(student)
    wanted = teacher.detach().softmax(1, dtype=guesses.dtype)
    return -(wanted * guesses).sum(1)
