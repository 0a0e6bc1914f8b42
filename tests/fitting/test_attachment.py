from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ttapca
from oracles import DensePCA, assert_same_picture, images, left_untouched, picture_of, small_convnet
from ttapca.errors import AttachError, LayerNotFoundError, ShapeError

DATA = images(150)
X = images(12, seed=8)


@pytest.fixture(scope="module", params=["conv1", "bn1"], ids=["folded", "unfolded"])
def fitted(request: pytest.FixtureRequest) -> ttapca.FittedFilter:
    return ttapca.fit(small_convnet(), request.param, DATA, 20)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.bfloat16, 0.05)],
)
def test_the_filter_acts_at_its_layer(
    fitted: ttapca.FittedFilter, dtype: torch.dtype, tolerance: float
) -> None:
    model = small_convnet()
    stages = list(dict(model.named_children())).index(fitted.layer) + 1
    with torch.no_grad():
        dense = DensePCA(model[:stages](DATA))
        relative = dense.singular_values[:20] / dense.singular_values[0]
        expected = model[stages:](dense.filter(model[:stages](X), relative / (relative + 0.3)))
        attachment = ttapca.attach(model.to(dtype), fitted, "relu", initial=0.3)
        output = model(X.to(dtype))
    assert output.dtype == dtype
    assert attachment.filter.mean.dtype == torch.promote_types(dtype, torch.float32)
    assert float((output.double() - expected).abs().max() / expected.abs().max()) < tolerance
    with pytest.raises(ShapeError, match=r"found \(\d, 7, 7\)"):
        model(images(3, shape=(3, 7, 7)).to(dtype))


def test_the_model_keeps_everything_while_it_is_filtered(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    before = picture_of(model)
    attachment = ttapca.attach(model, fitted, "relu")
    during = picture_of(model)
    for part in ("parameters", "buffers", "modules", "training"):
        assert before[part] == during[part]
    assert before["state"].keys() == during["state"].keys()
    model.load_state_dict(small_convnet().state_dict(), strict=True)
    attachment.detach()
    assert_same_picture(before, picture_of(model))


def test_switched_off_is_bit_identical(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    plain = model(X)
    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    filtered = model(X)
    assert not torch.equal(filtered, plain)
    with attachment.disabled():
        assert torch.equal(model(X), plain)
        with attachment.disabled():
            assert torch.equal(model(X), plain)
        assert torch.equal(model(X), plain)
    assert torch.equal(model(X), filtered)
    with pytest.raises(KeyboardInterrupt, match="stop"), attachment.disabled():
        raise KeyboardInterrupt("stop")
    assert attachment.enabled
    attachment.detach()
    attachment.detach()
    assert torch.equal(model(X), plain)


def test_copies_and_pickles_carry_the_filter(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    expected = model(X)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    attachment.detach()
    for twin in copies:
        assert torch.equal(twin(X), expected)
    twin_model, twin_attachment = copy.deepcopy((model, ttapca.attach(model, fitted)))
    twin_attachment.detach()
    assert torch.equal(twin_model(X), small_convnet()(X))


def test_the_filter_follows_the_model_to_another_device(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    attachment = ttapca.attach(model, fitted, "relu")
    model.to("meta")  # the one other device that every machine has
    assert model(X.to("meta")).device.type == "meta"
    assert attachment.filter.mean.device.type == "meta"


def test_export(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    ttapca.attach(model, fitted, "relu", initial=0.2)
    program = torch.export.export(
        model, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},)
    )
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X[:5]), model(X[:5]))


def test_a_layer_called_by_keyword() -> None:
    class Keyword(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](input=x)

    layer = nn.Linear(3, 6)
    data = images(40, shape=(3,)).float()
    attachment = ttapca.attach(nn.Sequential(layer), ttapca.fit(Keyword(layer), "0", data, 2))
    assert torch.equal(Keyword(layer)(data), nn.Sequential(layer)(data))
    with attachment.disabled():
        plain = layer(data)
    assert not torch.equal(Keyword(layer)(data), plain)


def test_one_filter_for_a_layer(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    plain = model(X)
    attachment = ttapca.attach(model, fitted)
    with left_untouched(model, X), pytest.raises(AttachError, match="has one already"):
        ttapca.attach(model, fitted)
    other = ttapca.attach(model, ttapca.fit(model, "act", DATA, 10))
    attachment.detach()
    assert not torch.equal(model(X), plain)
    other.detach()
    assert torch.equal(model(X), plain)
    with pytest.raises(LayerNotFoundError, match=r"fitted at .* no layer .* Fit a filter"):
        ttapca.attach(nn.Sequential(nn.Linear(3, 3)), fitted)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.ReLU(), "`conv1` is a ReLU"),
        (nn.Conv2d(4, 8, 3, padding=1), r"takes samples of shape \(3, 6, 6\).* Fit a filter"),
        (nn.Conv2d(3, 9, 3, padding=1), "belongs to the weights"),
        (small_convnet(seed=5).conv1, "belongs to the weights"),
    ],
    ids=["kind", "input", "output", "weights"],
)
def test_a_folded_filter_on_another_layer(layer: nn.Module, message: str) -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", DATA, 20)
    model = nn.Sequential()
    model.add_module("conv1", layer)
    with pytest.raises(AttachError, match=message):
        ttapca.attach(model, fitted)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


# `torch.compile` of a model with a filter: always right, and compiled only when needed.


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
