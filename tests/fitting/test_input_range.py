"""What a network is given on source data: measured by `fit`, whoever holds the network."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from fitting.parted import rewrite
from oracles import images, small_convnet
from ttapca import datasets
from ttapca.corruptions import corrupt
from ttapca.errors import SavedFilterError
from ttapca.fitting.input_range import FEWEST, InputRange, InputSums, mistake_in
from ttapca.networks.network import NORMALISATIONS, NormalisedNetwork

DATA = images(60)


def expected(samples: Tensor) -> np.ndarray:
    """Range, mean and deviation of each channel, by numpy."""
    values = samples.double().numpy().transpose(1, 0, 2, 3).reshape(samples.shape[1], -1)
    return np.stack([values.min(1), values.max(1), values.mean(1), values.std(1)])


def measured(fitted: ttapca.FittedFilter) -> np.ndarray:
    assert fitted.inputs_ is not None
    return torch.stack(fitted.inputs_).double().numpy()


def range_of(*batches: Tensor) -> InputRange:
    sums = InputSums()
    for batch in batches:
        sums.add(batch)
    found = sums.found()
    assert found is not None
    return found


@pytest.mark.parametrize(("layer", "route"), [("conv1", "folded"), ("act", "gram"), ("fc", "auto")])
def test_fit_measures_what_the_network_is_given(layer: str, route: str) -> None:
    fitted = ttapca.fit(small_convnet(), layer, DATA, 5, route=route)
    assert np.allclose(measured(fitted), expected(DATA), rtol=1e-6)


@pytest.mark.parametrize("layer", ["model.conv1", "model.act"])
def test_behind_a_normalisation_that_is_what_the_normalisation_makes(layer: str) -> None:
    network = NormalisedNetwork(small_convnet(), "imagenet").double()
    fitted = ttapca.fit(network, layer, DATA, 5)
    normalised = (DATA - network.mean) / network.std
    assert np.allclose(measured(fitted), expected(normalised), rtol=1e-6)


def test_samples_without_channels_have_one_number_of_each() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    data = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    found = ttapca.fit(model, "0", data).inputs_
    assert found is not None
    assert [float(each) for each in found] == pytest.approx(
        [float(data.min()), float(data.max()), float(data.mean()), float(data.std(correction=0))],
        rel=1e-6,
    )


def test_of_words_nothing_is_measured() -> None:
    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(24, 8))
    words = torch.randint(20, (80, 4), generator=torch.Generator().manual_seed(0))
    assert ttapca.fit(model, "2", words).inputs_ is None


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x.flip(0), lambda x: x * torch.nan])
def test_numbers_that_no_inputs_have_are_refused(tmp_path: Path, change) -> None:
    path = tmp_path / "filter"
    ttapca.fit(small_convnet(), "conv1", DATA, 5).save(path)
    rewrite(path, lambda _, tensors: tensors.update(inputs=change(tensors["inputs"])))
    with pytest.raises(SavedFilterError, match="`inputs` of the filter"):
        ttapca.load(path)


@given(st.permutations(range(4)), st.lists(st.integers(1, 59), max_size=3, unique=True))
def test_parts_add_up_in_any_order(order: list[int], cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 60]
    parts = [DATA[a:b] for a, b in pairwise(ends)]
    total = InputSums()
    for number in order:
        if number < len(parts):
            one = InputSums()
            one.add(parts[number])
            total.merge(one)
    found = total.found()
    assert found is not None
    assert torch.allclose(torch.stack(found), torch.stack(range_of(DATA)), rtol=1e-6)


def test_images_of_other_channels_are_left_out() -> None:
    found = range_of(DATA, 2 * DATA[:, :1])
    assert torch.equal(torch.stack(found), torch.stack(range_of(DATA)))


def test_a_sample_leaves_the_range_by_its_farthest_channel() -> None:
    samples = torch.zeros(5, 2, 2, 2)
    samples[:, 0, 0, 0], samples[:, 1, 0, 0] = 1.0, 10.0
    known = range_of(samples[:1])
    samples[1, 0, 1, 1] = 3.0  # two widths of the first channel, a fifth of the widest
    samples[2, 1, 1, 1] = -5.0  # half a width of the widest
    samples[3, 1, 1, 1], samples[4, 1, 1, 1] = torch.inf, torch.nan
    found = known.beyond(samples)
    assert found[:4].tolist() == pytest.approx([0.0, 0.2, 0.5, math.inf])
    assert bool(found[4].isnan())
    # Of grey images, only the range of all channels together is known.
    assert known.beyond(torch.full((1, 1, 2, 2), 20.0)).tolist() == [1.0]


# Images in other units than those of the fit are recognised; shifted ones are not mistaken.


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


def said(images: Tensor, units: str) -> str | None:
    source = range_of(UNITS[units](pixels(photographs()[:300])))
    return mistake_in(range_of(images), source, len(images))


@pytest.mark.parametrize("units", UNITS)
def test_no_shift_is_mistaken_for_other_units(units: str) -> None:
    change = UNITS[units]
    for name, moved in shifted().items():
        for some in (moved[:1], moved[:8], moved[:FEWEST], moved):
            assert said(change(some), units) is None, name


@pytest.mark.parametrize(
    ("units", "given", "words"),
    [
        ("to 1", "to 255", "is a division by 255 missing?"),
        ("to 1", "half", "was it normalised, as the samples of the fit were not?"),
        ("to 1", "imagenet", "was it normalised, as the samples of the fit were not?"),
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
    constant = range_of(torch.ones(3, 1, 4, 4))
    assert mistake_in(constant, constant, 100) is None
