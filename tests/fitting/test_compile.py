"""`torch.compile` of a model with a filter: always right, and compiled only when needed."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import ttapca
from oracles import images, small_convnet

DATA = images(150)
X = images(12, seed=8)


@pytest.fixture(params=["conv1", "bn1"], ids=["folded", "unfolded"])
def fitted(request: pytest.FixtureRequest) -> ttapca.FittedFilter:
    return ttapca.fit(small_convnet(), request.param, DATA, 20)


@torch.no_grad()
def test_a_compiled_model_follows_its_filter(fitted: ttapca.FittedFilter) -> None:
    torch.compiler.reset()
    model, counter = small_convnet(), CompileCounter()
    plain = model(X)
    compiled = torch.compile(model, backend=counter)
    torch.testing.assert_close(compiled(X), plain)
    assert counter.frame_count == 1

    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    filtered = model(X)
    assert not torch.allclose(filtered, plain)
    torch.testing.assert_close(compiled(X), filtered)
    assert counter.frame_count == 2  # attached

    attachment.filter.gain.gamma.add_(0.3)
    for seed in (9, 10):
        x = images(12, seed=seed)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 2  # neither other gains nor other data

    with attachment.disabled():
        torch.testing.assert_close(compiled(X), plain)
    torch.testing.assert_close(compiled(X), model(X))
    assert counter.frame_count == 3  # one for the switch, none for switching back

    attachment.detach()
    torch.testing.assert_close(compiled(X), plain)
    assert counter.frame_count == 4  # detached


def test_gradients_reach_the_gains_of_a_compiled_model(fitted: ttapca.FittedFilter) -> None:
    torch.compiler.reset()
    model = small_convnet()
    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    gamma = attachment.filter.gain.gamma
    (expected,) = torch.autograd.grad(model(X).square().mean(), gamma)
    compiled = torch.compile(model, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(X).square().mean(), gamma)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(found, expected)
