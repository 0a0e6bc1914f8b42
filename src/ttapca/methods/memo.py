"""`memo`: one image at a time, made to mean the same in all its views.

For each image, from the source weights: with p(y | x_b) the predictions for views x_1 .. x_B and

    q = mean_b p(. | x_b),    loss = - sum_y q(y) log q(y)

one step of all weights on the loss, then the prediction for the image itself. The rest of the batch
plays no part, so a batch of one is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Logits, Run, Stepper, sgd
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import all_parameters
from ttapca.methods.method import (
    Assembly,
    Count,
    GradientMethod,
    Positive,
    Seed,
    Statistics,
    register,
)
from ttapca.methods.temporary_values import put_back
from ttapca.methods.views import check_images, mixed_views
from ttapca.support.logits import log_softmax


@register("memo", paper="Zhang et al. (NeurIPS 2022)")
@dataclass(frozen=True, kw_only=True)
class MEMO(GradientMethod):
    """All weights, learned for each image by the entropy over its views.

    The learning rate is that of the official code for CIFAR-10. There the views of an image count
    as one sample in BatchNorm, however many they are: statistics of 1 / (1 + n) mix them with a
    source that counts for n samples.

    Attributes:
        views: How many views of each image.
        flip: Whether half of them are mirrored; not for what means something else then, as digits.
        seed: Draws the views.
    """

    optimiser: ClassVar[Any] = staticmethod(sgd)

    lr: Positive = 0.005
    logits: Logits = "after"
    statistics: Statistics = "source"
    views: Count = 32
    flip: bool = True
    seed: Seed = 0

    def assemble(self) -> Assembly:
        """The entropy over views moves all weights."""
        return self.assembly(Weights(all_parameters, "weights"), MarginalEntropySteps(self))


class MarginalEntropySteps(Stepper):
    """Adapt to each image by itself, and forget it."""

    remembers_start = True

    def __init__(self, options: MEMO) -> None:
        super().__init__(**options.stepping(), seed=options.seed)
        self.views = options.views
        self.flip = options.flip

    def __repr__(self) -> str:
        """One line for a person."""
        return f"{super().__repr__()}, views={self.views}"

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Adapt to and predict each image.

        Args:
            run: Runs the model.
            *inputs: Images, shape (batch, channels, height, width); what follows is given to the
                model with each image and its views.
            **options: Likewise.

        Returns:
            Logits, shape (batch, classes, ...).
        """
        images, further = check_images("memo", inputs)
        if not len(images):
            return run(*inputs, **options)

        def forward(views: Tensor) -> Tensor:
            return run(views, *further, **options)

        logits = torch.cat([self._adapt_to(image, forward) for image in images.unsqueeze(1)])
        self._forget_image()
        return logits

    def _forget_image(self) -> None:
        put_back(self.descent.parameters, self.start)
        self.descent.reset()

    def _adapt_to(self, image: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        self._forget_image()
        if self.logits == "before":
            with torch.no_grad():
                before = forward(image)
        for _ in range(self.steps):
            views = mixed_views(image, self.views, self.generator, flip=self.flip)
            gradients = self.descent.gradients(marginal_entropy(forward(views)))
            if gradients is None:
                self.skipped += 1
                break
            self.descent.move(gradients)
            self.updates += 1
        if self.logits == "before":
            return before
        with torch.no_grad():
            return forward(image)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction, in nats.

    Args:
        logits: Shape (views, classes, ...).

    Returns:
        A number.

    Example:
        >>> sure_of_different_things = torch.tensor([[99.0, 0.0], [0.0, 99.0]])
        >>> round(marginal_entropy(sure_of_different_things).item(), 4)  # log 2
        0.6931
    """
    log_mean = log_softmax(logits).logsumexp(0) - math.log(len(logits))  # (classes, ...)
    return -(log_mean.exp() * log_mean).sum(0).mean()
