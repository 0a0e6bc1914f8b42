"""`memo`: adapt to one image at a time, so that all its views are predicted alike."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ttapca._checks import Count, Positive, Seed
from ttapca.adaptation.optimisation import Logits, Run, Stepper, sgd
from ttapca.adaptation.surfaces.trainable import Weights, all_parameters
from ttapca.methods.method import Assembly, GradientMethod, Statistics, register
from ttapca.methods.views import Forward, images_and_forward, mixed_views, refuse_pixels
from ttapca.methods.weights import put_back
from ttapca.support.outputs import log_softmax


@register("memo", paper="Zhang et al. (NeurIPS 2022)")
@dataclass(frozen=True, kw_only=True)
class MEMO(GradientMethod):
    """All weights, learned for each image by the entropy over its views.

    For each image x, from the source weights theta, with views x_1 .. x_B of it: one step on

        l(theta; x) = - sum_y p(y) log p(y)          p(y) = 1/B sum_i p_theta(y | x_i)

    then the prediction for x itself. The other images of the batch play no part. The paper:
    https://arxiv.org/abs/2110.09506.

    The learning rate is that of the official code for CIFAR-10. There all views of an image count
    as one sample in BatchNorm: `statistics=1 / (1 + n)` mixes them with a source that counts for n
    samples.

    Attributes:
        views: How many views of each image (B).
        flip: Whether half of them are mirrored; not for images, such as digits, that then mean
            something else.
        seed: Draws the views.
    """

    descent: ClassVar[Any] = staticmethod(sgd)

    lr: Positive = 0.005
    logits: Logits = "after"
    statistics: Statistics = "source"
    views: Count = 32
    flip: bool = True
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """Return all weights, moved by the entropy over views."""
        return self.assembly(
            Weights(all_parameters, "weights"), predictor=MarginalEntropySteps(self)
        )


class MarginalEntropySteps(Stepper):
    """Adapts to each image by itself, and forgets it."""

    remembers_start = True
    forgets = True

    def __init__(self, options: MEMO) -> None:
        super().__init__(**options.stepping(), seed=options.seed)
        self.options = options

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Adapt to and predict each image."""
        images, forward = images_and_forward("memo", run, inputs, options)
        if not len(images):
            return forward(images)
        logits = torch.cat([self._adapt_to(image, forward) for image in images.unsqueeze(1)])
        self._forget_image()
        return logits

    def _forget_image(self) -> None:
        put_back(self.descent.parameters, self.start)
        self.descent.reset()

    def _adapt_to(self, image: Tensor, forward: Forward) -> Tensor:
        self._forget_image()

        def loss() -> Tensor:
            given = self.options
            views = mixed_views(image, given.views, self.generator, flip=given.flip)
            logits = forward(views)  # (views, classes, ...)
            refuse_pixels("memo", self.outputs, logits, "Choose `tent`, `sar` or `cotta`.")
            log_mean = log_softmax(logits).logsumexp(0) - math.log(len(logits))
            return -(log_mean.exp() * log_mean).sum(0).mean()

        return self.step_and_predict(loss, functools.partial(forward, image))
