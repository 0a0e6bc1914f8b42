"""The model is as it was, bit for bit: while it adapts, while that is switched off, and after."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import ttapca
from adapters import BATCHES, DATA, NETWORKS, X, adapted, same
from oracles import assert_same_picture, images, picture_of, small_convnet
from ttapca.adaptation.surfaces import NormAffine, Surface
from ttapca.errors import AttachError
from ttapca.methods.slr import InputTransform


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_of_every_method(method: str) -> None:
    model = small_convnet()
    plain = model(X)
    model.train()
    model.bn2.eval()
    before, own = picture_of(model), list(model.parameters())
    adapter, random = adapted(method, model=model), torch.random.get_rng_state()
    for x in BATCHES:
        adapter(x)
    # While it adapts.
    during = picture_of(model)
    for part in ("parameters", "buffers", "modules"):
        assert before[part] == during[part]
    for name, tensor in before["state"].items():
        assert torch.equal(tensor, during["state"][name])
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, same_one in zip(model.parameters(), own, strict=True):
        assert parameter is same_one
        assert parameter.requires_grad
    # While that is switched off, also twice.
    state = copy.deepcopy(adapter.state_dict())
    with adapter.disabled():
        assert torch.equal(adapter(X), plain)
        assert torch.equal(model(X), plain)
        with adapter.disabled():
            assert torch.equal(model(X), plain)
        assert torch.equal(model(X), plain)
    assert same(adapter.state_dict(), state)
    if method not in ("source", "lame", "memo", "t3a"):  # these leave the model itself as it is
        assert not torch.equal(model(X), plain)
    # After it; copies are freed by themselves.
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(adapter)).model):
        assert torch.equal(ttapca.detach(twin).eval()(X), plain)
        assert "forward" not in vars(twin)
    assert same(adapter.state_dict(), state)
    assert adapter.detach() is adapter.detach() is model
    assert_same_picture(before, picture_of(model))
    assert torch.equal(torch.random.get_rng_state(), random)
    with pytest.raises(AttachError, match="was detached"):
        adapter(X)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_training_mode_has_no_effect(method: str) -> None:
    """With it, BatchNorm would write into its buffers, and dropout would draw."""
    model = small_convnet()
    model.act = nn.Sequential(nn.ReLU(), nn.Dropout(0.5)).eval()
    whole = nn.Sequential(model)
    before, plain = picture_of(model), model(X)
    with adapted(method, model=model, forgetting="episodic") as adapter:
        expected = adapter(X)
        for module in (whole, model, model.bn1, model.act):
            module.train()
            assert torch.equal(adapter(X), expected)
            module.train()
            with adapter.disabled():
                assert torch.equal(whole(X), plain)
    assert_same_picture(before, picture_of(model))


@pytest.mark.parametrize("norm", NETWORKS)
@pytest.mark.parametrize("method", ["tent", "wiener", "cotta", "slr+it"])
def test_a_lost_adapter_is_no_trap(method: str, norm: str) -> None:
    model = NETWORKS[norm]().train()
    before = picture_of(model)
    adapted(method, norm, model=model)(X)
    gc.collect()
    assert ttapca.detach(model) is model
    assert_same_picture(before, picture_of(model))
    assert_same_picture(before, picture_of(ttapca.detach(model)))  # and there is nothing left to do


def test_everything_comes_off_that_was_put_on_without_an_adapter() -> None:
    model, twin = (nn.Sequential(small_convnet(), nn.Identity()).eval() for _ in range(2))
    before = picture_of(model)
    ttapca.adapt(model[0], "bn")  # of a part of the model
    ttapca.attach(model, ttapca.fit(twin, "0.conv2", DATA, 10))
    NormAffine().attach(model)
    ttapca.detach(model)
    assert_same_picture(before, picture_of(model))


def test_an_adapter_is_a_context_manager() -> None:
    model = small_convnet().train()
    before = picture_of(model)
    with adapted("tent", model=model) as adapter:
        assert adapter(X).shape == (12, 5)
    assert_same_picture(before, picture_of(model))
    with pytest.raises(RuntimeError, match="channels"), adapted("tent", model=model) as adapter:
        adapter(torch.zeros(4, 5, 6, 6).double())
    assert_same_picture(before, picture_of(model))


def test_surfaces_are_taken_away_in_any_order() -> None:
    """Two wrap the `forward` of one module, and a stranger's is below them."""
    layer = nn.BatchNorm1d(4).double().eval()
    own = layer.forward
    layer.forward = lambda x: own(x) + 1
    x = images(9, shape=(4,))
    expected = layer(x)
    for order in ((0, 1), (1, 0)):
        surfaces: list[Surface] = [NormAffine(), InputTransform(channels=4)]
        for surface in surfaces:
            surface.attach(layer)
        for number in order:
            surfaces[number].detach()
            surfaces[number].detach()
        assert torch.equal(layer(x), expected)
    assert vars(layer)["forward"](x).shape == x.shape


def test_a_model_that_is_a_normalisation_layer() -> None:
    layer = nn.BatchNorm1d(5).double().eval()
    before = picture_of(layer)
    adapter = ttapca.adapt(layer, "tent", forgetting="online", lr=0.1, logits="after")
    x = images(20, shape=(5,))
    assert not torch.equal(adapter(x), ttapca.adapt(nn.BatchNorm1d(5).double(), "bn")(x))
    adapter.detach()
    assert_same_picture(before, picture_of(layer))
