"""What a network is given on source data: measured by `fit`, whoever holds the network."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from oracles import images, small_convnet
from ttapca.errors import SavedFilterError
from ttapca.fitting import store
from ttapca.fitting.input_range import InputRange, InputSums
from ttapca.networks.network import NormalisedNetwork

DATA = images(60)


def expected(samples: Tensor) -> np.ndarray:
    """Range, mean and deviation of each channel, by numpy."""
    values = samples.double().numpy().transpose(1, 0, 2, 3).reshape(samples.shape[1], -1)
    return np.stack([values.min(1), values.max(1), values.mean(1), values.std(1)])


def measured(fitted: ttapca.FittedFilter) -> np.ndarray:
    assert fitted.inputs_ is not None
    return fitted.inputs_.tensor.double().numpy()


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
    assert [float(each) for each in found.tensor] == pytest.approx(
        [float(data.min()), float(data.max()), float(data.mean()), float(data.std(correction=0))],
        rel=1e-6,
    )


def test_of_words_nothing_is_measured() -> None:
    model = nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(24, 8))
    words = torch.randint(20, (80, 4), generator=torch.Generator().manual_seed(0))
    assert ttapca.fit(model, "2", words).inputs_ is None


def test_it_is_saved_and_survives_truncation(tmp_path: Path) -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", DATA, 20).truncated(5)
    fitted.save(tmp_path / "filter")
    assert np.array_equal(measured(ttapca.load(tmp_path / "filter")), measured(fitted))


def test_filters_of_older_versions_know_nothing_of_it() -> None:
    saved = Path(__file__).parent / "saved_filters"
    assert [ttapca.load(each).inputs_ for each in sorted(saved.iterdir())] == [None] * 4


@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x.flip(0), lambda x: x * torch.nan])
def test_numbers_that_no_inputs_have_are_refused(tmp_path: Path, change) -> None:
    path = tmp_path / "filter"
    ttapca.fit(small_convnet(), "conv1", DATA, 5).save(path)
    config, tensors = store.read_folder(path)
    for key in ("format", "format_version", "tensors_sha256", "checksum"):
        del config[key]
    tensors["inputs"] = change(tensors["inputs"])
    store.write_folder(path, config, tensors, "")
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
    whole, found = InputRange.of(DATA), total.found()
    assert whole is not None
    assert found is not None
    assert torch.allclose(found.tensor, whole.tensor, rtol=1e-6)


def test_images_of_other_channels_are_measured_together() -> None:
    sums = InputSums()
    sums.add(DATA)
    sums.add(2 * DATA[:, :1])
    found, values = sums.found(), torch.cat([DATA.flatten(), 2 * DATA[:, 0].flatten()])
    assert found is not None
    assert float(found.high) == pytest.approx(float(values.max()))
    assert float(found.deviation) == pytest.approx(float(values.std(correction=0)))


def test_a_sample_leaves_the_range_by_its_farthest_channel() -> None:
    samples = torch.zeros(5, 2, 2, 2)
    samples[:, 0, 0, 0], samples[:, 1, 0, 0] = 1.0, 10.0
    known = InputRange.of(samples[:1])
    assert known is not None
    samples[1, 0, 1, 1] = 3.0  # two widths of the first channel, a fifth of the widest
    samples[2, 1, 1, 1] = -5.0  # half a width of the widest
    samples[3, 1, 1, 1], samples[4, 1, 1, 1] = torch.inf, torch.nan
    found = known.beyond(samples)
    assert found[:4].tolist() == pytest.approx([0.0, 0.2, 0.5, math.inf])
    assert bool(found[4].isnan())
    # Of grey images, only the range of all channels together is known.
    assert known.beyond(torch.full((1, 1, 2, 2), 20.0)).tolist() == [1.0]
