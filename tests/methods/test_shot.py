from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, assert_follows, both_ways, every_norm
from oracles import left_untouched, small_convnet, with_batch_statistics
from ttapca.errors import AttachError


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


def plain_shot(model: nn.Module, *, forgetting: str, beta: float) -> list[Tensor]:
    """SHOT, two steps on one batch after the other; momentum written out by hand."""
    *body, head = with_batch_statistics(model)
    body = nn.Sequential(*body)
    start = {name: value.clone() for name, value in body.state_dict().items()}
    velocity = [torch.zeros_like(p) for p in body.parameters()]
    outputs = []
    for x in BATCHES:
        if forgetting == "episodic":
            body.load_state_dict(start)
            velocity = [torch.zeros_like(p) for p in body.parameters()]
        for _ in range(2):
            features = body(x)
            p = torch.softmax(head(features), 1)
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
                    parameter -= 1e-3 * (g + 0.9 * velocity[index])
        with torch.no_grad():
            outputs.append(head(body(x)))
    return outputs


@every_norm
@both_ways
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_equals_a_plain_loop(make, forgetting: str, beta: float) -> None:
    expected = plain_shot(make(), forgetting=forgetting, beta=beta)
    adapter = ttapca.adapt(make(), "shot", forgetting=forgetting, steps=2, pseudo_labels=beta)
    assert_follows(adapter, expected, atol=1e-6)
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


def test_models_that_cannot_be_served() -> None:
    only = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    with left_untouched(only, X), pytest.raises(AttachError, match="feature extractor; the model"):
        ttapca.adapt(only, "shot")
