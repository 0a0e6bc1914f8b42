"""`shot`: information maximisation on the feature extractor, the classifier frozen.

In its paper the network is trained for epochs on a whole target set; here, as in the literature on
test-time adaptation, it sees one batch after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.adaptation.optimisation import (
    MOMENTUM,
    GradientSteps,
    Logits,
    Run,
    class_marginal,
    log_predictions,
    mean_entropy,
    negative_entropy,
    sgd,
)
from ttapca.adaptation.surfaces.trainable import Slot, Weights
from ttapca.errors import LayerOutputError
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, NotNegative, register
from ttapca.support.modules import caught_inputs, find_classifier


@register("shot", paper="Liang et al. (ICML 2020)")
@dataclass(frozen=True, kw_only=True)
class SHOT(GradientMethod):
    """The feature extractor's weights, learned by information maximisation.

    With y_i the predictions for a batch and p their mean, the loss is

        L_ent + L_div = - mean_i sum_k y_ik log y_ik  +  sum_k p_k log p_k

    which is low if each prediction is certain, and all of them together are diverse. The paper:
    https://arxiv.org/abs/2002.08546.

    The official code has a learning rate of 0.01 for new layers, and a tenth of it for those of the
    source model.

    Attributes:
        classifier: Dotted path of the layer that stays frozen; the last `nn.Linear` by default.
        pseudo_labels: Weight of the cross-entropy to labels from the centroids of the features;
            0.3 in the paper.
    """

    outputs = CLASSES
    optimiser: ClassVar[Any] = functools.partial(sgd, momentum=MOMENTUM, nesterov=True)

    logits: Logits = "after"
    classifier: str | None = None
    pseudo_labels: NotNegative = 0.0

    def assemble(self) -> Assembly:
        """Return all weights but the classifier's, moved by information maximisation."""
        select = functools.partial(_feature_extractor, classifier=self.classifier)
        predictor = (
            PseudoLabelSteps(self)
            if self.pseudo_labels
            else GradientSteps(information_maximisation, reads="classes", **self.stepping())
        )
        return self.assembly(
            Weights(select, "weights of the feature extractor"), predictor=predictor
        )


def information_maximisation(logits: Tensor) -> Tensor:
    """Return the mean entropy minus the entropy of the mean prediction; see `SHOT`.

    Example:
        >>> round(information_maximisation(torch.tensor([[9.0, 0.0], [0.0, 9.0]])).item(), 2)
        -0.69
    """
    return mean_entropy(logits) + negative_entropy(class_marginal(logits))


def _feature_extractor(model: nn.Module, *, classifier: str | None = None) -> list[Slot]:
    """Return every parameter of a model but those of its classifier."""
    # By identity: weights that the classifier shares with another layer stay frozen in both.
    frozen = {id(parameter) for parameter in find_classifier(model, classifier).parameters()}
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in frozen
    ]


class PseudoLabelSteps(GradientSteps):
    """Information maximisation, plus the cross-entropy to labels from centroids of the features."""

    _classifier: nn.Module  # found by `bind`

    def __init__(self, options: SHOT) -> None:
        super().__init__(information_maximisation, reads="classes", **options.stepping())
        self.options = options
        self._caught: list[Tensor] = []  # inputs of the classifier since the last step

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Find the classifier as well."""
        super().bind(model, parameters)
        self._classifier = find_classifier(model, self.options.classifier)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict and step, and catch the features."""
        with caught_inputs(self._classifier) as self._caught:
            return super().predict(run, *inputs, **options)

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return information maximisation plus the weighted cross-entropy."""
        del run, inputs, options
        caught = list(self._caught)
        self._caught.clear()  # so that the next step and copies of the adapter do not see it
        if len(caught) != 1 or caught[0].dim() != 2:
            raise LayerOutputError(
                "Pseudo-labels need a classifier that is called once, on features of shape "
                f"(batch, d); found inputs of shape {[tuple(each.shape) for each in caught]}. Name "
                "another layer by `classifier=`."
            )
        own = log_predictions(logits)
        labels = _centroid_labels(caught[0].detach(), own.detach().exp())
        # Not `F.cross_entropy` on the logits themselves: half precision would lose it.
        cross_entropy = F.nll_loss(own, labels)
        return self.objective(logits) + self.options.pseudo_labels * cross_entropy


@torch.no_grad()
def _centroid_labels(features: Tensor, membership: Tensor) -> Tensor:
    """Label each sample by its nearest class centroid, in cosine distance.

    With features g and probabilities p, the centroid of class k is first the mean of g weighted by
    p_k, and after one round of labelling the mean of g over the samples labelled k (equations 4 to
    6 of the paper). A class without samples takes no part in the second round.
    """
    features = features.to(membership.dtype)
    first = _nearest(features, membership)
    return _nearest(features, F.one_hot(first, membership.shape[1]).to(membership.dtype))


def _nearest(features: Tensor, membership: Tensor) -> Tensor:
    # The length of a centroid does not change a cosine, so a weighted sum will do for the mean.
    centroids = F.normalize(membership.T @ features, dim=1)  # (classes, d)
    similarity = F.normalize(features, dim=1) @ centroids.T  # (batch, classes)
    return similarity.masked_fill(membership.sum(0) == 0, -torch.inf).argmax(1)
