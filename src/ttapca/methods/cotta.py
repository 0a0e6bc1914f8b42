"""`cotta`: a student follows a slow teacher, and now and then remembers the source.

Wang et al., "Continual Test-Time Domain Adaptation", CVPR 2022. On each batch:

    target     y = teacher(x), or where the source is not confident the mean over views of x
    student    one step on - sum_c softmax(y)_c log softmax(student(x))_c
    teacher    t <- m t + (1 - m) s
    restore    each weight of the student returns to the source with probability p

and y is the prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.optimisation import (
    DEFAULT_LEARNING_RATE,
    Logits,
    OptimizerFactory,
    Run,
    Stepper,
    adam,
)
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import all_parameters
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Wishes, statistics_surface
from ttapca.methods.temporary_values import copies_of, with_values
from ttapca.methods.views import Jitter, check_count, check_images
from ttapca.support.logits import log_softmax

# The official limits; its 40 % of brightness are 0.8 spreads of a middling image.
STRONG = Jitter(
    degrees=15, shift=1 / 16, zoom=0.1, brightness=0.8, contrast=0.3, noise=0.02, flip=True
)


class TeacherAndStudent(Stepper):
    """The surfaces hold the student; the teacher and the source are values kept here.

    Args:
        optimizer: Makes the student's optimiser; Adam by default.
        steps: Steps on each batch.
        logits: `before`: the target of the last step, as in the official code; `after`: what the
            moved teacher says of the batch itself.
        views: Over how many the teacher's prediction is averaged.
        flip: Whether half of them are mirrored; not for what means something else then, as digits.
        threshold: Mean confidence of the source below which it is.
        momentum: m, how much of the teacher stays at each step.
        restore: p, the part of the student's weights that returns to the source at each step.
        seed: Of views and restoring.

    Attributes:
        teacher: Its values, one tensor for each parameter of the student.
    """

    keeps = (*Stepper.keeps, "teacher")
    remembers_start = True

    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        *,
        steps: int = 1,
        logits: Logits = "before",
        views: int = 32,
        flip: bool = True,
        threshold: float = 0.92,
        momentum: float = 0.999,
        restore: float = 0.01,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer=optimizer, steps=steps, logits=logits, seed=seed)
        parts = (("threshold", threshold), ("momentum", momentum), ("restore", restore))
        for name, value in parts:
            if not 0 <= value <= 1:
                raise OptionError(f"`{name}` is between 0 and 1; found {value!r}.")
        self.views = check_count("views", views)
        self.jitter = replace(STRONG, flip=flip)
        self.threshold = threshold
        self.momentum = momentum
        self.restore = restore
        self.teacher: list[Tensor] = []

    def __repr__(self) -> str:
        """One line for a person."""
        return f"{super().__repr__()}, views={self.views}"

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Take the parameters for the student; teacher and source begin as the same."""
        super().bind(model, parameters)
        self.teacher = copies_of(parameters)

    def reset(self) -> None:
        """Begin again: the teacher is the source, the optimiser fresh, the draws the same."""
        super().reset()
        self.teacher = copies_of(self.start)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Ask the teacher, and let the student learn from it.

        Args:
            run: Runs the model.
            *inputs: Images, shape (batch, channels, height, width); what follows is given to the
                model with each view.
            **options: Likewise.

        Returns:
            The teacher's logits, shape (batch, classes, ...).
        """
        images, further = check_images("cotta", inputs)

        def forward(views: Tensor) -> Tensor:
            return run(views, *further, **options)

        for _ in range(self.steps):
            target = self._target(images, forward)
            gradients = self.descent.gradients(consistency(forward(images), target))
            if gradients is None:
                self.skipped += 1
                return target
            self.descent.move(gradients)
            self.updates += 1
            self._follow()
        if self.logits == "before":
            return target
        with torch.no_grad():
            return with_values(
                self.descent.parameters, self.teacher, functools.partial(forward, images)
            )

    @torch.no_grad()
    def _target(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """What the teacher says, of the images or on average of their views."""
        parameters = self.descent.parameters
        of_source = with_values(parameters, self.start, functools.partial(forward, images))
        if not of_source.softmax(1).amax(1).mean() < self.threshold:
            return with_values(parameters, self.teacher, functools.partial(forward, images))
        views = functools.partial(self._mean_over_views, images, forward)
        return with_values(parameters, self.teacher, views)

    def _mean_over_views(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        total = forward(self.jitter(images, self.generator))
        for _ in range(self.views - 1):
            total = total + forward(self.jitter(images, self.generator))
        return total / self.views

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the teacher towards the student, then part of the student back to the source."""
        students = self.descent.parameters
        for teacher, student, source in zip(self.teacher, students, self.start, strict=True):
            teacher.mul_(self.momentum).add_(student, alpha=1 - self.momentum)
            if self.restore:
                draws = torch.rand(student.shape, generator=self.generator)
                returns = (draws < self.restore).to(student.device)
                student.copy_(torch.where(returns, source, student))

    def tensors(self) -> list[Tensor]:
        """The optimiser's state, the source and the teacher."""
        return [*super().tensors(), *self.teacher]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the optimiser's state, the teacher and the source."""
        super().apply(fn)
        self.teacher = [fn(value) for value in self.teacher]


def consistency(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of the student to the teacher.

    Args:
        student: Logits, shape (batch, classes, ...).
        teacher: Likewise; no gradient reaches it.

    Returns:
        A number.

    Example:
        >>> round(consistency(torch.zeros(3, 2), torch.randn(3, 2)).item(), 4)  # log 2
        0.6931
    """
    guesses = log_softmax(student)
    wanted = teacher.detach().softmax(1, dtype=guesses.dtype)
    return -(wanted * guesses).sum(1).mean()


def _cotta(
    wishes: Wishes,
    *,
    views: int = 32,
    flip: bool = True,
    threshold: float = 0.92,
    momentum: float = 0.999,
    restore: float = 0.01,
    seed: int = 0,
    statistics: Statistics = "batch",
    gain: AnyGain = "relu",
) -> Plan:
    mover = TeacherAndStudent(
        **wishes.steps_by(adam, lr=DEFAULT_LEARNING_RATE, logits="before"),
        views=views,
        flip=flip,
        threshold=threshold,
        momentum=momentum,
        restore=restore,
        seed=seed,
    )
    weights = Weights(all_parameters, "weights")
    below = wishes.filter_below(gain)
    return Plan([*statistics_surface(statistics, below), weights, *below], mover)


COTTA = Recipe("all weights, learned from a slow teacher; some return to the source", _cotta)
