from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, assert_follows, both_ways, every_norm
from oracles import left_untouched, small_convnet, with_batch_statistics
from ttapca.errors import AttachError


def plain_shot(model: nn.Module, *, forgetting: str) -> list[Tensor]:
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
            p = torch.softmax(head(body(x)), 1)
            marginal = p.mean(0)
            loss = -(p * p.log()).sum(1).mean() + (marginal * marginal.log()).sum()
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
def test_equals_a_plain_loop(make, forgetting: str) -> None:
    expected = plain_shot(make(), forgetting=forgetting)
    adapter = ttapca.adapt(make(), "shot", forgetting=forgetting, steps=2)
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
