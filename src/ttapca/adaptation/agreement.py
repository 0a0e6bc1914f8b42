"""Samples that are near each other agree on their class (LAME, Boudiaf et al., CVPR 2022).

With q_i the network's prediction for a sample and w_ij the affinity of two samples, the assignments
z minimise

    sum_i KL(z_i | q_i) - sum_ij w_ij z_i . z_j

by the concave-convex procedure: z_i <- softmax(log q_i + sum_j w_ij z_j), until it converges.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor

Affinity = Literal["knn", "rbf", "linear"]

# As in the official code: what keeps the logarithm finite, and when the bound has converged.
SMALLEST_PROBABILITY = 1e-10
CONVERGED = 1e-8
NEIGHBOURS = 5


def affinities_of(features: Tensor, kind: Affinity = "knn", neighbours: int = NEIGHBOURS) -> Tensor:
    """Return how much each two samples have in common, shape (batch, batch).

    Args:
        features: Shape (batch, d); their direction alone counts.
        kind: `knn`: 1 for each of the nearest neighbours of a sample, else 0; `rbf`: a Gaussian of
            the distance, as wide as the mean distance to the last neighbour; `linear`: the cosine.
        neighbours: How many, for `knn` and `rbf`.
    """
    directions = F.normalize(features, dim=-1)  # (batch, d)
    if kind == "linear":
        return directions @ directions.T
    # By differences: the quicker way by scalar products cannot tell near neighbours apart.
    distances = torch.cdist(
        directions, directions, compute_mode="donot_use_mm_for_euclid_dist"
    )  # (batch, batch)
    if kind == "rbf":
        nearest = distances.topk(min(neighbours, len(distances)), largest=False).values
        width = nearest[:, -1].mean().clamp_min(torch.finfo(distances.dtype).eps)
        return torch.exp(-distances.square() / (2 * width.square()))
    others = distances.fill_diagonal_(float("inf"))
    count = min(neighbours, len(distances) - 1)
    index = others.topk(count, largest=False).indices  # (batch, neighbours)
    return torch.zeros_like(distances).scatter_(1, index, 1.0)


def agreed(own: Tensor, affinities: Tensor, iterations: int = 100) -> Tensor:
    """Iterate until the bound converges, and return log-probabilities of the assignments.

    Args:
        own: Log-probabilities that the network predicts (log q), shape (batch, classes).
        affinities: See `affinities_of`.
        iterations: How many there may be.
    """
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
