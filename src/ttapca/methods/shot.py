"""`shot`: information maximisation on the feature extractor, the classifier frozen.

In its paper the network is trained for epochs on a whole target set; here, as in the literature on
test-time adaptation, it sees one batch after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ttapca.adaptation.optimisation import (
    MOMENTUM,
    GradientSteps,
    Logits,
    class_marginal,
    mean_entropy,
    negative_entropy,
    sgd,
)
from ttapca.adaptation.surfaces.trainable import Slot, Weights
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.support.modules import find_classifier


@register("shot", paper="Liang et al. (ICML 2020)")
@dataclass(frozen=True, kw_only=True)
class SHOT(GradientMethod):
    """The feature extractor's weights, learned by information maximisation.

    With y_i the predictions for a batch and p their mean, the loss is

        L_ent + L_div = - mean_i sum_k y_ik log y_ik  +  sum_k p_k log p_k

    which is low if each prediction is certain, and all of them together are diverse. This is the
    SHOT-IM of the paper, without its pseudo-labels: https://arxiv.org/abs/2002.08546.

    The official code has a learning rate of 0.01 for new layers, and a tenth of it for those of the
    source model.

    Attributes:
        classifier: Dotted path of the layer that stays frozen; the last `nn.Linear` by default.
    """

    outputs = CLASSES
    descent: ClassVar[Any] = functools.partial(sgd, momentum=MOMENTUM, nesterov=True)

    logits: Logits = "after"
    classifier: str | None = None

    def assemble(self) -> Assembly:
        """Return all weights but the classifier's, moved by information maximisation."""
        select = functools.partial(_feature_extractor, classifier=self.classifier)
        steps = GradientSteps(information_maximisation, reads="classes", **self.stepping())
        return self.assembly(Weights(select, "weights of the feature extractor"), predictor=steps)


def information_maximisation(logits: Tensor) -> Tensor:
    """Return the mean entropy minus the entropy of the mean prediction; see `SHOT`."""
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
