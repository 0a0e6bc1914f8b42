"""Images in other units than those of the fit are told of; shifted ones are not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import ttapca
from fitting.test_units import UNITS, photographs, pixels, shifted
from oracles import left_untouched
from ttapca.adaptation.surfaces.inputs import MOST_IMAGES
from ttapca.errors import InputRangeWarning
from ttapca.fitting.input_range import FEWEST
from ttapca.networks.factories import NormalisedNetwork


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
        r"given images with mean 0\.\d+ and range 0 to 1, where the filter was fitted on images "
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
