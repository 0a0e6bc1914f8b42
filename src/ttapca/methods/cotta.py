"""`cotta`: a student follows a slow teacher, and now and then remembers the source.

On each batch:

    target     y = teacher(x), or where the source is not confident the mean over views of x
    student    one step on - sum_c softmax(y)_c log softmax(student(x))_c
    teacher    t <- m t + (1 - m) s
    restore    each weight of the student returns to the source with probability p

and y is the prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Run, Stepper
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import all_parameters
from ttapca.methods.method import Assembly, Count, GradientMethod, Seed, Share, register
from ttapca.methods.temporary_values import with_values
from ttapca.methods.views import Jitter, check_images
from ttapca.support.logits import log_softmax

# The official limits; its 40 % of brightness are 0.8 spreads of a middling image.
STRONG = Jitter(
    degrees=15, shift=1 / 16, zoom=0.1, brightness=0.8, contrast=0.3, noise=0.02, flip=True
)


@register("cotta", paper="Wang et al. (CVPR 2022)")
@dataclass(frozen=True, kw_only=True)
class CoTTA(GradientMethod):
    """All weights, learned from a slow teacher; some return to the source.

    Attributes:
        logits: `before`: the target of the last step, as in the official code; `after`: what the
            moved teacher says of the batch itself.
        views: Over how many the teacher's prediction is averaged.
        flip: Whether half of them are mirrored; not for what means something else then, as digits.
        confidence_below: The teacher is averaged over views where the mean confidence of the source
            network is below this.
        teacher_momentum: How much of the teacher stays at each step (m).
        restored_share: Share of the student's weights that return to the source at each step (p).
        seed: Draws views, and which weights return.
    """

    views: Count = 32
    flip: bool = True
    confidence_below: Share = 0.92
    teacher_momentum: Share = 0.999
    restored_share: Share = 0.01
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """The teacher moves all weights of the student."""
        return self.assembly(Weights(all_parameters, "weights"), TeacherAndStudent(self))


class TeacherAndStudent(Stepper):
    """The surfaces hold the student; the teacher and the source are values kept here.

    Attributes:
        teacher: Its values, one tensor for each parameter of the student; None while they are the
            source's.
    """

    keeps = ("teacher",)
    remembers_start = True

    def __init__(self, options: CoTTA) -> None:
        super().__init__(**options.stepping(), seed=options.seed)
        self.views = options.views
        self.jitter = replace(STRONG, flip=options.flip)
        self.confidence_below = options.confidence_below
        self.teacher_momentum = options.teacher_momentum
        self.restored_share = options.restored_share
        self.teacher: list[Tensor] | None = None

    def __repr__(self) -> str:
        """One line for a person."""
        return f"{super().__repr__()}, views={self.views}"

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
                self.descent.parameters, self._teacher, functools.partial(forward, images)
            )

    @torch.no_grad()
    def _target(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """What the teacher says, of the images or on average of their views."""
        parameters = self.descent.parameters
        of_source = with_values(parameters, self.start, functools.partial(forward, images))
        if not of_source.softmax(1).amax(1).mean() < self.confidence_below:
            return with_values(parameters, self._teacher, functools.partial(forward, images))
        views = functools.partial(self._mean_over_views, images, forward)
        return with_values(parameters, self._teacher, views)

    def _mean_over_views(self, images: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        total = forward(self.jitter(images, self.generator))
        for _ in range(self.views - 1):
            total = total + forward(self.jitter(images, self.generator))
        return total / self.views

    @property
    def _teacher(self) -> list[Tensor]:
        """The teacher's values; at first they are the source's."""
        return self.start if self.teacher is None else self.teacher

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the teacher towards the student, then part of the student back to the source."""
        students, kept = self.descent.parameters, self.teacher_momentum
        self.teacher = [
            torch.add(kept * teacher, student, alpha=1 - kept)
            for teacher, student in zip(self._teacher, students, strict=True)
        ]
        for student, source in zip(students, self.start, strict=True):
            if self.restored_share:
                draws = torch.rand(student.shape, generator=self.generator)
                returns = (draws < self.restored_share).to(student.device)
                student.copy_(torch.where(returns, source, student))


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
