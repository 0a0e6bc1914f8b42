"""`memo`: one image at a time, made to mean the same in all its views.

Zhang et al., "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022. For each
image, from the source weights: with p(y | x_b) the predictions for views x_1 .. x_B and

    q = mean_b p(. | x_b),    loss = - sum_y q(y) log q(y)

one step of all weights on the loss, then the prediction for the image itself. The rest of the batch
plays no part, so a batch of one is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ttapca.adaptation.optimisation import Logits, OptimizerFactory, Run, Stepper, sgd
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import all_parameters
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Wishes, statistics_surface
from ttapca.methods.temporary_values import put_back
from ttapca.methods.views import check_count, check_images, mixed_views
from ttapca.support.logits import log_softmax

LEARNING_RATE = 0.005  # of the official code for CIFAR-10


class MarginalEntropySteps(Stepper):
    """Adapt to each image by itself, and forget it.

    Args:
        optimizer: Makes the optimiser; SGD by default.
        steps: Steps on each image, each on new views.
        logits: From `after` the update, or from `before`: the source's own.
        views: How many.
        flip: Whether half of them are mirrored; not for what means something else then, as digits.
        seed: Of the views.
    """

    remembers_start = True

    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        *,
        steps: int = 1,
        logits: Logits = "after",
        views: int = 32,
        flip: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            optimizer=optimizer or sgd(LEARNING_RATE), steps=steps, logits=logits, seed=seed
        )
        self.views = check_count("views", views)
        self.flip = flip

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


def _memo(
    wishes: Wishes,
    *,
    views: int = 32,
    flip: bool = True,
    seed: int = 0,
    prior: float | None = None,
    gain: AnyGain = "relu",
) -> Plan:
    if prior is not None and not 0 <= prior < float("inf"):
        raise OptionError(
            f"`prior`, a number of samples, is finite and not below 0; found {prior!r}."
        )
    # As in the official code, the views of an image count as one sample, however many they are.
    alpha = 0.0 if prior is None else 1 / (1 + prior)
    below = wishes.filter_below(gain)
    mover = MarginalEntropySteps(
        **wishes.steps_by(sgd, lr=LEARNING_RATE, logits="after"),
        views=views,
        flip=flip,
        seed=seed,
    )
    weights = Weights(all_parameters, "weights")
    return Plan([*statistics_surface(alpha, below), weights, *below], mover)


MEMO = Recipe("all weights, learned for each image by the entropy over its views", _memo)
