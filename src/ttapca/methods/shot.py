"""`shot`: information maximisation on the feature extractor, the classifier frozen.

Liang et al., "Do We Really Need to Access the Source Data? Source Hypothesis Transfer for
Unsupervised Domain Adaptation" (ICML 2020). There it is trained for epochs on a whole target set;
here, as in the literature on test-time adaptation, on one batch after the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.adaptation.objectives import information_maximisation
from ttapca.adaptation.optimisation import MOMENTUM, GradientSteps, Run, sgd
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import Place
from ttapca.errors import AttachError, LayerOutputError, OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Stepping, Wishes, statistics_surface
from ttapca.support.capture import caught_inputs, find_classifier
from ttapca.support.logits import log_softmax

# The official code has 0.01 for new layers, and a tenth of it for those of the source model.
LEARNING_RATE = 1e-3


def _shot(
    wishes: Wishes,
    *,
    classifier: str | None = None,
    pseudo_labels: float = 0.0,
    statistics: Statistics = "batch",
    gain: AnyGain = "relu",
) -> Plan:
    if isinstance(pseudo_labels, bool) or not 0.0 <= pseudo_labels < float("inf"):
        raise OptionError(
            "`pseudo_labels`, the weight of their cross-entropy, is finite and not below 0; found "
            f"{pseudo_labels!r}."
        )
    extractor = Weights(
        functools.partial(feature_extractor, classifier=classifier),
        "weights of the feature extractor",
    )
    below = wishes.filter_below(gain)
    surfaces = [*statistics_surface(statistics, below), extractor, *below]
    stepping = wishes.steps_by(
        functools.partial(sgd, momentum=MOMENTUM, nesterov=True), lr=LEARNING_RATE, logits="after"
    )
    if pseudo_labels == 0.0:
        return Plan(surfaces, GradientSteps(information_maximisation, **stepping))
    return Plan(surfaces, PseudoLabelSteps(classifier, pseudo_labels, stepping))


def feature_extractor(model: nn.Module, *, classifier: str | None = None) -> list[Place]:
    """Every parameter of a model but those of its classifier.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 5))
        >>> [tuple(getattr(*place).shape) for place in feature_extractor(model)]
        [(3, 2), (3,)]
    """
    # By identity: weights that the classifier shares with another layer stay frozen in both.
    frozen = {id(parameter) for parameter in find_classifier(model, classifier).parameters()}
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in frozen
    ]


class PseudoLabelSteps(GradientSteps):
    """Information maximisation, and cross-entropy to labels from the centroids of the features.

    Args:
        classifier: Dotted path of the layer whose input are the features; the last `nn.Linear` by
            default.
        weight: Of the cross-entropy; 0.3 in the paper.
        stepping: How to step.
    """

    def __init__(self, classifier: str | None, weight: float, stepping: Stepping) -> None:
        super().__init__(information_maximisation, **stepping)
        self.weight = weight
        self._path = classifier
        self._caught: list[Tensor] = []
        self._classifier: nn.Module | None = None

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Find the classifier, too."""
        super().bind(model, parameters)
        self._classifier = find_classifier(model, self._path)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict and step, with an eye on the features."""
        if self._classifier is None:
            raise AttachError("Steps are taken once there is a model; call `bind` first.")
        with caught_inputs(self._classifier) as self._caught:
            return super().predict(run, *inputs, **options)

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Information maximisation plus the weighted cross-entropy."""
        del run, inputs, options
        labels = centroid_labels(_only_features(self._caught), logits)
        self._caught.clear()  # the next step sees its own pass only, and no copy sees this one
        # Not `F.cross_entropy` on the logits themselves: half precision would lose it.
        cross_entropy = F.nll_loss(log_softmax(logits), labels)
        return self.objective(logits) + self.weight * cross_entropy


def _only_features(caught: list[Tensor]) -> Tensor:
    """The features of one forward pass, shape (batch, d)."""
    if len(caught) != 1 or caught[0].dim() != 2:
        raise LayerOutputError(
            "Pseudo-labels need a classifier that is called once, on features of shape (batch, d); "
            f"found inputs of shape {[tuple(features.shape) for features in caught]}. Name another "
            "layer by `classifier=`."
        )
    return caught[0].detach()


@torch.no_grad()
def centroid_labels(features: Tensor, logits: Tensor) -> Tensor:
    """Label each sample by its nearest class centroid, in cosine distance.

    With features g and probabilities p, the centroid of class k is first the mean of g weighted by
    p_k, and after one round of labelling the mean of g over the samples labelled k (equations 4 to
    6 of the paper). A class that no sample was labelled with takes no part in the second round.

    Args:
        features: Shape (batch, d).
        logits: Shape (batch, classes).

    Returns:
        Shape (batch,), whole numbers.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> logits = torch.tensor([[3.0, 0.0], [0.0, 0.1], [0.0, 3.0]])
        >>> centroid_labels(features, logits).tolist()
        [0, 0, 1]
    """
    membership = log_softmax(logits).exp()  # (batch, classes)
    features = features.to(membership.dtype)
    first = _nearest(features, membership)
    return _nearest(features, F.one_hot(first, membership.shape[1]).to(membership.dtype))


def _nearest(features: Tensor, membership: Tensor) -> Tensor:
    # The length of a centroid plays no part in a cosine: a weighted sum does for the mean.
    centroids = F.normalize(membership.T @ features, dim=1)  # (classes, d)
    similarity = F.normalize(features, dim=1) @ centroids.T  # (batch, classes)
    return similarity.masked_fill(membership.sum(0) == 0, -torch.inf).argmax(1)


SHOT = Recipe("the feature extractor's weights, learned by information maximisation", _shot)
