"""Inputs: images in other units are told of, and outliers are replaced before the filter."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from fitting.test_input_range import UNITS, photographs, pixels, shifted
from oracles import (
    assert_same_picture,
    images,
    left_untouched,
    picture_of,
    salted,
    scenes,
    small_convnet,
)
from ttapca.adaptation.surfaces import OutlierRepair
from ttapca.adaptation.surfaces.filter_gains import MOST_IMAGES
from ttapca.errors import AttachError, InputRangeWarning, OptionError
from ttapca.fitting.input_range import FEWEST
from ttapca.methods import PulledWiener, Wiener
from ttapca.networks.network import NormalisedNetwork
from ttapca.spectral.image_statistics import SourceOutliers, shares_of, strays
from ttapca.spectral.stream_batch import ImageRows
from ttapca.spectral.stream_state import StreamState

# Units.


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 32 * 32, 5),
    ).eval()


@cache
def fitted(units: str = "imagenet", wrapper: str = "") -> ttapca.FittedFilter:
    data = pixels(photographs()[:300])
    if wrapper:
        return ttapca.fit(NormalisedNetwork(network(), units), "0", data)
    return ttapca.fit(network(), "0", UNITS[units](data))


def test_an_adapter_warns_once_and_names_numbers_and_cause() -> None:
    model, raw = network(), shifted()["clean"]
    message = (
        r"given samples with mean 0\.\d+ and range 0 to 1, where the filter was fitted on samples "
        r"with mean -?0\.\d+ and range -2\.12 to 2\.64: is the normalisation missing\? Prepare"
    )
    with (
        left_untouched(model, raw),
        ttapca.adapt(model, "wiener", filter=fitted(), forgetting="online") as adapted,
    ):
        adapted(raw[: FEWEST // 8])  # so few say nothing yet
        with pytest.warns(InputRangeWarning, match=message) as found:
            adapted(raw)
        assert len(found) == 1
        assert found[0].filename == __file__
        adapted(raw)


@pytest.mark.parametrize("method", ["wiener", "tent"])
def test_a_single_image_in_bytes_is_enough(method: str) -> None:
    adapted = ttapca.adapt(network(), method, filter=fitted())  # type: ignore[arg-type]
    with pytest.warns(InputRangeWarning, match="and the normalisation missing"):
        adapted(255 * shifted()["clean"][:1])


@pytest.mark.parametrize("wrapper", ["", "normalised"])
@pytest.mark.parametrize("used", ["", "normalised"])
def test_wrappers_that_normalise_are_looked_through(wrapper: str, used: str) -> None:
    raw, filter_ = shifted()["clean"], fitted(wrapper=wrapper)
    right = raw if used else UNITS["imagenet"](raw)
    wrong = UNITS["imagenet"](raw) if used else raw
    model = NormalisedNetwork(network(), "imagenet") if used else network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ttapca.adapt(model, "wiener", filter=filter_) as adapted:
            adapted(right)
    adapted = ttapca.adapt(model, "wiener", filter=filter_)
    with pytest.warns(InputRangeWarning):
        adapted(wrong)


def test_after_some_images_nothing_is_looked_at() -> None:
    model, images = network(), UNITS["imagenet"](shifted()["clean"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = ttapca.adapt(model, "wiener", filter=fitted(), forgetting="online")
        for _ in range(0, MOST_IMAGES, len(images)):
            adapted(images)
        adapted(shifted()["clean"])
    assert len(model._forward_pre_hooks) == 1  # the model has the same hooks as long as it adapts
    adapted.detach()
    assert not model._forward_pre_hooks


def test_broken_images_are_left_out() -> None:
    images = UNITS["imagenet"](shifted()["clean"]).clone()
    images[0, 0, 0, 0], images[1, 1, 1, 1] = torch.nan, torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ttapca.adapt(network(), "wiener", filter=fitted(), forgetting="online") as adapted:
            adapted(images)
    adapted = ttapca.adapt(network(), "wiener", filter=fitted(), forgetting="online")
    with pytest.warns(InputRangeWarning):
        adapted(255 * torch.cat([images[:2], shifted()["clean"][2:]]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_look_for_themselves(copied: Callable) -> None:
    adapted = ttapca.adapt(network(), "wiener", filter=fitted())
    other = copied(adapted)
    for each in (adapted, other):
        with pytest.warns(InputRangeWarning):
            each(shifted()["clean"])
        each(shifted()["clean"])
        each.detach()
        assert not each.model._forward_pre_hooks


# Outliers.

DATA = scenes(200, side=6)
CLEAN = scenes(12, seed=8, side=6)
HIT = salted(CLEAN, 0.06)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA)
WITHOUT = dataclasses.replace(FITTED, outliers_=None)


def repaired(batch: Tensor) -> Tensor:
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
    rows = ImageRows(
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
    assert adapter.health.outliers > 0.01
