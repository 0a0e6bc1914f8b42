from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ttapca
from oracles import DensePCA, images, small_convnet
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError
from ttapca.fitting import routes
from ttapca.spectral import gram
from ttapca.spectral.pca import PCA
from ttapca.spectral.randomised import MAX_PASSES, TOLERANCE, randomised_pca, singular_value_error


def falling(power: float, n: int = 500, size: int = 300) -> torch.Tensor:
    """Samples whose singular values fall as i^-power: a low power is the hard case."""
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.linalg.qr(torch.randn(rows, size, generator=generator, dtype=torch.float64)).Q
        for rows in (n, size)
    )
    scale = 100 * torch.arange(1, size + 1, dtype=torch.float64) ** -power
    return (left * scale) @ right.T + 3.0


def decaying(n: int = 500) -> torch.Tensor:
    """As activations' do."""
    return falling(1.5)[:n]


def top_half_error(pca: PCA, dense: DensePCA) -> float:
    """Largest relative error of a singular value in the first half of the components."""
    half = -(-len(pca.singular_values) // 2)
    exact = dense.singular_values[:half]
    return float(np.abs(pca.singular_values.numpy()[:half] / exact - 1).max())


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 1.5])
def test_the_promise_holds_for_spectra_that_hardly_fall(power: float) -> None:
    data = falling(power, n=1200, size=1000)
    dense = DensePCA(data)
    pca = randomised_pca(lambda: data.split(200), 1000, 60)
    assert top_half_error(pca, dense) <= TOLERANCE
    assert top_half_error(pca, dense) <= singular_value_error(pca.error_bound) <= TOLERANCE
    assert 2 <= pca.passes <= MAX_PASSES
    assert pca.total_variance == pytest.approx((dense.singular_values**2).sum() / 1199)
    np.testing.assert_allclose(pca.mean, dense.mean, atol=1e-10)
    identity = torch.eye(60, dtype=torch.float64)
    torch.testing.assert_close(pca.basis.T @ pca.basis, identity, rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    power=st.floats(0.2, 3.0),
    size=st.integers(2, 120),
    n=st.integers(4, 150),
    wish=st.integers(1, 60),
)
def test_laws(power: float, size: int, n: int, wish: int) -> None:
    data = falling(power, n=max(n, size), size=size)[:n]
    kept = min(wish, size, n - 2)
    dense = DensePCA(data)
    pca = randomised_pca(lambda: data.split(7), size, kept)
    exact = dense.singular_values[:kept]
    # Values within a subspace are never above those of the whole, and the promise holds.
    assert (pca.singular_values.numpy() <= exact * (1 + 1e-9)).all()
    assert top_half_error(pca, dense) <= TOLERANCE
    assert 0.0 <= pca.missed_variance < 1.0
    overlap = pca.basis.T @ pca.basis - torch.eye(kept, dtype=torch.float64)
    assert float(overlap.abs().max()) < 1e-9


def test_the_subspace_is_the_exact_one_where_there_is_a_gap() -> None:
    data = decaying()
    pca = randomised_pca(lambda: data.split(64), 300, 20)
    cosines = np.linalg.svd(pca.basis.numpy().T @ DensePCA(data).vt[:20].T)[1]
    assert cosines.min() > 1 - 1e-6


def test_the_error_bound_holds_and_shrinks_with_passes() -> None:
    data = falling(0.5)
    exact = DensePCA(data).singular_values ** 2
    worst = []
    for passes in (2, 3, 4):
        with pytest.warns(UserWarning, match=f"after {passes} passes over the data their bound is"):
            pca = randomised_pca(
                lambda: data.split(64), 300, 20, max_passes=passes, tolerance=1e-12
            )
        assert pca.passes == passes
        found = pca.singular_values.numpy() ** 2
        distance = np.abs(found[:, None] - exact[None]).min(1) / found
        assert (distance <= pca.error_bound.numpy() + 1e-12).all()
        worst.append(float(pca.error_bound.max()))
    assert worst[0] > 2 * worst[1] > 4 * worst[2]


def test_a_tolerance_is_met_and_no_pass_more_is_made() -> None:
    data = falling(0.5)
    passes = []
    for tolerance in (0.3, 1e-2, 1e-6):
        pca = randomised_pca(lambda: data.split(64), 300, 20, tolerance=tolerance)
        assert singular_value_error(pca.error_bound) <= tolerance
        passes.append(pca.passes)
    assert passes[0] < passes[1] < passes[2]


def test_exact_when_the_blocks_span_everything() -> None:
    data = images(100, shape=(30,))
    dense = DensePCA(data)
    pca = randomised_pca(lambda: [data], 30, 30)
    np.testing.assert_allclose(pca.singular_values, dense.singular_values, rtol=1e-9)
    assert float(pca.error_bound.max()) < 1e-6
    assert pca.missed_variance < 1e-12
    hard = falling(0.25, size=100)  # 84 columns and then the 16 that are left
    pca = randomised_pca(lambda: [hard], 100, 20, tolerance=0.0)
    assert pca.passes == 3
    exact = DensePCA(hard).singular_values[:20]
    np.testing.assert_allclose(pca.singular_values, exact, rtol=1e-12)


def test_missed_variance_is_what_lies_outside_the_blocks() -> None:
    data = decaying()
    pca = randomised_pca(lambda: data.split(100), 300, 5)
    assert 0.0 < pca.missed_variance < 1e-3


def test_same_generator_same_numbers_and_no_global_draw() -> None:
    data = decaying(100)
    state = torch.random.get_rng_state()
    one, two, other = (
        randomised_pca(lambda: [data], 300, 4, generator=torch.Generator().manual_seed(seed))
        for seed in (7, 7, 8)
    )
    assert torch.equal(one.basis, two.basis)
    assert not torch.equal(one.basis, other.basis)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_order_and_batch_size_do_not_matter() -> None:
    data = decaying(200)
    one = randomised_pca(lambda: data.split(50), 300, 8)
    two = randomised_pca(lambda: [data[:0], *data.flip(0).split(33)], 300, 8)
    torch.testing.assert_close(one.basis, two.basis, rtol=0, atol=1e-6)


def test_bad_input() -> None:
    data = decaying(30)
    with pytest.raises(OptionError, match=r"needs a whole number of components; found .*0\.9"):
        randomised_pca(lambda: [data], 300, 0.9)
    with pytest.raises(OptionError, match="at least 2 passes; found 1"):
        randomised_pca(lambda: [data], 300, 3, max_passes=1)
    with pytest.raises(NotEnoughDataError, match="31 samples; found 30"):
        randomised_pca(lambda: [data], 300, 30)
    with pytest.raises(NotEnoughDataError, match="same output"):
        randomised_pca(lambda: [torch.ones(9, 300)], 300, 3)
    data[3, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        randomised_pca(lambda: [data], 300, 3)


class Counted(list[torch.Tensor]):
    """Batches that tell how often they were read."""

    reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.reads += 1
        return super().__iter__()


def test_fit_takes_this_route_past_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EXACT_LIMIT", 20)
    monkeypatch.setattr(gram, "MOST_SAMPLES", 60)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    data = images(200, shape=(40,))
    batches = Counted(data.split(50))
    fitted = ttapca.fit(model, "1", batches, 10)
    assert fitted.route == "randomised"
    # One to see the shapes, and two passes: the one that was begun for the Gram matrix counts.
    assert batches.reads == 3
    assert fitted.error_bound_ is not None
    assert fitted.error_bound_.shape == (10,)
    assert fitted.n_samples_ == 200
    with torch.no_grad():
        dense = DensePCA(model[:2](data))
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:10], rtol=1e-6)
    asked = ttapca.fit(model, "1", batches, 10, route="randomised")
    torch.testing.assert_close(asked.singular_values_, fitted.singular_values_)
    with pytest.raises(OptionError, match="reads the data several times; found an iterator"):
        ttapca.fit(model, "1", iter(batches), 10)
    with pytest.raises(OptionError, match="needs a whole number of components"):
        ttapca.fit(model, "1", data.split(50))


def test_the_accuracy_is_told(tmp_path: Path) -> None:
    fitted = ttapca.fit(small_convnet(), "act", images(200), 20, route="randomised")
    error = fitted.singular_value_error_
    assert error is not None
    assert error <= TOLERANCE
    assert fitted.accuracy_.startswith("singular values of the first half of the components are")
    fitted.save(tmp_path / "filter")
    assert ttapca.load(tmp_path / "filter").accuracy_ == fitted.accuracy_
    assert fitted.accuracy_ in (tmp_path / "filter" / "README.md").read_text()
    config = json.loads((tmp_path / "filter" / "config.json").read_text())
    assert config["source"]["singular_value_error"] == error
    exact = ttapca.fit(small_convnet(), "act", images(200), 20)
    assert (exact.accuracy_, exact.singular_value_error_) == ("exact up to rounding", None)
    cosines = ttapca.fit(small_convnet(), "act", images(200), 20, route="dct")
    assert "not principal components" in cosines.accuracy_
