"""`lame`: correct the outputs of a batch by the affinity of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Count
from ttapca.adaptation.optimisation import Predictor, Run, log_predictions
from ttapca.methods.method import (
    CLASSES,
    Assembly,
    Method,
    Statistics,
    register,
    statistics_surfaces,
)
from ttapca.support.modules import caught_inputs, classifier_features, find_classifier
from ttapca.support.outputs import Reads

Affinity = Literal["knn", "rbf", "linear"]

# As in the official code: keeps the logarithm finite, and the relative change that is convergence.
SMALLEST_PROBABILITY = 1e-10
CONVERGED = 1e-8
NEIGHBOURS = 5


@register("lame", paper="Boudiaf et al. (CVPR 2022)")
@dataclass(frozen=True, kw_only=True)
class LAME(Method):
    """The outputs of a batch, corrected by the affinity of its samples.

    No parameter of the network moves. With q_i the network's prediction and w_ij the affinity of
    two samples, the assignments z minimise

        sum_i KL(z_i || q_i) - sum_ij w_ij z_i^T z_j

    by the concave-convex procedure: z_i <- softmax(log q_i + sum_j w_ij z_j), until it converges.
    The paper: https://arxiv.org/abs/2201.05718.

    Attributes:
        affinity: `rbf`, as in the official code: a Gaussian of the distance, as wide as the mean
            distance to the last neighbour; `knn`: 1 for each of the nearest neighbours, else 0;
            `linear`: the cosine.
        neighbours: The number of neighbours, for `knn` and `rbf`; 5 by default.
        iterations: The largest number of iterations.
        classifier: Dotted path of the layer whose input is taken as features; the last `nn.Linear`
            by default.
        statistics: What BatchNorm layers normalise with.
    """

    outputs = CLASSES

    affinity: Affinity = "rbf"
    neighbours: Count | None = None
    iterations: Count = 100
    classifier: str | None = None
    statistics: Statistics = "source"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.affinity == "linear":
            self.refuse("neighbours", "the affinity `linear` uses none")

    def assemble(self) -> Assembly:
        """Return a correction of the outputs; nothing else changes."""
        return Assembly(statistics_surfaces(self.statistics), LaplacianCorrection(self))


class LaplacianCorrection(Predictor):
    """Predicts, then lets samples that are near each other agree."""

    reads: Reads = "classes"
    _classifier: nn.Module  # found by `bind`

    def __init__(self, options: LAME) -> None:
        super().__init__()
        self.options = options

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Find the classifier."""
        del parameters
        self._classifier = find_classifier(model, self.options.classifier)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return corrected log-probabilities, (batch, classes); its own for a single sample."""
        with caught_inputs(self._classifier) as caught:
            logits = run(*inputs, **options)
        own = log_predictions(logits).to(logits.dtype)
        features = classifier_features(caught, len(logits))
        if len(logits) == 1:
            return own
        if not (torch.isfinite(own).all() and torch.isfinite(features).all()):
            self.skipped += 1
            return own
        affinities = self._affinities(features).to(own.dtype)
        return agreed(own, affinities, self.options.iterations)

    def _affinities(self, features: Tensor) -> Tensor:
        """Return w for features of shape (batch, d), whose direction alone counts."""
        directions = F.normalize(features, dim=-1)
        if self.options.affinity == "linear":
            return directions @ directions.T
        # By differences: the quicker way by scalar products cannot tell near neighbours apart.
        distances = torch.cdist(
            directions, directions, compute_mode="donot_use_mm_for_euclid_dist"
        )  # (batch, batch)
        neighbours = self.options.neighbours or NEIGHBOURS
        if self.options.affinity == "rbf":
            nearest = distances.topk(min(neighbours, len(distances)), largest=False).values
            width = nearest[:, -1].mean().clamp_min(torch.finfo(distances.dtype).eps)
            return torch.exp(-distances.square() / (2 * width.square()))
        others = distances.fill_diagonal_(float("inf"))
        count = min(neighbours, len(distances) - 1)
        index = others.topk(count, largest=False).indices  # (batch, neighbours)
        return torch.zeros_like(distances).scatter_(1, index, 1.0)


def agreed(own: Tensor, affinities: Tensor, iterations: int) -> Tensor:
    """Return log-probabilities of the assignments, given those of the network: (batch, classes)."""
    unary = torch.log(own.exp() + SMALLEST_PROBABILITY)
    assigned = unary.log_softmax(1)
    last = float("inf")
    for iteration in range(iterations):
        pairwise = affinities @ assigned.exp()
        assigned = (unary + pairwise).log_softmax(1)
        bound = float((assigned.exp() * (assigned - unary - pairwise)).sum())
        if iteration > 1 and abs(bound - last) <= CONVERGED * abs(last):
            break
        last = bound
    return assigned
