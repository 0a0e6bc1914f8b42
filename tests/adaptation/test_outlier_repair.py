"""Outliers in the images are replaced before the filter sees them, and nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import assert_same_picture, images, picture_of, salted, scenes, small_convnet
from ttapca.adaptation.surfaces import OutlierRepair
from ttapca.errors import AttachError, OptionError
from ttapca.methods import PulledWiener, Wiener
from ttapca.spectral.outliers import SourceOutliers, measure, shares_of, strays

DATA = scenes(200, side=6)
CLEAN = scenes(12, seed=8, side=6)
HIT = salted(CLEAN, 0.06)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA)
WITHOUT = dataclasses.replace(FITTED, outliers_=None)


def repaired(batch: Tensor) -> Tensor:
    assert FITTED.outliers_ is not None
    return SourceOutliers(FITTED.outliers_).repaired(batch)[0]


def surface_of(adapter: ttapca.Adapter) -> OutlierRepair:
    return next(each for each in adapter.surfaces if isinstance(each, OutlierRepair))


@pytest.mark.parametrize("route", ["folded", "dct"])
def test_fit_measures_the_images_that_the_filter_acts_on(route: Any) -> None:
    found = ttapca.fit(small_convnet(), "conv1", DATA.split(30), route=route).outliers_
    assert found is not None
    assert torch.equal(found, measure(DATA))


class Doubled(nn.Module):
    """A network with a step before its first layer, as many have for normalisation."""

    def __init__(self, pad: int = 0) -> None:
        super().__init__()
        self.network = small_convnet()
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x[..., self.pad :]
        return self.network(nn.functional.pad(x, (0, self.pad)))


def test_fit_measures_at_the_layer_in_the_units_there() -> None:
    found = ttapca.fit(Doubled(), "network.conv1", DATA).outliers_
    assert found is not None
    assert torch.equal(found, measure(2 * DATA))


def test_fit_measures_nothing_where_no_image_is_filtered() -> None:
    model = small_convnet()
    for layer, options in (("act", {}), ("conv2", {}), ("conv1", {"route": "exact"})):
        assert ttapca.fit(model, layer, DATA, 10, **options).outliers_ is None  # type: ignore[arg-type]
    wide = scenes(100, side=7)[..., :6, :]  # the layer is given another shape than the model
    cut = nn.Sequential(nn.AvgPool2d((1, 2), stride=1), *small_convnet().children()).eval()
    assert ttapca.fit(cut, "1", wide, 10).outliers_ is None


@pytest.mark.parametrize("batch", [CLEAN, HIT, HIT[:1]], ids=["clean", "hit", "one image"])
@pytest.mark.parametrize("method", [Wiener, PulledWiener])
def test_the_filter_sees_repaired_images(method: type[Wiener], batch: Tensor) -> None:
    before = batch.clone()
    found = ttapca.adapt(small_convnet(), method(FITTED))(batch)
    plain = ttapca.adapt(small_convnet(), method(FITTED, outliers=False))
    assert torch.equal(found, plain(repaired(batch)))
    assert torch.equal(batch, before)
    if batch is CLEAN:
        assert torch.equal(found, plain(batch))
    else:
        assert not torch.equal(found, plain(batch))


def test_images_may_be_given_to_the_layer_by_name() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1).double()
            self.fc = nn.Linear(288, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.conv(input=x).flatten(1))

    torch.manual_seed(0)
    model = ByName()
    surface = OutlierRepair(FITTED)
    renamed = dataclasses.replace(FITTED, layer="conv")
    surface = OutlierRepair(renamed)
    expected = model(repaired(HIT))
    surface.attach(model)
    assert torch.equal(model(HIT), expected)


def test_it_is_off_by_default_where_it_would_have_no_effect() -> None:
    unlike = ttapca.fit(small_convnet(), "act", DATA, 10)
    for fitted in (WITHOUT, unlike, [WITHOUT, unlike]):
        with ttapca.adapt(small_convnet(), Wiener(fitted)) as adapter:
            assert not any(isinstance(each, OutlierRepair) for each in adapter.surfaces)
        Wiener(fitted, outliers=False)
        with pytest.raises(OptionError, match="`outliers` would have no effect: no filter acts on"):
            Wiener(fitted, outliers=True)
    with pytest.raises(AttachError, match="the filter at `conv1` knows nothing of outliers"):
        OutlierRepair(WITHOUT)


def test_one_of_several_filters_sees_images() -> None:
    deep = ttapca.fit(small_convnet(), "act", DATA, 10)
    for outliers in (None, True):
        adapter = ttapca.adapt(small_convnet(), Wiener([deep, FITTED], outliers=outliers))
        plain = ttapca.adapt(small_convnet(), Wiener([deep, FITTED], outliers=False))
        assert torch.equal(adapter(HIT), plain(repaired(HIT)))


@pytest.mark.parametrize("method", [Wiener, PulledWiener])
def test_the_stream_keeps_the_share_of_outliers(method: type[Wiener]) -> None:
    """Every batch counts once, however often a method runs it, and fades as it ages."""
    adapter = ttapca.adapt(small_convnet(), method(FITTED, memory=20.0), forgetting="online")
    surface, floor = surface_of(adapter), SourceOutliers(FITTED.outliers_).floor
    assert surface.share == 0
    total = weight = 0.0
    for batch in (HIT, CLEAN, HIT[:1], salted(CLEAN, 0.1)[:5]):
        adapter(batch)
        share = float(shares_of(strays(batch, floor)[0])[:, 0].mean())
        fade = float(torch.tensor(-len(batch) / 20.0, dtype=torch.float64).exp())
        total, weight = fade * total + len(batch) * share, fade * weight + len(batch)
        assert surface.share == pytest.approx(total / weight)
    assert surface.share > 0.01
    twin = ttapca.adapt(small_convnet(), method(FITTED, memory=20.0), forgetting="online")
    twin.load_state_dict(adapter.state_dict())
    assert surface_of(twin).share == surface.share
    assert torch.equal(twin(HIT), adapter(HIT))
    share = surface.share
    adapter(torch.full_like(HIT, torch.nan))  # a broken batch leaves no mark
    assert surface.share == share
    adapter.stream("other")(CLEAN)
    assert adapter.streams == ("default", "other")
    adapter.reset()
    assert surface.share == 0


def test_without_an_adapter_every_pass_counts() -> None:
    surface, model = OutlierRepair(FITTED), small_convnet()
    expected = model(repaired(HIT))
    surface.attach(model)
    assert torch.equal(model(HIT), expected)
    assert surface.share > 0.01
    with pytest.raises(AttachError, match="this one is attached already"):
        surface.attach(model)
    assert "outliers at conv1" in repr(surface)


def test_it_leaves_no_trace() -> None:
    model = small_convnet()
    plain, before = model(HIT), picture_of(model)
    adapter = ttapca.adapt(model, Wiener(FITTED))
    adapter(HIT)
    with adapter.disabled():
        assert torch.equal(model(HIT), plain)
    twin = copy.deepcopy(adapter)
    assert torch.equal(twin(HIT), adapter(HIT))
    assert torch.equal(twin.detach()(HIT), plain)
    assert torch.equal(pickle.loads(pickle.dumps(adapter))(HIT), adapter(HIT))
    adapter.detach()
    assert_same_picture(before, picture_of(model))
    OutlierRepair(FITTED).attach(model)  # and nobody keeps it
    assert not torch.equal(model(HIT), plain)
    ttapca.detach(model)
    assert_same_picture(before, picture_of(model))


def test_what_does_not_fit_is_explained_by_the_filter() -> None:
    adapter = ttapca.adapt(small_convnet(), Wiener(FITTED))
    with pytest.raises(ttapca.errors.ShapeError, match=r"fitted on samples of shape \(3, 6, 6\)"):
        adapter(images(2, shape=(3, 7, 7)))
    assert adapter(CLEAN[:0]).shape == (0, 5)


def test_half_precision() -> None:
    model = small_convnet().to(torch.bfloat16)
    adapter = ttapca.adapt(model, Wiener(FITTED))
    adapter(HIT.to(torch.bfloat16))
    assert surface_of(adapter).share > 0.01
