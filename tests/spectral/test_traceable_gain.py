"""Gains for exporters look up what the rule draws; what they do in a network is tested there.

See `tests/serving/test_onnx_export.py`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttapca.errors import ShapeError
from ttapca.spectral.basis import Cosine
from ttapca.spectral.closed_form_rule import LARGE, ClosedFormRule, Shown
from ttapca.spectral.gains import SourceComponents
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.traceable_gain import TraceableGain

IMAGES, BANDS = 150, 3


def source(components: int = 7, bands: int = BANDS) -> SourceComponents:
    energies = torch.rand(IMAGES, bands, generator=torch.Generator().manual_seed(0)) + 0.1
    ones = torch.ones(components)
    return SourceComponents(ones, ones, energies, lambda: ones)


GAIN, RULE = TraceableGain(source()), ClosedFormRule(source())


@given(st.lists(st.floats(1, 4 * IMAGES, width=32), min_size=1, max_size=5))
def test_what_is_usual_is_looked_up(sizes: list[float]) -> None:
    found = GAIN.usual(torch.tensor(sizes))
    expected = [RULE.normal.batches_of(size).usual(RULE.threshold) for size in sizes]
    for each in dataclasses.fields(found):
        value: Tensor = getattr(found, each.name)
        wanted = torch.stack([getattr(one, each.name) for one in expected])
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted.float())


def test_samples_of_nobody_pass() -> None:
    assert GAIN().tolist() == GAIN(torch.ones(4, 7)).tolist() == [[1.0] * 7]
    assert GAIN.offset() is GAIN.rest_gain() is None


def test_bands_of_many_components_are_averaged_without_the_matrix() -> None:
    gain = TraceableGain(source(LARGE, bands=LARGE.bit_length()))
    energies = torch.rand(2, LARGE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gain.by_band(energies), energies @ gain.averages)


def test_images_of_another_size_are_refused() -> None:
    basis = Cosine(torch.eye(1), torch.arange(16), (1, 4, 4))
    other = OtherSize(basis, (1, 6, 6), torch.zeros(16))
    gain = TraceableGain(source(16, bands=5))
    gain.begin(Shown(torch.zeros(1), torch.zeros(1, 16), torch.zeros(1, 16)), 2)
    with pytest.raises(ShapeError, match=r"fitted on; found samples of shape \(1, 6, 6\)"):
        gain(torch.ones(2, 16), None, other)
