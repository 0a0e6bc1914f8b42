"""`tent` and `bn`: against the form that their papers give, and over a filter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import affine_with_batch_statistics
from oracles import (
    group_norm_net,
    images,
    layer_norm_net,
    plain_entropy,
    small_convnet,
)

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def official_tent(
    model: nn.Module, batches: list[Tensor], *, episodic: bool, steps: int, lr: float
) -> list[Tensor]:
    """TENT as its paper describes it: a copy of the model in training mode, torch's own Adam."""
    network, parameters = affine_with_batch_statistics(model)
    start = copy.deepcopy(network.state_dict())
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.999))
    fresh = copy.deepcopy(optimizer.state_dict())
    outputs = []
    for x in batches:
        if episodic:
            network.load_state_dict(start)
            optimizer.load_state_dict(copy.deepcopy(fresh))
        for _ in range(steps):
            logits = network(x)
            optimizer.zero_grad()
            plain_entropy(logits).backward()
            optimizer.step()
        outputs.append(logits.detach())
    return outputs


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("forgetting", ["episodic", "online"])
@pytest.mark.parametrize("steps", [1, 3])
def test_tent_equals_its_official_form(make: Any, forgetting: Any, steps: int) -> None:
    episodic = forgetting == "episodic"
    expected = official_tent(make(), BATCHES, episodic=episodic, steps=steps, lr=1e-2)
    adapter = ttapca.adapt(make(), "tent", forgetting=forgetting, steps=steps, lr=1e-2)
    for x, reference in zip(BATCHES, expected, strict=True):
        # Adam divides by roots of squared gradients, and so enlarges what another CPU rounds.
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-8)


def plain_opinion_entropy(logits: Tensor) -> Tensor:
    """COME, row by row: the gradient through the length of the logits is left out by hand."""
    total = torch.zeros((), dtype=torch.float64)
    for row in logits:
        length = row.detach().norm()
        z = row / row.norm() * length
        evidence = [torch.exp(each) for each in z]
        whole = sum(evidence) + len(evidence)
        opinion = [each / whole for each in evidence] + [len(evidence) / whole]
        total = total - sum(each * torch.log(each) for each in opinion)
    return total / len(logits)


@pytest.mark.parametrize("make", [small_convnet, layer_norm_net])
def test_come_is_tent_on_the_entropy_of_opinions(make: Any) -> None:
    network, parameters = affine_with_batch_statistics(make())
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    come = ttapca.adapt(make(), "come", forgetting="online", lr=1e-2)
    tent = ttapca.adapt(make(), "tent", forgetting="online", lr=1e-2, entropy="opinion")
    for x in BATCHES:
        logits = network(x)
        found = come(x)
        torch.testing.assert_close(found, logits.detach(), rtol=0, atol=1e-8)
        assert torch.equal(found, tent(x))
        optimizer.zero_grad()
        plain_opinion_entropy(logits).backward()
        optimizer.step()


def test_one_episodic_step_of_tent_is_bn_bit_for_bit() -> None:
    tent = ttapca.adapt(small_convnet(), "tent", forgetting="episodic")
    after = ttapca.adapt(small_convnet(), "tent", forgetting="episodic", logits="after")
    bn = ttapca.adapt(small_convnet(), "bn")
    for x in BATCHES:
        assert torch.equal(tent(x), bn(x))
        assert not torch.equal(after(x), bn(x))
    assert tent.n_parameters == 28


def test_tent_over_a_filter_moves_both() -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", images(150), 20)
    adapter = ttapca.adapt(small_convnet(), "tent", filter=fitted, forgetting="online", lr=0.05)
    gains = adapter.surfaces[-1].filter.gains().detach()
    adapter(X)
    assert adapter.n_parameters == 28 + 20
    assert not torch.equal(adapter.surfaces[-1].filter.gains().detach(), gains)
    exponential = ttapca.adapt(small_convnet(), "tent", filter=fitted, gain="exponential")
    assert not torch.equal(exponential(X), ttapca.adapt(small_convnet(), "tent", filter=fitted)(X))


@pytest.mark.parametrize(("size", "prior"), [(1, 16.0), (4, 16.0), (12, 16.0), (12, 0.0)])
def test_a_prior_weighs_a_batch_by_its_size(size: int, prior: float) -> None:
    weighed = ttapca.adapt(small_convnet(), "bn", prior=prior)
    fixed = ttapca.adapt(small_convnet(), "bn", alpha=size / (size + prior))
    assert torch.equal(weighed(X[:size]), fixed(X[:size]))
