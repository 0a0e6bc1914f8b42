"""Channel statistics of GroupNorm and LayerNorm: measured by `fit`, saved and checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from fitting.parted import rewrite
from ttapca.errors import SavedFilterError
from ttapca.fitting.activations import ModelInputs
from ttapca.fitting.source_statistics import (
    KEPT_PARTS,
    KEPT_SAMPLES,
    MEASURED,
    ONE_IN,
    ChannelSums,
    SourceChannels,
    Subsample,
    choose_subsample,
)
from ttapca.spectral.source_classes import LayerClasses


class Transformer(nn.Module):
    """Patches, one block with LayerNorm before attention, the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patches = nn.Conv2d(2, 8, 3, stride=3)
            self.block = nn.TransformerEncoderLayer(
                8, 2, 12, dropout=0.0, batch_first=True, norm_first=True
            )
            self.norm = nn.LayerNorm(8)
            self.fc = nn.Linear(8, 5)
            for norm in (self.block.norm1, self.block.norm2, self.norm):
                nn.init.uniform_(norm.weight, 0.5, 2.0)
                nn.init.uniform_(norm.bias, -1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc(self.norm(self.block(tokens)).mean(1))


@pytest.fixture
def model() -> nn.Module:
    return Transformer().eval()


@pytest.fixture
def grouped_network() -> nn.Module:
    return group_norm_network()


def group_norm_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.GroupNorm(1, 6, affine=False),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).eval()


def images(n: int, seed: int = 0, side: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(n, 2, side, side, generator=generator)
    return rough + 2 * rough.mean((2, 3), keepdim=True) + torch.tensor([[[0.5]], [[-1.0]]])


def grouped(x: Tensor, groups: int, eps: float = 1e-5) -> np.ndarray:
    """GroupNorm without scale and shift, by numpy."""
    shape = x.shape
    split = x.double().numpy().reshape(shape[0], groups, -1)
    mean, var = split.mean(2, keepdims=True), split.var(2, keepdims=True)
    return ((split - mean) / np.sqrt(var + eps)).reshape(shape)


def rows(x: Tensor, eps: float = 1e-5) -> np.ndarray:
    """LayerNorm without scale and shift, token by token."""
    found = x.detach().double().numpy().copy()
    for image in found:
        for token in image.reshape(-1, found.shape[-1]):
            token[:] = (token - token.mean()) / np.sqrt(((token - token.mean()) ** 2).mean() + eps)
    return found


def inputs_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    """What a layer of the untouched model is given; a hook keeps torch off its fast path."""
    seen: list[Tensor] = []
    layer = model.get_submodule(path)
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0]


PATHS = ["block.norm1", "block.norm2", "norm"]


def test_fitting_measures_the_channels_of_groups(grouped_network: nn.Module) -> None:
    data = images(300, side=6)
    fitted = ttapca.fit(grouped_network, "0", data, 20)
    assert set(fitted.group_norm_) == {"1", "4"}
    with torch.no_grad():
        first, second = grouped_network[0](data), grouped_network[:4](data)
    for path, values in (("1", grouped(first, 2)), ("4", grouped(second, 1))):
        mean, var = fitted.group_norm_[path].double()
        np.testing.assert_allclose(mean, values.mean((0, 2, 3)), atol=1e-5)
        np.testing.assert_allclose(var, values.var((0, 2, 3)), rtol=1e-4)


def calls_of(model: nn.Module) -> list[int]:
    """How many samples come to its end, with each pass."""
    calls: list[int] = []
    model[6].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    return calls


def test_long_streams_are_measured_in_part_and_evenly(grouped_network: nn.Module) -> None:
    calls = calls_of(grouped_network)
    ttapca.fit(
        grouped_network, "0", (images(64, seed, side=6) for seed in range(700)), 20, route="folded"
    )
    images_read = 700 * 64
    kept = 2 * KEPT_PARTS * KEPT_SAMPLES  # predicted again, with the filter and without
    # Nobody knows how many will come: at first all are measured, and ever fewer later.
    expected = MEASURED * (1 + math.log(ONE_IN)) + (images_read - MEASURED * ONE_IN) / ONE_IN
    assert sum(calls) == pytest.approx(expected + kept + 2, rel=0.05)


def test_several_passes_measure_once(grouped_network: nn.Module) -> None:
    calls = calls_of(grouped_network)
    ttapca.fit(grouped_network, "0", [images(100, side=6)], 20, route="randomised")
    # Two samples to see shapes, a hundred measured, some predicted with the filter and without, and
    # as they are and mirrored.
    assert calls == [2, 100, 16, 16, 16, 16]


def test_fitting_measures_the_channels_of_tokens(model: nn.Module) -> None:
    data = images(300)
    fitted = ttapca.fit(model, "patches", data, 20)
    assert list(fitted.layer_norm_) == PATHS
    assert fitted.group_norm_ == {}
    for path in PATHS:
        values = rows(inputs_of(model, path, data)).reshape(-1, 8)
        mean, var = fitted.layer_norm_[path].double()
        np.testing.assert_allclose(mean, values.mean(0), atol=1e-5)
        np.testing.assert_allclose(var, values.var(0), rtol=1e-4)


def test_fitting_measures_what_classes_do_to_them(model: nn.Module) -> None:
    data = images(300)
    classes = ttapca.fit(model, "patches", data, 20).classes_
    assert classes is not None
    with torch.no_grad():
        shares = model(data).double().softmax(1).numpy()
    values = rows(inputs_of(model, "norm", data))
    of_class = sum(share * image.mean(0) for share, image in zip(shares[:, 3], values, strict=True))
    expected = of_class / shares[:, 3].sum() - values.mean((0, 1))
    found, _ = LayerClasses(classes, {"norm": 8}).corrections(torch.eye(5)[3:4])
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensor: tensor[0], "shape"),
        (lambda tensor: -1 - tensor, "a mean and a variance"),
        (lambda tensor: tensor / 0, "finite"),
    ],
)
def test_damaged_ones_are_refused(
    model: nn.Module, tmp_path: Path, change: Any, fault: str
) -> None:
    ttapca.fit(model, "patches", images(64), 20).save(tmp_path / "filter")
    name = "layer_norm:norm"
    rewrite(tmp_path / "filter", lambda _, tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(SavedFilterError, match=f"`layer_norm:norm` .* {fault}"):
        ttapca.load(tmp_path / "filter")


class LayerNorm2d(nn.LayerNorm):
    """As many networks have it: the channels come second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class TokensFirst(nn.Module):
    """A network whose LayerNorm sees (tokens, batch, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1, 2).transpose(0, 1)).mean(0)


@pytest.mark.parametrize(
    "make", [lambda: LayerNorm2d(2), lambda: nn.LayerNorm([2, 9, 9]), TokensFirst]
)
def test_layers_whose_channels_or_images_are_elsewhere_are_left_alone(make: Any) -> None:
    channels, sums = SourceChannels(nn.Sequential(make())), ChannelSums()
    channels.measure(ModelInputs((images(30),), {}), sums)
    assert channels.of(nn.LayerNorm, sums) == {}
    assert channels.by_class(sums) is None


# Which images are run through the whole network.


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(1, 40_000), st.integers(1, 12))
def test_measured_images_are_spread_over_all_data(wanted: int, images: int, period: int) -> None:
    """Over every stretch of the data, and over classes that take turns."""
    measured = Subsample(wanted, images).of(torch.arange(images))
    expected = min(images, max(wanted, images // ONE_IN))
    assert abs(int(measured.sum()) - expected) <= 3
    for part in measured.chunk(5):
        assert abs(int(part.sum()) - len(part) * expected / images) <= 4
    for first in range(period):
        part = measured[first::period]
        assert abs(int(part.sum()) - len(part) * expected / images) <= 8


@settings(deadline=None, max_examples=20)
@given(st.integers(20, 300), st.integers(1, 40_000))
def test_without_a_known_length_weights_make_up_for_rates(wanted: int, images: int) -> None:
    """The first images are all measured; later ones stand for those around them."""
    rule, positions = Subsample(wanted, None), torch.arange(images)
    measured = rule.of(positions)
    assert measured[:wanted].all()
    assert rule.rates(positions).min() >= 1 / ONE_IN
    weights = rule.rates(positions[measured]).reciprocal()
    assert float(weights.sum()) == pytest.approx(images, rel=0.05, abs=3 * ONE_IN)


def test_nothing_is_measured_where_nothing_is_needed() -> None:
    """A thousand classes cannot be told apart by 700 images, and BatchNorm remembers the rest."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    rule = choose_subsample(model, 700, 1000)
    assert not rule.needed
    assert not rule.of(torch.arange(700)).any()
    with_groups = nn.Sequential(*model, nn.GroupNorm(1, 2))
    assert choose_subsample(with_groups, 700, 1000).needed
    unknown = choose_subsample(model, None, 10)
    assert unknown.of(torch.arange(MEASURED)).all()


def test_a_network_without_classes_is_run_only_for_layers_that_remember_nothing() -> None:
    """A backbone that returns features has no classes to tell apart."""
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    for images in (2000, None):
        rule = choose_subsample(backbone, images, 0)
        assert not rule.needed
        assert choose_subsample(nn.Sequential(*backbone, nn.GroupNorm(1, 2)), images, 0).needed


@pytest.mark.parametrize("known", [True, False])
def test_a_fit_does_not_depend_on_the_order_of_the_classes(known: bool) -> None:
    """Sorted by class, as pictures in folders are, and shuffled."""
    torch.manual_seed(0)
    classes = torch.arange(10).repeat_interleave(400)
    data = torch.randn(4000, 1, 6, 6) + 3 * torch.eye(10, 36)[classes].view(-1, 1, 6, 6)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(1, 4), nn.Flatten()
    )
    model.append(nn.Linear(144, 10))
    found = []
    for order in (torch.arange(4000), torch.randperm(4000)):
        batches = data[order].split(250)
        fitted = ttapca.fit(model, "0", batches if known else iter(batches))
        assert fitted.classes_ is not None
        found.append(fitted)
    one, two = (fitted.classes_ for fitted in found)
    torch.testing.assert_close(one.shares, two.shares, atol=0.01, rtol=0)
    for path in ("1", "2"):
        spread = one.layers[path][0][1].sqrt()
        away = (one.layers[path][0] - two.layers[path][0]).abs() / spread
        assert float(away.max()) < 0.1, path
    torch.testing.assert_close(*(each.group_norm_["2"] for each in found), atol=0.05, rtol=0.05)
