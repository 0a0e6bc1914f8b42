from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from ttapca.errors import AttachError, LayerNotFoundError, LayerOutputError, OptionError

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def plain_labels(features: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The paper's equations 4 to 6, one sample and one class at a time."""
    n, classes = p.shape

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return 1 - float(a @ b) / np.sqrt(float(a @ a) * float(b @ b))

    centroids = {
        k: sum(p[i, k] * features[i] for i in range(n)) / sum(p[i, k] for i in range(n))
        for k in range(classes)
    }
    for round_ in range(2):
        labels = [
            min(centroids, key=lambda k: distance(features[i], centroids[k])) for i in range(n)
        ]
        if round_ == 0:
            centroids = {
                k: np.mean([features[i] for i in range(n) if labels[i] == k], axis=0)
                for k in sorted(set(labels))
            }
    return np.array(labels)


def plain_shot(
    model: nn.Module, batches: list[Tensor], *, episodic: bool, steps: int, lr: float, beta: float
) -> list[Tensor]:
    """SHOT on one batch after the other; momentum written out by hand."""
    network = copy.deepcopy(model).train()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean = module.running_var = None
    *body, head = network
    body = nn.Sequential(*body)
    start = copy.deepcopy(body.state_dict())
    velocity = [torch.zeros_like(p) for p in body.parameters()]
    outputs = []
    for x in batches:
        if episodic:
            body.load_state_dict(start)
            velocity = [torch.zeros_like(p) for p in body.parameters()]
        for _ in range(steps):
            features = body(x)
            logits = head(features)
            p = torch.softmax(logits, 1)
            marginal = p.mean(0)
            loss = -(p * p.log()).sum(1).mean() + (marginal * marginal.log()).sum()
            if beta:
                labels = plain_labels(features.detach().numpy(), p.detach().numpy())
                picked = p[torch.arange(len(x)), torch.from_numpy(labels)]
                loss = loss - beta * picked.log().mean()
            gradients = torch.autograd.grad(loss, list(body.parameters()))
            for index, (parameter, g) in enumerate(zip(body.parameters(), gradients, strict=True)):
                velocity[index] = 0.9 * velocity[index] + g
                with torch.no_grad():
                    parameter -= lr * (g + 0.9 * velocity[index])
        with torch.no_grad():
            outputs.append(head(body(x)))
    return outputs


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False], ids=["episodic", "online"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_equals_a_plain_loop(make, episodic: bool, beta: float) -> None:
    expected = plain_shot(make(), BATCHES, episodic=episodic, steps=2, lr=1e-3, beta=beta)
    adapter = ttapca.adapt(
        make(), "shot", forgetting="episodic" if episodic else "online", steps=2, pseudo_labels=beta
    )
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-6)
    assert (adapter.updates, adapter.skipped) == (20, 0)


def test_the_classifier_stays_frozen() -> None:
    model = small_convnet()
    adapter = ttapca.adapt(model, "shot")
    assert adapter.n_parameters == sum(p.numel() for p in model.parameters()) - 24 * 5 - 5
    named = ttapca.adapt(small_convnet(), "shot", classifier="fc")
    assert torch.equal(named(X), adapter(X))
    other = ttapca.adapt(small_convnet(), "shot", classifier="conv2")
    assert other.n_parameters == sum(p.numel() for p in model.parameters()) - 8 * 6 * 9 - 6


def test_shared_weights_are_frozen_in_both_places() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).double()
    model[0].weight = model[2].weight
    adapter = ttapca.adapt(model, "shot")
    assert adapter.n_parameters == 4 + 8


def test_a_second_head_is_left_where_it_is() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotation = nn.Conv2d(3, 4, 1)
            self.net = small_convnet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    adapter = ttapca.adapt(TwoHeads().double(), "shot", forgetting="online")
    expected = ttapca.adapt(small_convnet(), "shot", forgetting="online")
    for x in BATCHES:
        assert torch.equal(adapter(x), expected(x))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_small_batches(size: int, beta: float) -> None:
    adapter = ttapca.adapt(small_convnet(), "shot", forgetting="online", pseudo_labels=beta)
    for x in BATCHES[:3]:
        assert torch.isfinite(adapter(x[:size])).all()
    assert adapter.skipped == 0


def test_objective_falls_under_its_own_steps() -> None:
    adapter = ttapca.adapt(small_convnet(), "shot", steps=20)
    before = ttapca.adapt(small_convnet(), "bn")(X)
    objective = ttapca.adaptation.objectives.information_maximisation
    assert float(objective(adapter(X))) < float(objective(before))


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_leaves_no_trace(beta: float) -> None:
    model = small_convnet()
    plain = model(X)
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "shot", pseudo_labels=beta)
        for x in BATCHES:
            adapter(x)
        with adapter.disabled():
            assert torch.equal(adapter(X), plain)
        adapter.detach()


def test_pseudo_labels_survive_pickling() -> None:
    adapter = ttapca.adapt(small_convnet(), "shot", pseudo_labels=0.3, forgetting="online")
    adapter(X)
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = [adapter(x) for x in BATCHES]
    for twin in twins:
        assert all(torch.equal(twin(x), y) for x, y in zip(BATCHES, expected, strict=True))


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf"), True])
def test_weights_that_make_no_sense(beta: float) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match="is finite and not below 0"):
        ttapca.adapt(model, "shot", pseudo_labels=beta)


def test_models_that_cannot_be_served() -> None:
    headless = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double().eval()
    with left_untouched(headless, X), pytest.raises(AttachError, match="this one has none"):
        ttapca.adapt(headless, "shot")
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(LayerNotFoundError, match="no layer `fd`"):
        ttapca.adapt(model, "shot", classifier="fd")
    only = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    with left_untouched(only, X), pytest.raises(AttachError, match="feature extractor; the model"):
        ttapca.adapt(only, "shot")


def test_features_that_are_none() -> None:
    adapter = ttapca.adapt(small_convnet(), "shot", classifier="conv2", pseudo_labels=0.3)
    with pytest.raises(LayerOutputError, match=r"found inputs of shape \[\(12, 8, 6, 6\)\]"):
        adapter(X)
