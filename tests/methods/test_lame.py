from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, both_ways, every_norm
from oracles import small_convnet
from ttapca.errors import LayerOutputError
from ttapca.methods import MethodName

every_affinity = pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])


def plain_lame(model: nn.Module, x: Tensor, kind: str, k: int) -> Tensor:
    """The paper's iterations, sample by sample."""
    with torch.no_grad():
        features = model[:-1](x)
        q = torch.softmax(model(x), 1)
    n = len(x)
    features = features / features.norm(dim=1, keepdim=True)
    distance = [[float((a - b).norm()) for b in features] for a in features]
    w = torch.zeros(n, n, dtype=torch.float64)
    width = sum(sorted(row)[min(k, n) - 1] for row in distance) / n
    for i in range(n):
        nearest = sorted((j for j in range(n) if j != i), key=lambda j: distance[i][j])[:k]
        for j in range(n):
            if kind == "knn":
                w[i, j] = float(j in nearest)
            elif kind == "rbf":
                w[i, j] = math.exp(-(distance[i][j] ** 2) / (2 * width**2))
            else:
                w[i, j] = features[i] @ features[j]
    q = q + 1e-10
    z = q / q.sum(1, keepdim=True)
    bounds: list[float] = []
    for _ in range(100):
        pull = w @ z
        z = q * torch.exp(pull)
        z = z / z.sum(1, keepdim=True)
        bounds.append(float((z * (torch.log(z) - torch.log(q) - pull)).sum()))
        if len(bounds) > 2 and abs(bounds[-1] - bounds[-2]) <= 1e-8 * abs(bounds[-2]):
            break
    return z


@every_affinity
@every_norm
@both_ways
def test_equals_a_plain_loop(affinity: str, make, forgetting: str) -> None:
    options = {} if affinity == "linear" else {"neighbours": 3}
    adapter = ttapca.adapt(make(), "lame", affinity=affinity, forgetting=forgetting, **options)
    moved = 0.0
    for x in BATCHES:
        found = adapter(x).exp()
        torch.testing.assert_close(found, plain_lame(make(), x, affinity, 3), rtol=0, atol=1e-9)
        moved = max(moved, float((found - make()(x).softmax(1)).detach().abs().max()))
    assert moved > 0.01


@every_affinity
def test_small_and_degenerate_batches(affinity: str) -> None:
    adapter = ttapca.adapt(small_convnet(), "lame", affinity=affinity)
    torch.testing.assert_close(adapter(X[:1]), small_convnet()(X[:1]).log_softmax(1).detach())
    torch.testing.assert_close(
        adapter(X[:2]).exp(), plain_lame(small_convnet(), X[:2], affinity, 5)
    )
    same = adapter(X[:1].expand(7, -1, -1, -1))
    assert torch.isfinite(same).all()
    assert torch.equal(same.argmax(1), small_convnet()(X[:1]).argmax(1).expand(7))


@pytest.mark.parametrize("method", ["lame", "t3a"])
def test_a_poisoned_batch_keeps_the_networks_own_predictions(method: MethodName) -> None:
    poisoned = X.clone()
    poisoned[3] = float("nan")
    expected = small_convnet()(poisoned).log_softmax(1).detach()
    output = ttapca.adapt(small_convnet(), method)(poisoned).log_softmax(1)
    torch.testing.assert_close(output, expected, equal_nan=True)


def test_models_it_cannot_serve() -> None:
    dense = nn.Sequential(nn.Conv2d(3, 4, 1)).double()
    with pytest.raises(LayerOutputError, match=r"shape \(batch, classes\); found \(12, 4, 6, 6\)"):
        ttapca.adapt(dense, "lame", classifier="0")(X)
    pixelwise = nn.Sequential(nn.Flatten(0, 2), nn.Linear(6, 5), nn.Unflatten(0, (12, 18)))
    pixelwise.append(nn.Flatten()).double()
    with pytest.raises(LayerOutputError, match=r"found calls on \[\(216, 6\)\]"):
        ttapca.adapt(pixelwise, "lame")(X)
