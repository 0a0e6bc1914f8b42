from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import (
    BATCHES,
    affine_with_batch_statistics,
    assert_follows,
    both_ways,
    copied,
    every_norm,
    set_to,
)
from oracles import left_untouched, small_convnet
from ttapca.errors import AttachError


def entropy(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, 1)
    return -(p * torch.log(p)).sum(1)


def plain_sar(
    model: nn.Module, *, forgetting: str, lr: float, entropy_margin: float, recover_below: float
) -> tuple[list[Tensor], int]:
    """The paper's algorithm 1, with momentum written out; logits from before the update."""
    network, theta = affine_with_batch_statistics(model)
    start = copied(theta)
    speed, average, recoveries, outputs = None, None, 0, []
    for x in BATCHES:
        if forgetting == "episodic":
            set_to(theta, start)
            speed, average, recoveries = None, None, 0
        logits = network(x)
        outputs.append(logits.detach())
        limit = entropy_margin * math.log(logits.shape[1])
        first = entropy(logits)
        chosen = [i for i in range(len(x)) if float(first[i].detach()) < limit]
        if not chosen:
            continue
        g = torch.autograd.grad(sum(first[i] for i in chosen) / len(chosen), theta)
        length = math.sqrt(sum(float((v**2).sum()) for v in g))
        here = copied(theta)
        set_to(theta, [p + 0.05 * v / length for p, v in zip(here, g, strict=True)])
        second = entropy(network(x))
        kept = [i for i in chosen if float(second[i].detach()) < limit]
        if kept:
            loss = sum(second[i] for i in kept) / len(kept)
            g = torch.autograd.grad(loss, theta)
        set_to(theta, here)
        if not kept:
            continue
        speed = g if speed is None else [0.9 * s + v for s, v in zip(speed, g, strict=True)]
        set_to(theta, [p - lr * s for p, s in zip(here, speed, strict=True)])
        value = float(loss.detach())
        average = value if average is None else 0.9 * average + 0.1 * value
        if average < recover_below:
            set_to(theta, start)  # the weights only: the momentum goes on
            average, recoveries = None, recoveries + 1
    return outputs, recoveries


@every_norm
@both_ways
@pytest.mark.parametrize(("margin", "below"), [(0.4, 0.2), (0.9, 0.0), (0.9, 0.6), (0.9, 1.41)])
def test_equals_a_plain_loop(make, forgetting: str, margin: float, below: float) -> None:
    options = {"entropy_margin": margin, "recover_below": below, "lr": 0.05}
    expected, recoveries = plain_sar(make(), forgetting=forgetting, **options)
    adapter = ttapca.adapt(make(), "sar", forgetting=forgetting, **options)
    assert_follows(adapter, expected)
    assert adapter.mover.recoveries == recoveries
    assert adapter.skipped == 0
    if (make, forgetting, below) == (small_convnet, "online", 1.41):
        assert 0 < recoveries < len(BATCHES)  # so that momentum is seen to go on after one


def test_recovery_returns_to_the_source() -> None:
    # A threshold above all entropies: every step is undone.
    options = {"lr": 0.1, "entropy_margin": 1.0, "recover_below": 10.0, "forgetting": "online"}
    adapter = ttapca.adapt(small_convnet(), "sar", **options)
    bn = ttapca.adapt(small_convnet(), "bn")
    for x in BATCHES:
        assert torch.equal(adapter(x), bn(x))
    assert adapter.mover.recoveries == adapter.updates == len(BATCHES)
    assert "recoveries=10" in repr(adapter)


def test_layers_left_out() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer4, self.norm = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(self.layer4(self.layer1(x))))

    assert ttapca.adapt(Deep(), "sar").n_parameters == 12
    assert ttapca.adapt(Deep(), "sar", leave_out=[]).n_parameters == 36
    model, x = Deep(), torch.zeros(2, 6)
    with left_untouched(model, x), pytest.raises(AttachError, match="not left out; the model has"):
        ttapca.adapt(model, "sar", leave_out=["*"])
