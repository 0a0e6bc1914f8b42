"""`cotta`: a student learns from a slow teacher, and is partly restored to the source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import Count, Seed, Share
from ttapca.adaptation.optimisation import Run
from ttapca.adaptation.surfaces.trainable import Weights, all_parameters
from ttapca.methods.method import Assembly, GradientMethod, register
from ttapca.methods.views import STRONG, STRONG_COLOURS, Forward, images_and_forward
from ttapca.methods.weights import TaughtSteps, surprise_of, with_values


@register("cotta", paper="Wang et al. (CVPR 2022)")
@dataclass(frozen=True, kw_only=True)
class CoTTA(GradientMethod):
    """All weights, learned from a slow teacher; some return to the source.

    With theta' the teacher's weights, theta the student's and theta_0 the source's, on each batch:

        target     y' = f_theta'(x), or its mean over views of x if the confidence of f_0 is below
        student    one step on  - sum_c y'_c log y_c            with y = f_theta(x)
        teacher    theta' <- m theta' + (1 - m) theta
        restore    theta <- M theta_0 + (1 - M) theta           M ~ Bernoulli(p) for each weight

    and y' is the prediction. The paper: https://arxiv.org/abs/2203.13591.

    Attributes:
        logits: `before`: the target of the last step, as in the official code; `after`: the moved
            teacher's prediction for the batch itself.
        views: Over how many views the teacher's prediction is averaged. If there is one for every
            pixel, views have other colours and are not moved.
        flip: Whether half of them are mirrored; not for images, such as digits, that then mean
            something else.
        confidence_below: The teacher is averaged over views if the mean confidence of the source
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
        """Return all weights, moved by a teacher."""
        return self.assembly(Weights(all_parameters, "weights"), predictor=TeacherAndStudent(self))


class TeacherAndStudent(TaughtSteps):
    """Lets the student learn from the teacher, and part of it return to the source."""

    def __init__(self, options: CoTTA) -> None:
        super().__init__(
            teacher_momentum=options.teacher_momentum, seed=options.seed, **options.stepping()
        )
        self.options = options
        self.jitter = replace(STRONG, flip=options.flip)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Ask the teacher, let the student learn from it, and return the teacher's logits."""
        images, forward = images_and_forward("cotta", run, inputs, options)
        for _ in range(self.steps):
            target = self._target(images, forward)
            if not self.step(surprise_of(forward(images), target).mean()):
                return target
            self.follow()
            self._restore()
        if self.logits == "before":
            return target
        with torch.no_grad():
            return self._ask(self.teacher_weights, functools.partial(forward, images))

    def _ask(self, weights: list[Tensor], run: Callable[[], Tensor]) -> Tensor:
        """Run the model with the weights of the teacher, or of the source."""
        return with_values(self.descent.parameters, weights, run)

    @torch.no_grad()
    def _target(self, images: Tensor, forward: Forward) -> Tensor:
        """Return the teacher's logits for the images, or their mean over views."""
        plain = functools.partial(forward, images)
        logits = self._ask(self.start, plain)
        if not logits.softmax(1).amax(1).mean() < self.options.confidence_below:
            return self._ask(self.teacher_weights, plain)
        jitter = STRONG_COLOURS if self.outputs.of_pixels(logits) else self.jitter

        def mean_over_views() -> Tensor:
            total = forward(jitter(images, self.generator))
            for _ in range(self.options.views - 1):
                total = total + forward(jitter(images, self.generator))
            return total / self.options.views

        return self._ask(self.teacher_weights, mean_over_views)

    @torch.no_grad()
    def _restore(self) -> None:
        """Move a random share of the student's weights back to the source."""
        share = self.options.restored_share
        if not share:
            return
        for student, source in zip(self.descent.parameters, self.start, strict=True):
            draws = torch.rand(student.shape, generator=self.generator)
            student.copy_(torch.where((draws < share).to(student.device), source, student))
