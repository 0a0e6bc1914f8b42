"""Images in other units than those of the fit are recognised; shifted ones are not mistaken."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from ttapca import datasets
from ttapca.corruptions import corrupt
from ttapca.fitting.input_range import FEWEST, InputRange, mistake_in
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
