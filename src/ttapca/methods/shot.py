"""`shot`: information maximisation on the feature extractor, the classifier frozen.

In its paper the network is trained for epochs on a whole target set; here, as in the literature on
test-time adaptation, on one batch after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.adaptation.objectives import information_maximisation
from ttapca.adaptation.optimisation import MOMENTUM, GradientSteps, Logits, Run, sgd
from ttapca.adaptation.surfaces import Weights
from ttapca.adaptation.surfaces.weights import Place
from ttapca.errors import AttachError, LayerOutputError
from ttapca.methods.method import Assembly, GradientMethod, NotNegative, register
from ttapca.support.logits import log_softmax
from ttapca.support.modules import caught_inputs, find_classifier


@register("shot", paper="Liang et al. (ICML 2020)")
@dataclass(frozen=True, kw_only=True)
class SHOT(GradientMethod):
    """The feature extractor's weights, learned by information maximisation.

    The official code has a learning rate of 0.01 for new layers, and a tenth of it for those of the
    source model.

    Attributes:
        classifier: Dotted path of the layer that stays frozen; the last `nn.Linear` by default.
        pseudo_labels: Weight of the cross-entropy to labels from the centroids of the features;
            0.3 in the paper.
    """

    optimiser: ClassVar[Any] = functools.partial(sgd, momentum=MOMENTUM, nesterov=True)

    logits: Logits = "after"
    classifier: str | None = None
    pseudo_labels: NotNegative = 0.0

    def assemble(self) -> Assembly:
        """Information maximisation moves all weights but the classifier's."""
        select = functools.partial(feature_extractor, classifier=self.classifier)
        mover = (
            PseudoLabelSteps(self)
            if self.pseudo_labels
            else GradientSteps(information_maximisation, **self.stepping())
        )
        return self.assembly(Weights(select, "weights of the feature extractor"), mover)


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
    """Information maximisation, and cross-entropy to labels from the centroids of the features."""

    def __init__(self, options: SHOT) -> None:
        super().__init__(information_maximisation, **options.stepping())
        self.weight = options.pseudo_labels
        self._path = options.classifier
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
