from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import (
    BATCHES,
    X,
    assert_follows,
    both_ways,
    every_norm,
    plain_ratio,
    plain_slr,
    samples,
)
from oracles import images, layer_norm_net, left_untouched, small_convnet
from ttapca.errors import AttachError, ShapeError
from ttapca.methods.slr import InputTransform, hard_likelihood_ratio, soft_likelihood_ratio


@every_norm
@both_ways
@pytest.mark.parametrize("likelihood", ["soft", "hard"])
def test_equals_a_plain_loop(make, forgetting: str, likelihood: str) -> None:
    options = {"forgetting": forgetting, "likelihood": likelihood, "steps": 2}
    adapter = ttapca.adapt(make(), "slr+it", channels=3, **options)
    (transform,) = (s for s in adapter.surfaces if isinstance(s, InputTransform))
    assert_follows(adapter, plain_slr(make(), transform, BATCHES, **options), atol=1e-6)
    assert (adapter.updates, adapter.skipped) == (20, 0)


def test_models_that_cannot_be_served() -> None:
    model = layer_norm_net()
    with left_untouched(model, X), pytest.raises(AttachError, match="has no convolution"):
        ttapca.adapt(model, "slr+it")


# The ratios.


@pytest.mark.parametrize("how", ["soft", "hard"])
def test_ratios_by_their_definition(how: str) -> None:
    ratio = soft_likelihood_ratio if how == "soft" else hard_likelihood_ratio
    logits = images(20, shape=(7,))
    torch.testing.assert_close(ratio(logits).mean(), plain_ratio(samples(logits), how))
    dense = logits.reshape(2, 10, 7).movedim(2, 1)
    torch.testing.assert_close(ratio(dense).flatten(), ratio(logits))


@pytest.mark.parametrize("ratio", [soft_likelihood_ratio, hard_likelihood_ratio])
def test_certain_predictions_keep_their_gradient(ratio) -> None:
    logits = torch.tensor([[90.0, 0.0, -90.0]], requires_grad=True)
    value = ratio(logits)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.item() == pytest.approx(-90.0)
    assert gradient[0, 0].item() == pytest.approx(-1.0)


# The surface.


def test_the_transformation_starts_as_the_identity_of_its_own_seed() -> None:
    model = small_convnet()
    plain = model(X)
    with left_untouched(model, X):
        transform = InputTransform(seed=3)
        transform.attach(model)
        assert torch.equal(model(X), plain)
        assert torch.equal(model(input=X), plain)
        transform.detach()
        transform.detach()
    twin, other = InputTransform(seed=3), InputTransform(seed=4)
    for surface in (twin, other):
        surface.attach(small_convnet())
    weights = transform.residual[0].weight
    assert torch.equal(twin.residual[0].weight, weights)
    assert not torch.equal(other.residual[0].weight, weights)


def test_a_model_that_calls_itself_is_transformed_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x, again=False) if again else x

    model = Twice()
    transform = InputTransform(3)
    transform.attach(model)
    with torch.no_grad():
        transform.shift.fill_(1.0)
    x = torch.zeros(1, 3, 2, 2)
    assert torch.equal(model(x), x + 1)
    with pytest.raises(ShapeError, match="given no tensor"):
        model("x")
    assert torch.equal(model(x), x + 1)  # the pass that failed was counted out
    with pytest.raises(ShapeError, match=r"\(batch, 3, height, width\); found \(1, 2\)"):
        model(torch.zeros(1, 2))
    transform.enabled = False
    assert transform.enabled is False
    assert torch.equal(model(x), x)
