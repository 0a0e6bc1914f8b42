from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import DensePCA, images
from ttapca import PCA, Moments, SpectralFilter
from ttapca.errors import ShapeError
from ttapca.spectral.basis import Dense
from ttapca.spectral.gains import Gain, ReLUGain

SHAPE = (2, 3, 2)
DATA = images(80, shape=SHAPE)
PCA_OF_DATA = PCA.from_moments(Moments(12).update(DATA))


def spectral_filter(kept: int = 12, gain: bool = False, dtype=torch.float64) -> SpectralFilter:
    return SpectralFilter(
        PCA_OF_DATA.mean.to(dtype),
        Dense(PCA_OF_DATA.basis[:, :kept].to(dtype)),
        shape=SHAPE,
        gain=ReLUGain(PCA_OF_DATA.singular_values[:kept].to(dtype), initial=0.2) if gain else None,
    )


@pytest.mark.parametrize("kept", [1, 5, 12])
def test_equals_a_dense_filter(kept: int) -> None:
    dense = DensePCA(DATA)
    relative = dense.singular_values[:kept] / dense.singular_values[0]
    x = images(10, seed=3, shape=SHAPE)
    output = spectral_filter(kept, gain=True)(x)
    torch.testing.assert_close(
        output, dense.filter(x, relative / (relative + 0.2)), rtol=0, atol=1e-10
    )


@given(seed=st.integers(0, 1000), kept=st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_unit_gains_are_the_identity_on_the_subspace(seed: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    components = torch.randn(4, kept, generator=generator, dtype=torch.float64)
    x = (components @ PCA_OF_DATA.basis[:, :kept].T + PCA_OF_DATA.mean).reshape(4, *SHAPE)
    layer = spectral_filter(kept)
    torch.testing.assert_close(layer(x), x, rtol=0, atol=1e-10)
    assert torch.equal(layer.gains(), torch.ones(kept, dtype=torch.float64))


def test_all_components_and_unit_gains_are_the_identity() -> None:
    x = images(10, seed=3, shape=SHAPE)
    torch.testing.assert_close(spectral_filter()(x), x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gives_back_the_precision_it_was_given(dtype: torch.dtype) -> None:
    x = images(10, seed=3, shape=SHAPE)
    output = spectral_filter(gain=True, dtype=torch.float32)(x.to(dtype))
    assert output.dtype == dtype
    expected = spectral_filter(gain=True)(x.to(dtype).double())
    np.testing.assert_allclose(output.detach().double(), expected.detach(), atol=0.05)


def test_the_input_is_left_as_it_was() -> None:
    x = images(10, seed=3, shape=SHAPE)
    before = x.clone()
    spectral_filter(gain=True)(x).sum().backward()
    assert torch.equal(x, before)


def test_another_shape_is_refused_with_both_named() -> None:
    with pytest.raises(ShapeError, match=r"shape \(2, 3, 2\); found \(3, 2, 2\)"):
        spectral_filter()(torch.zeros(5, 3, 2, 2))


def test_state_dict_round_trip() -> None:
    one, two = spectral_filter(5, gain=True), spectral_filter(5, gain=True)
    with torch.no_grad():
        one.gain.gamma.add_(0.3)
    two.load_state_dict(one.state_dict())
    x = images(4, seed=3, shape=SHAPE)
    assert torch.equal(one(x), two(x))
    assert set(one.state_dict()) == {"mean", "basis.to_components", "gain.gamma", "gain.spectrum"}


def test_repr_is_short() -> None:
    assert "components=5, at the output" in repr(spectral_filter(5))


class UnitGain(Gain):
    """Keeps what lies outside the basis, and scales nothing, or the last component."""

    keeps_rest = True

    def forward(self, components: torch.Tensor | None = None) -> torch.Tensor:
        return self.spectrum


def test_gains_of_one_give_back_what_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(10, seed=3, shape=SHAPE)
    layer = spectral_filter(5)
    layer.gain = UnitGain(torch.ones(5, dtype=torch.float64))
    with torch.no_grad():
        assert torch.equal(layer(x), x)
        monkeypatch.setattr(layer.basis, "add_rebuilt", None)  # nothing is rebuilt
        assert torch.equal(layer(x), x)
        monkeypatch.undo()
        layer.gain.spectrum[2] = 0.5
        assert not torch.equal(layer(x), x)


@pytest.mark.parametrize(
    "values",
    [[0.5] * 12, [2.0] * 4 + [0.5] * 8, [0.5, 1.0] * 6, [1.0] * 11 + [0.3]],
    ids=["all alike", "a tail alike", "none alike", "only the last"],
)
@pytest.mark.parametrize("kept", [12, 7])
def test_components_scaled_as_the_rest_need_no_rebuilding(values: list[float], kept: int) -> None:
    gains = torch.tensor(values[:kept], dtype=torch.float64)
    layer = spectral_filter(kept)
    layer.gain = UnitGain(gains, normalise=False)
    x = images(10, seed=3, shape=SHAPE)
    basis = PCA_OF_DATA.basis[:, :kept]
    away = x.flatten(1) - PCA_OF_DATA.mean
    inside = away @ basis
    rest = away - inside @ basis.T
    expected = PCA_OF_DATA.mean + (inside * gains) @ basis.T + gains[-1] * rest
    with torch.no_grad():
        quick = layer(x).flatten(1)
    torch.testing.assert_close(quick, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x).flatten(1), expected, rtol=0, atol=1e-12)
