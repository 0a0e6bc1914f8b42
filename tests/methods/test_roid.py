from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import (
    BATCHES,
    X,
    affine_with_batch_statistics,
    both_ways,
    copied,
    every_norm,
    set_to,
    sharp,
)
from oracles import images, small_convnet
from ttapca.errors import ShapeError
from ttapca.methods.roid import VIEWS, prediction_weights


def plain_weights(p: Tensor, mean: Tensor) -> list[float]:
    """The paper's weights, sample by sample."""
    diversity = [1 - float(row @ mean / (row.norm() * mean.norm())) for row in p]
    certainty = [float((row * row.log()).sum()) for row in p]

    def unit(values: list[float]) -> list[float]:
        return [(value - min(values)) / (max(values) - min(values)) for value in values]

    diversity, certainty = unit(diversity), unit(certainty)
    average = sum(diversity) / len(diversity)
    return [
        math.exp(d * c * 3) if d >= average else 0.0
        for d, c in zip(diversity, certainty, strict=True)
    ]


def plain_loss(p: Tensor, q: Tensor | None, weights: list[float]) -> Tensor:
    """Weighted likelihood ratio, with probabilities up to 0.99, and consistency."""
    total = torch.zeros((), dtype=torch.float64)
    for index, weight in enumerate(weights):
        clipped = p[index].clamp(max=0.99)
        total = total - weight * (clipped * torch.log(clipped / (1 - clipped))).sum()
        if q is not None:
            one = -(p[index] * q[index].log()).sum()
            other = -(q[index] * p[index].log()).sum()
            total = total + weight * (one + other) / 2
    return total / len(weights)


def plain_correction(logits: Tensor, kind: str = "logits") -> Tensor:
    """Corrected probabilities: of logits times the prior, or of probabilities times the prior."""
    p = torch.softmax(logits, 1)
    prior = p.mean(0)
    smooth = max(1 / len(p), 1 / len(prior)) / float(prior.max())
    prior = (prior + smooth) / (1 + smooth * len(prior))
    if kind == "logits":
        return torch.softmax(logits * prior, 1)
    return p * prior / (p * prior).sum(1, keepdim=True)


def plain_roid(model: nn.Module, *, forgetting: str, consistency: bool) -> list[Tensor]:
    """Two steps a batch with torch's own Adam; probabilities from before the last update."""
    network, parameters = affine_with_batch_statistics(model)
    start = copied(parameters)
    outputs = []
    for number, x in enumerate(BATCHES):
        if forgetting == "episodic" or number == 0:
            mean, draws = None, torch.Generator().manual_seed(0)
            optimizer = torch.optim.Adam(parameters, lr=1e-3)
            set_to(parameters, start)
        for _ in range(2):
            logits = network(x)
            p = torch.softmax(logits, 1)
            mean = torch.full_like(p[0], 1 / p.shape[1]).detach() if mean is None else mean
            weights = plain_weights(p.detach(), mean)
            mean = 0.9 * mean + 0.1 * p.detach().mean(0)
            q = torch.softmax(network(VIEWS(x, draws)), 1) if consistency else None
            optimizer.zero_grad()
            plain_loss(p, q, weights).backward()
            optimizer.step()
            set_to(
                parameters, [0.99 * p + 0.01 * s for p, s in zip(parameters, start, strict=True)]
            )
        outputs.append(plain_correction(logits.detach()))
    return outputs


@every_norm
@both_ways
@pytest.mark.parametrize("consistency", [True, False])
def test_equals_a_plain_loop(make, forgetting: str, consistency: bool) -> None:
    options = {"forgetting": forgetting, "consistency": consistency}
    expected = plain_roid(sharp(make()), **options)
    adapter = ttapca.adapt(sharp(make()), "roid", steps=2, **options)
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x).softmax(1), reference, rtol=0, atol=1e-6)
    assert (adapter.updates, adapter.skipped) == (20, 0)


@pytest.mark.parametrize("kind", ["logits", "probabilities"])
def test_the_prior_is_corrected_on_demand(kind: Any) -> None:
    plain = ttapca.adapt(small_convnet(), "roid", class_prior_correction="none")
    assert torch.equal(plain(X), ttapca.adapt(small_convnet(), "bn")(X))
    corrected = ttapca.adapt(small_convnet(), "roid", class_prior_correction=kind)(X)
    torch.testing.assert_close(corrected.softmax(1), plain_correction(plain(X), kind))


def test_equal_samples_count_alike() -> None:
    same = torch.full((3, 4), 0.25)
    assert prediction_weights(same, same[0], 1 / 3).tolist() == [1.0, 1.0, 1.0]


def test_inputs_that_are_no_images() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x = images(9, shape=(6,))
    with pytest.raises(ShapeError, match=r"found \(9, 6\).*`consistency=False`"):
        ttapca.adapt(copy.deepcopy(model), "roid")(x)
    assert ttapca.adapt(model, "roid", consistency=False)(x).shape == (9, 3)
