"""A student that learns from a teacher, which follows it slowly: what `cotta` and `rotta` share."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Stepper
from ttapca.support.logits import log_softmax


class TaughtSteps(Stepper):
    """Gradient steps of a student, after each of which its teacher follows.

    The weights of the student are the parameters that are moved. Those of the teacher are kept as
    values, and put in their place whenever the teacher is asked.

    Args:
        teacher_momentum: How much of the teacher stays at each step (m): t <- m t + (1 - m) s.
        **stepping: See `Stepper`.

    Attributes:
        teacher: One tensor for each parameter of the student; None while they are the source's.
    """

    keeps: ClassVar[tuple[str, ...]] = ("teacher",)
    remembers_start = True

    def __init__(self, *, teacher_momentum: float, **stepping: Any) -> None:
        super().__init__(**stepping)
        self.teacher_momentum = teacher_momentum
        self.teacher: list[Tensor] | None = None

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

    Args:
        student: Logits, shape (batch, classes, ...).
        teacher: Logits of the same shape; no gradients pass through them.

    Returns:
        Shape (batch, ...).

    Example:
        >>> round(surprise_of(torch.zeros(1, 2), torch.tensor([[9.0, 0.0]])).item(), 4)  # log 2
        0.6931
    """
    guesses = log_softmax(student)
    wanted = teacher.detach().softmax(1, dtype=guesses.dtype)
    return -(wanted * guesses).sum(1)
