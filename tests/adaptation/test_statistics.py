"""BatchNorm with statistics of the source, of the batch, and of mixtures of both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from oracles import assert_same_picture, images, picture_of, small_convnet
from ttapca.adaptation.surfaces import BatchNormStatistics
from ttapca.errors import ShapeError
from ttapca.support.norm_layers import LARGE

X = images(12, seed=8)


def normalised(alpha: float, layer: nn.Module, x: Tensor) -> Tensor:
    surface = BatchNormStatistics(alpha)
    surface.attach(layer)
    output = layer(x)
    surface.detach()
    return output


def with_statistics_of(data: Tensor, layer: nn.Module) -> nn.Module:
    """Plain BatchNorm whose running statistics are those of `data`, population variance."""
    twin = copy.deepcopy(layer).eval()
    dims = [d for d in range(data.dim()) if d != 1]
    with torch.no_grad():
        twin.running_mean.copy_(data.mean(dims))
        twin.running_var.copy_(data.var(dims, correction=0))
    return twin


@pytest.mark.parametrize("prior", [0.0, 16.0])
def test_an_empty_batch_stays_empty(prior: float) -> None:
    layer = nn.BatchNorm2d(3).eval()
    BatchNormStatistics(0.5, prior=prior).attach(layer)
    assert layer(torch.zeros(0, 3, 4, 4)).shape == (0, 3, 4, 4)


LAYERS = {
    "1d": (nn.BatchNorm1d(4), (4,)),
    "1d over time": (nn.BatchNorm1d(3), (3, 5)),
    "2d": (nn.BatchNorm2d(3), (3, 4, 4)),
    "2d without affine": (nn.BatchNorm2d(3, affine=False), (3, 4, 4)),
    "3d": (nn.BatchNorm3d(2), (2, 2, 3, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("source_size", "batch_size"), [(30, 10), (10, 30), (20, 20)])
def test_the_mixture_is_the_statistics_of_the_pooled_data(
    name: str, source_size: int, batch_size: int
) -> None:
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double().eval()
    source, batch = images(source_size, shape=shape), images(batch_size, 7, shape) * 2 + 1
    layer = with_statistics_of(source, layer)
    if layer.affine:
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
            layer.bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    alpha = batch_size / (source_size + batch_size)
    expected = with_statistics_of(torch.cat([source, batch]), layer)(batch)
    torch.testing.assert_close(normalised(alpha, layer, batch), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_source_and_batch_are_what_torch_computes(name: str) -> None:
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double().eval()
    x = images(10, shape=shape)
    assert torch.equal(normalised(0.0, layer, x), layer(x))
    trained = copy.deepcopy(layer).train()
    assert torch.equal(normalised(1.0, layer, x), trained(x))


@given(alpha=st.floats(0.001, 0.999))
@settings(deadline=None, max_examples=20)
def test_gradients_pass_through_the_statistics(alpha: float) -> None:
    layer = nn.BatchNorm2d(2).double().eval()
    surface = BatchNormStatistics(alpha)
    surface.attach(layer)
    x = images(3, shape=(2, 2, 2)).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_nothing_is_written_and_training_mode_is_no_switch(alpha: float) -> None:
    model = small_convnet()
    before, plain = picture_of(model), model(X)
    surface = BatchNormStatistics(alpha)
    surface.attach(model)
    expected = model(X)
    assert torch.equal(model.train()(X), expected)
    model(X).sum().backward()
    assert torch.equal(model.eval()(X), plain) == (alpha == 0)
    surface.enabled = False
    assert torch.equal(model(X), plain)
    surface.detach()
    surface.detach()
    assert_same_picture(before, picture_of(model))


class WithActivation(nn.BatchNorm2d):
    """A layer as timm has them: it normalises, in its own way, and does more."""

    def forward(self, x: Tensor) -> Tensor:
        moments = None if self.training else self.running_mean, self.running_var
        return nn.functional.batch_norm(
            x, *moments, self.weight, self.bias, self.training, 0.1, self.eps
        ).relu()


def with_activation(model: nn.Module) -> nn.Module:
    """The same network, with the first activation inside of its BatchNorm layer."""
    twin = copy.deepcopy(model)
    twin.bn1.__class__, twin.act = WithActivation, nn.Identity()
    return twin


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bn", {"alpha": 0.0}),
        ("bn", {"alpha": 0.3}),
        ("bn", {"alpha": 1.0}),
        ("tent", {"lr": 0.1}),
        ("rotta", {"update_every": 12}),
        ("wiener", {}),
    ],
)
def test_what_a_layer_does_beside_normalising_stays(
    method: str, options: dict[str, Any], training: bool
) -> None:
    model = small_convnet()
    found = []
    for network in (model, with_activation(model)):
        if method == "wiener":
            options = {"filter": ttapca.fit(network, "conv1", images(150), 30)}
        before = picture_of(network.train(training))
        with ttapca.adapt(network, method, forgetting="online", **options) as adapter:
            found.append(torch.stack([adapter(images(12, seed=seed) + 2) for seed in range(3)]))
        assert_same_picture(before, picture_of(network))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_layers_without_running_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3)).double()
    surface = BatchNormStatistics(0.5)
    surface.attach(model)
    assert "forward" not in vars(model[0])
    assert "forward" in vars(model[1])
    assert len(surface.layers) == 1


def test_one_value_a_channel_has_no_variance() -> None:
    layer = nn.BatchNorm1d(4).eval()
    surface = BatchNormStatistics(1.0)
    surface.attach(layer)
    with pytest.raises(ShapeError, match=r"more than one value.*\(1, 4\)"):
        layer(torch.zeros(1, 4))
    surface.detach()
    for alpha in (0.0, 0.4):  # source and mixed statistics serve a batch of one
        assert torch.isfinite(normalised(alpha, layer, torch.ones(1, 4))).all()


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_large_batch_is_normalised_alike_with_gradients_and_without(
    alpha: float, dtype: torch.dtype
) -> None:
    x = torch.randn(64, 16, 20, 20, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    assert x.numel() >= LARGE
    layer = nn.BatchNorm2d(16).to(dtype)
    with torch.no_grad():
        layer.running_mean.fill_(0.5)
        layer.weight.copy_(torch.linspace(0.5, 2, 16))
        quick = normalised(alpha, layer, x)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(quick, normalised(alpha, layer, x), rtol=0, atol=tolerance)
    assert quick.dtype == dtype
