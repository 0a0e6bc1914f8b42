from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from ttapca.errors import AttachError, LayerNotFoundError, LayerOutputError, OptionError
from ttapca.methods.lame import affinities_of

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


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


@pytest.mark.parametrize("kind", ["knn", "rbf", "linear"])
@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False])
def test_equals_a_plain_loop(kind: str, make, episodic: bool) -> None:
    adapter = ttapca.adapt(
        make(), "lame", affinity=kind, forgetting="episodic" if episodic else "online", neighbours=3
    )
    moved = 0.0
    for x in BATCHES:
        probabilities = adapter(x).exp()
        torch.testing.assert_close(probabilities, plain_lame(make(), x, kind, 3), rtol=0, atol=1e-9)
        moved = max(moved, float((probabilities - make()(x).softmax(1)).detach().abs().max()))
    assert moved > 0.01


def test_nothing_of_the_model_moves_or_forgets() -> None:
    model = small_convnet()
    plain = model(X)
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "lame", forgetting="online")
        first = [adapter(x) for x in BATCHES]
        assert all(torch.equal(adapter(x), y) for x, y in zip(BATCHES, first, strict=True))
        assert torch.equal(model(X), plain)
        adapter.detach()
    assert (adapter.n_parameters, adapter.updates, adapter.skipped) == (0, 0, 0)


def test_a_batch_of_one_keeps_its_prediction() -> None:
    for kind in ("knn", "rbf", "linear"):
        adapter = ttapca.adapt(small_convnet(), "lame", affinity=kind)
        torch.testing.assert_close(adapter(X[:1]), small_convnet()(X[:1]).log_softmax(1).detach())


@pytest.mark.parametrize("kind", ["knn", "rbf", "linear"])
def test_small_and_degenerate_batches(kind: str) -> None:
    adapter = ttapca.adapt(small_convnet(), "lame", affinity=kind)
    two = adapter(X[:2])
    torch.testing.assert_close(two.exp(), plain_lame(small_convnet(), X[:2], kind, 5))
    same = adapter(X[:1].expand(7, -1, -1, -1))
    assert torch.isfinite(same).all()
    assert torch.equal(same.argmax(1), small_convnet()(X[:1]).argmax(1).expand(7))


def test_a_poisoned_batch_is_counted_and_left_as_it_is() -> None:
    adapter = ttapca.adapt(small_convnet(), "lame")
    poisoned = X.clone()
    poisoned[3] = float("nan")
    output = adapter(poisoned)
    torch.testing.assert_close(
        output, small_convnet()(poisoned).log_softmax(1).detach(), equal_nan=True
    )
    assert adapter.skipped == 1


def test_symmetric_affinities_lower_the_bound_and_change_the_outcome() -> None:
    plain, symmetric = (ttapca.adapt(small_convnet(), "lame", symmetric=s) for s in (False, True))
    assert not torch.equal(plain(X), symmetric(X))
    features = images(9, shape=(4,))
    w = affinities_of(features, "knn", 3)
    assert torch.equal(w.sum(1), torch.full((9,), 3.0).double())
    assert torch.equal(w.diagonal(), torch.zeros(9).double())


def test_the_classifier_by_its_name() -> None:
    named = ttapca.adapt(small_convnet(), "lame", classifier="fc")
    assert torch.equal(named(X), ttapca.adapt(small_convnet(), "lame")(X))
    pixels = ttapca.adapt(small_convnet(), "lame", classifier="conv1")
    assert not torch.equal(pixels(X), named(X))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"affinity": "cosine"}, OptionError, "one of knn, rbf, linear; found 'cosine'"),
        ({"neighbours": 0}, OptionError, "`neighbours` must be a whole number from 1 on; found 0"),
        ({"iterations": True}, OptionError, "`iterations` is a whole number"),
        ({"classifier": "fd"}, LayerNotFoundError, "no layer `fd`"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(error, match=message):
        ttapca.adapt(model, "lame", **options)  # type: ignore[arg-type]


def test_models_it_cannot_serve() -> None:
    dense = nn.Sequential(nn.Conv2d(3, 4, 1)).double()
    with left_untouched(dense, X), pytest.raises(AttachError, match="this one has none"):
        ttapca.adapt(dense, "lame")
    with pytest.raises(LayerOutputError, match=r"shape \(batch, classes\); found \(12, 4, 6, 6\)"):
        ttapca.adapt(dense, "lame", classifier="0")(X)
    pixelwise = nn.Sequential(nn.Flatten(0, 2), nn.Linear(6, 5), nn.Unflatten(0, (12, 18)))
    pixelwise.append(nn.Flatten()).double()
    with pytest.raises(LayerOutputError, match=r"found calls on \[\(216, 6\)\]"):
        ttapca.adapt(pixelwise, "lame")(X)
