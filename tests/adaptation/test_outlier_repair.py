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
from ttapca.spectral.outliers import SourceOutliers, shares_of, strays
from ttapca.spectral.stream_batch import Rows
from ttapca.spectral.stream_state import StreamState

DATA = scenes(200, side=6)
CLEAN = scenes(12, seed=8, side=6)
HIT = salted(CLEAN, 0.06)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA)
WITHOUT = dataclasses.replace(FITTED, outliers_=None)


def repaired(batch: Tensor) -> Tensor:
    assert FITTED.outliers_ is not None
    return SourceOutliers(FITTED.outliers_).repaired(batch)[0]


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
    assert FITTED.outliers_ is not None
    floor = SourceOutliers(FITTED.outliers_).floor
    assert adapter.health.outliers == 0
    total = weight = 0.0
    for batch in (HIT, CLEAN, HIT[:1], salted(CLEAN, 0.1)[:5]):
        adapter(batch)
        share = float(shares_of(strays(batch, floor)[0])[:, 0].mean())
        fade = float(torch.tensor(-len(batch) / 20.0, dtype=torch.float64).exp())
        total, weight = fade * total + len(batch) * share, fade * weight + len(batch)
        assert adapter.health.outliers == pytest.approx(total / weight)
    share = adapter.health.outliers
    assert share > 0.01
    twin = ttapca.adapt(small_convnet(), method(FITTED, memory=20.0), forgetting="online")
    twin.load_state_dict(adapter.state_dict())
    assert twin.health.outliers == share
    assert torch.equal(twin(HIT), adapter(HIT))
    assert twin.health.outliers == adapter.health.outliers > share
    share = adapter.health.outliers
    adapter(torch.full_like(HIT, torch.nan))  # a broken batch leaves no mark
    assert adapter.health.outliers == share
    adapter.stream("other")(CLEAN)
    assert adapter.stream("other").health.outliers < 0.01
    assert adapter.health.outliers == share
    adapter.reset()
    assert adapter.health.outliers == 0


def test_streams_in_one_pass_are_repaired_each_by_itself() -> None:
    """And images that are not adapted to pass as they are."""
    batches = [CLEAN, HIT, HIT[:1], HIT, CLEAN[:5]]
    sizes = [len(batch) for batch in batches]
    filtered = torch.tensor([True, True, True, False, True])
    rows = Rows(
        torch.arange(5).repeat_interleave(torch.tensor(sizes)),
        torch.ones(sum(sizes), dtype=torch.bool),
        filtered.repeat_interleave(torch.tensor(sizes)),
    )

    def served(images: list[Tensor], **options: Any) -> tuple[Tensor, list[StreamState]]:
        adapter = ttapca.adapt(small_convnet(), Wiener(FITTED, **options), forgetting="online")
        states = [adapter.new_state()] * len(images)
        logits, outcomes = adapter.predict_streams(states, torch.cat(images), rows)
        return logits, [each.state for each in outcomes]

    expected, _ = served([CLEAN, repaired(HIT), repaired(HIT[:1]), HIT, CLEAN[:5]], outliers=False)
    logits, states = served(batches)
    assert torch.equal(logits, expected)
    assert FITTED.outliers_ is not None
    floor = SourceOutliers(FITTED.outliers_).floor
    for batch, acts, state in zip(batches, filtered.tolist(), states, strict=True):
        share = float(shares_of(strays(batch, floor)[0])[:, 0].mean())
        assert state.outliers.tolist() == pytest.approx([share, len(batch)] if acts else [0, 0])


def test_it_acts_without_an_adapter() -> None:
    surface, model = OutlierRepair(FITTED), small_convnet()
    expected = model(repaired(HIT))
    surface.attach(model)
    assert torch.equal(model(HIT), expected)
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
    assert adapter.health.outliers is not None
    assert adapter.health.outliers > 0.01
