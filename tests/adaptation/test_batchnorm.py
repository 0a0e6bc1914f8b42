"""BatchNorm with statistics of the source, the batch, the stream, and of mixtures of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from adapters import adapted
from oracles import assert_same_picture, images, picture_of, small_convnet
from ttapca.adaptation.surfaces import BatchNormStatistics
from ttapca.errors import ShapeError
from ttapca.methods.method import Mixture
from ttapca.spectral.stream import Stream
from ttapca.support.channel_moments import LARGE, channel_moments, quick_moments

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
    assert "alpha=0.5, layers=1" in repr(surface)


def test_one_value_a_channel_has_no_variance() -> None:
    layer = nn.BatchNorm1d(4).eval()
    surface = BatchNormStatistics(1.0)
    surface.attach(layer)
    with pytest.raises(ShapeError, match=r"more than one value.*\(1, 4\)"):
        layer(torch.zeros(1, 4))
    surface.detach()
    for alpha in (0.0, 0.4):  # source and mixed statistics serve a batch of one
        assert torch.isfinite(normalised(alpha, layer, torch.ones(1, 4))).all()


@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0], ids=["centred", "near", "far"])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed", "flat"])
@pytest.mark.parametrize("of", [quick_moments, torch.no_grad()(channel_moments)])
def test_moments_are_those_of_float64(
    of: Callable[[Tensor], tuple[Tensor, Tensor]], layout: str, offset: float
) -> None:
    shape = (300, 5) if layout == "flat" else (40, 5, 8, 9)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2 + offset
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.mT
    values = x.double().transpose(0, 1).reshape(5, -1).numpy()
    mean, var = of(x)
    assert mean.dtype == var.dtype == torch.float32
    np.testing.assert_allclose(mean.double(), values.mean(1), rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(var.double(), values.var(1), rtol=2e-5)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0], ids=["centred", "near", "far"])
def test_moments_of_one_sample_are_those_of_float64(offset: float) -> None:
    x = torch.randn((1, 5, 16, 9), generator=torch.Generator().manual_seed(0)) * 2 + offset
    x[:, 4] = 0.0  # a channel that does not vary
    with torch.no_grad():
        mean, var = channel_moments(x)
    values = x[0].double().flatten(1).numpy()
    assert mean.dtype == var.dtype == torch.float32
    np.testing.assert_allclose(mean.double(), values.mean(1), rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(var.double(), values.var(1), rtol=1e-4, atol=1e-12)


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


# A stream of batches.


def follow(sizes: list[int], memory: float = math.inf) -> tuple[Tensor, Tensor, np.ndarray]:
    """The last batch as a layer that follows a stream gives it, all data, and their weights."""
    layer, stream = nn.BatchNorm2d(3).double().eval(), Stream(memory)
    surface = BatchNormStatistics(1.0, follow=True)
    surface.attach(layer, stream)
    data = images(sum(sizes), shape=(3, 4, 4)) * 2 + 1
    for batch in data.split(sizes):
        stream.start_batch(len(batch))
        with torch.no_grad():
            output = layer(batch)
            layer(batch + 5)  # a further pass does not count
        stream.end_batch()
    newer = np.repeat([sum(sizes[n + 1 :]) for n in range(len(sizes))], sizes)
    return output, data, np.exp(-newer / memory)


@pytest.mark.parametrize("memory", [math.inf, 100.0, 7.0])
@pytest.mark.parametrize("sizes", [[30], [5, 30, 6, 20], [9, 1, 1, 1]], ids=str)
def test_a_stream_is_one_large_batch_whose_past_fades(sizes: list[int], memory: float) -> None:
    output, data, weights = follow(sizes, memory)
    values = data.numpy().transpose(1, 0, 2, 3).reshape(3, len(data), -1)
    weight = np.broadcast_to(weights[:, None] / (weights.sum() * 16), values.shape[1:])
    mean = (values * weight).sum((1, 2))
    var = ((values - mean[:, None, None]) ** 2 * weight).sum((1, 2))
    last = data[-sizes[-1] :].numpy()
    expected = (last - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    np.testing.assert_allclose(output, expected, atol=1e-10)


def test_the_first_single_image_is_normalised_as_the_source_and_counts_for_nothing() -> None:
    output, data, _ = follow([1])
    assert torch.equal(output, nn.BatchNorm2d(3).double().eval()(data))
    output, data, _ = follow([1, 20])
    alone = with_statistics_of(data[1:], nn.BatchNorm2d(3).double())(data[1:])
    torch.testing.assert_close(output, alone)


def test_single_images_of_a_stream_come_to_count_as_much_as_a_batch() -> None:
    shifted = 3 * images(150, seed=9)
    batch, online = (adapted("wiener", order="shuffled") for _ in range(2))
    wanted, start = batch(shifted), adapted("source")(shifted[-1:])
    for image in shifted.split(1):
        found = online(image)
    far, near = ((each - wanted[-1:]).norm() for each in (start, found))
    assert near < 0.1 * far


def test_the_weight_of_a_single_image_is_a_choice() -> None:
    shifted = 3 * images(1, seed=9)
    source = adapted("wiener", statistics="source")(shifted)
    assert torch.equal(adapted("wiener", statistics=Mixture(alone=0.0))(shifted), source)
    assert not torch.equal(adapted("wiener")(shifted), source)


def alone(sizes: list[int], unusual: float, shape: tuple[int, ...] = (3, 4, 4)) -> Tensor:
    """The last batch of a stream that has not surely shifted, and all that there was."""
    layer, stream = nn.BatchNorm2d(3).double().eval(), Stream()
    stream.declare_certainty("certainty")
    stream.declare_unusual("unusual")
    stream.write("unusual", unusual)
    BatchNormStatistics((0.1, 0.9), prior=16.0, follow=True, alone=0.3).attach(layer, stream)
    for batch in (images(sum(sizes), shape=shape) * 2 + 1).split(sizes):
        stream.start_batch(len(batch))
        with torch.no_grad():
            output = layer(batch)
        stream.end_batch()
    return output


@pytest.mark.parametrize("unusual", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 2], [16], [17], [200]], ids=str)
def test_few_images_count_without_a_sure_shift(sizes: list[int], unusual: float) -> None:
    data = images(sum(sizes), shape=(3, 4, 4)) * 2 + 1
    # A third of the weight for a usual image, all of it for an unusual one; none from 17 on.
    weight = 0.3 * (1 + 2 * unusual) / 3 * max(0.0, 1 - (len(data) - 1) / 16)
    values = data.numpy().transpose(1, 0, 2, 3).reshape(3, -1)
    mean, second = values.mean(1), (values**2).mean(1)
    mixed = weight * mean  # the source has mean 0 and variance 1
    var = weight * second + (1 - weight) - mixed**2
    last = data[-sizes[-1] :].numpy()
    expected = (last - mixed[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    np.testing.assert_allclose(alone(sizes, unusual), expected, atol=1e-10)


def test_an_image_of_one_number_for_each_channel_says_nothing() -> None:
    data = images(1, shape=(3, 1, 1)) * 2 + 1
    assert torch.equal(alone([1], 1.0, (3, 1, 1)), nn.BatchNorm2d(3).double().eval()(data))
