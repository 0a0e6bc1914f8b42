from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from small_networks import affine_with_batch_statistics, sharp
from ttapca.errors import AttachError, LayerOutputError, OptionError, ShapeError
from ttapca.methods.roid import VIEWS, corrected_by_prior, prediction_weights

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


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


def plain_correction(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, 1)
    prior = p.mean(0)
    smooth = max(1 / len(p), 1 / len(prior)) / float(prior.max())
    weighted = p * (prior + smooth) / (1 + smooth * len(prior))
    return weighted / weighted.sum(1, keepdim=True)


def plain_roid(
    model: nn.Module, batches: list[Tensor], *, episodic: bool, consistency: bool
) -> list[Tensor]:
    """Two steps a batch with torch's own Adam; probabilities from before the last update."""
    network, parameters = affine_with_batch_statistics(model)
    start = [p.detach().clone() for p in parameters]
    fresh = True
    outputs = []
    for x in batches:
        if episodic or fresh:
            fresh, mean, draws = False, None, torch.Generator().manual_seed(0)
            optimizer = torch.optim.Adam(parameters, lr=1e-3)
            for parameter, value in zip(parameters, start, strict=True):
                parameter.data = value.clone()
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
            for parameter, value in zip(parameters, start, strict=True):
                parameter.data = 0.99 * parameter.data + 0.01 * value
        outputs.append(plain_correction(logits.detach()))
    return outputs


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("consistency", [True, False])
def test_equals_a_plain_loop(make, episodic: bool, consistency: bool) -> None:
    expected = plain_roid(sharp(make()), BATCHES, episodic=episodic, consistency=consistency)
    adapter = ttapca.adapt(
        sharp(make()),
        "roid",
        forgetting="episodic" if episodic else "online",
        steps=2,
        consistency=consistency,
    )
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x).softmax(1), reference, rtol=0, atol=1e-6)
    assert (adapter.updates, adapter.skipped) == (20, 0)


def test_the_source_pulls() -> None:
    def distance(momentum: float) -> float:
        adapter = ttapca.adapt(small_convnet(), "roid", forgetting="online", momentum=momentum)
        start = [p.detach().clone() for p in adapter.surfaces.parameters()]
        for x in BATCHES:
            adapter(x)
        moved = zip(adapter.surfaces.parameters(), start, strict=True)
        return sum(float((p.detach() - s).square().sum()) for p, s in moved)

    assert distance(0.5) < distance(0.99) < distance(1.0)


def test_the_prior_is_corrected_on_demand() -> None:
    plain = ttapca.adapt(small_convnet(), "roid", class_prior_correction=False)
    assert torch.equal(plain(X), ttapca.adapt(small_convnet(), "bn")(X))
    corrected = ttapca.adapt(small_convnet(), "roid")(X)
    torch.testing.assert_close(corrected.softmax(1), plain_correction(plain(X)))
    torch.testing.assert_close(corrected, corrected_by_prior(plain(X)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
def test_small_batches(make, size: int) -> None:
    adapter = ttapca.adapt(make(), "roid", forgetting="online")
    for x in BATCHES[:4]:
        assert torch.isfinite(adapter(x[:size])).all()
    assert (adapter.updates, adapter.skipped) == (4, 0)


def test_equal_samples_count_alike() -> None:
    same = torch.full((3, 4), 0.25)
    assert prediction_weights(same, same[0], 1 / 3).tolist() == [1.0, 1.0, 1.0]


def test_a_poisoned_batch_is_skipped_and_leaves_the_mean() -> None:
    options = {"episodic": False, "consistency": False}
    clean = ttapca.adapt(small_convnet(), "roid", **options)
    adapter = ttapca.adapt(small_convnet(), "roid", **options)
    for x in BATCHES:
        adapter(x * float("nan"))
        assert torch.equal(adapter(x), clean(x))
    assert adapter.skipped == len(BATCHES)


def test_leaves_no_trace() -> None:
    model = small_convnet()
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "roid", forgetting="online")
        for x in BATCHES:
            adapter(x)
        adapter.detach()


def test_the_same_views_after_a_reset_others_by_another_seed() -> None:
    def run(adapter: ttapca.Adapter) -> list[Tensor]:
        return [adapter(x) for x in BATCHES]

    adapter = ttapca.adapt(small_convnet(), "roid", forgetting="online")
    first = run(adapter)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(adapter)))
    for again in (adapter, twin):
        again.reset()
        assert all(torch.equal(a, b) for a, b in zip(run(again), first, strict=True))
    other = run(ttapca.adapt(small_convnet(), "roid", forgetting="online", seed=1))
    assert not torch.equal(other[-1], first[-1])


def test_casting_takes_everything_along() -> None:
    adapter = ttapca.adapt(small_convnet(), "roid", forgetting="online")
    reference = ttapca.adapt(small_convnet(), "roid", forgetting="online")
    adapter(X)
    reference(X)
    adapter.float()
    for x in BATCHES:
        torch.testing.assert_close(adapter(x.float()).double(), reference(x), rtol=0, atol=1e-2)


def test_inputs_that_are_no_images() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x = images(9, shape=(6,))
    with pytest.raises(ShapeError, match=r"found \(9, 6\).*`consistency=False`"):
        ttapca.adapt(copy.deepcopy(model), "roid")(x)
    assert ttapca.adapt(model, "roid", consistency=False)(x).shape == (9, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_momentum": 0.0}, "above 0 and at most 1; found 0.0"),
        ({"source_momentum": 1.1}, "found 1.1"),
        ({"temperature": 0.0}, "`temperature` must be a finite number above 0; found 0.0"),
        ({"lr": -1.0}, "`lr` must be a finite number above 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "roid", **options)  # type: ignore[arg-type]


def test_models_that_cannot_be_served() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    with left_untouched(plain, X), pytest.raises(AttachError, match="the model has none"):
        ttapca.adapt(plain, "roid")
    dense = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    with pytest.raises(LayerOutputError, match=r"found \(12, 4, 6, 6\)"):
        ttapca.adapt(dense, "roid")(X)
