"""Images in other units than those of the fit are told of; shifted ones are not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import left_untouched
from ttapca import datasets
from ttapca.adaptation.surfaces.inputs import MOST_IMAGES
from ttapca.corruptions import corrupt
from ttapca.errors import InputRangeWarning
from ttapca.fitting.input_range import FEWEST, InputRange, mistake_in
from ttapca.networks.factories import NormalisedNetwork
from ttapca.networks.network import NORMALISATIONS


def normalised(name: str) -> Callable[[Tensor], Tensor]:
    values = NORMALISATIONS[name].for_channels(3)
    mean, std = (torch.tensor(each)[:, None, None] for each in (values.mean, values.std))
    return lambda images: (images - mean) / std


UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "to 1": lambda images: images,
    "to 255": lambda images: 255 * images,
    "half": normalised("half"),
    "imagenet": normalised("imagenet"),
    "imagenet-255": normalised("imagenet-255"),
}
CORRUPTIONS = ("gaussian_noise", "impulse_noise", "motion_blur", "fog", "brightness", "contrast")


def pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255


@cache
def photographs() -> np.ndarray:
    return datasets.load("cifar10-500").images


@cache
def shifted() -> dict[str, Tensor]:
    """Images that shifted as images do."""
    test = photographs()[300:400]
    found = {each: pixels(corrupt(test, each, 5)) for each in CORRUPTIONS}
    noise = torch.randn(100, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    clean = pixels(test)
    return found | {
        "clean": clean,
        "noise beyond the range": clean + 0.6 * noise,
        "little light": 0.05 * clean,
        "no light": (noise > 0.5).float() / 255,
        "much light": 0.4 * clean + 0.6,
        "one colour": clean.mean(1, keepdim=True) * torch.tensor([1.0, 0.4, 0.1])[:, None, None],
    }


def source(units: str) -> InputRange:
    found = InputRange.of(UNITS[units](pixels(photographs()[:300])))
    assert found is not None
    return found


def said(images: Tensor, units: str) -> str | None:
    found = InputRange.of(images)
    assert found is not None
    return mistake_in(found, source(units), len(images))


@pytest.mark.parametrize("units", UNITS)
def test_no_shift_is_mistaken_for_other_units(units: str) -> None:
    change = UNITS[units]
    for name, images in shifted().items():
        for some in (images[:1], images[:8], images[:FEWEST], images):
            assert said(change(some), units) is None, name


@pytest.mark.parametrize(
    ("units", "given", "words"),
    [
        ("to 1", "to 255", "is a division by 255 missing?"),
        ("to 1", "half", "was it normalised, as the images of the fit were not?"),
        ("to 1", "imagenet", "was it normalised, as the images of the fit were not?"),
        ("to 255", "to 1", "was it divided by 255 once too often?"),
        ("half", "to 1", "is the normalisation missing?"),
        ("half", "to 255", "are the division by 255 and the normalisation missing?"),
        ("imagenet", "to 1", "is the normalisation missing?"),
        ("imagenet", "to 255", "are the division by 255 and the normalisation missing?"),
        ("imagenet-255", "to 1", "is the normalisation missing?"),
    ],
)
def test_other_units_are_told_of_also_if_images_have_shifted(
    units: str, given: str, words: str
) -> None:
    for name in ("clean", "gaussian_noise", "impulse_noise", "motion_blur"):
        assert said(UNITS[given](shifted()[name]), units) == words, name


@pytest.mark.parametrize("units", ["half", "imagenet"])
def test_a_normalisation_that_is_done_twice(units: str) -> None:
    change = UNITS[units]
    assert said(change(change(shifted()["clean"])), units) == "was it normalised twice?"


def test_a_division_that_is_done_twice() -> None:
    assert said(shifted()["clean"] / 255, "to 1") == "was it divided by 255 once too often?"


def test_other_scales_than_255() -> None:
    assert said(65535 * shifted()["clean"], "to 1") == "is a division missing?"


def test_of_other_channels_or_of_one_colour_nothing_is_known() -> None:
    grey = 255 * shifted()["clean"][:, :1]
    assert said(grey, "to 1") is None
    constant = InputRange.of(torch.ones(3, 1, 4, 4))
    assert constant is not None
    assert mistake_in(constant, constant, 100) is None


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
