from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import DensePCA, images
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError
from ttapca.spectral.pca import PCA
from ttapca.spectral.randomised import MAX_PASSES, TOLERANCE, randomised_pca, singular_value_error


class Passes:
    """Batches of some samples, and how often they were read."""

    def __init__(self, data: Tensor, batch: int = 64) -> None:
        self.data, self.batch, self.count = data, batch, 0

    def __call__(self) -> Iterator[Tensor]:
        self.count += 1
        return iter(self.data.split(self.batch))


def falling(power: float, n: int = 500, size: int = 300) -> Tensor:
    """Samples whose singular values fall as i^-power: a low power is the hard case."""
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.linalg.qr(torch.randn(rows, size, generator=generator, dtype=torch.float64)).Q
        for rows in (n, size)
    )
    scale = 100 * torch.arange(1, size + 1, dtype=torch.float64) ** -power
    return (left * scale) @ right.T + 3.0


def top_half_error(pca: PCA, dense: DensePCA) -> float:
    """Largest relative error of a singular value in the first half of the components."""
    half = -(-len(pca.singular_values) // 2)
    exact = dense.singular_values[:half]
    return float(np.abs(pca.singular_values.numpy()[:half] / exact - 1).max())


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_the_promise_holds_for_spectra_that_hardly_fall(power: float) -> None:
    read = Passes(falling(power, n=1200, size=1000), 200)
    dense = DensePCA(read.data)
    pca = randomised_pca(read, 1000, 60)
    assert top_half_error(pca, dense) <= singular_value_error(pca.error_bound) <= TOLERANCE
    assert 2 <= read.count <= MAX_PASSES
    rough = Passes(read.data, 200)
    randomised_pca(rough, 1000, 60, tolerance=0.3)
    assert rough.count < read.count  # no pass more than needed
    assert pca.total_variance == pytest.approx((dense.singular_values**2).sum() / 1199)
    np.testing.assert_allclose(pca.mean, dense.mean, atol=1e-10)


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
    pca = randomised_pca(Passes(data, 7), size, kept)
    # Values within a subspace are never above those of the whole, and the promise holds. Their
    # squares are computed, all as exactly as the largest.
    found, whole = pca.singular_values.numpy() ** 2, dense.singular_values[:kept] ** 2
    assert (found <= whole * (1 + 1e-9) + 1e-13 * whole[0]).all()
    assert top_half_error(pca, dense) <= TOLERANCE
    overlap = pca.basis.T @ pca.basis - torch.eye(kept, dtype=torch.float64)
    assert float(overlap.abs().max()) < 1e-9


def test_the_error_bound_holds_and_shrinks_with_passes() -> None:
    data = falling(0.5)
    exact = DensePCA(data).singular_values ** 2
    worst = []
    for passes in (2, 3, 4):
        read = Passes(data)
        with pytest.warns(UserWarning, match=f"after {passes} passes over the data their bound is"):
            pca = randomised_pca(read, 300, 20, max_passes=passes, tolerance=1e-12)
        assert read.count == passes
        found = pca.singular_values.numpy() ** 2
        distance = np.abs(found[:, None] - exact[None]).min(1) / found
        assert (distance <= pca.error_bound.numpy() + 1e-12).all()
        worst.append(float(pca.error_bound.max()))
    assert worst[0] > 2 * worst[1] > 4 * worst[2]


def test_exact_when_the_blocks_span_everything() -> None:
    data = images(100, shape=(30,))
    pca = randomised_pca(Passes(data), 30, 30)
    np.testing.assert_allclose(pca.singular_values, DensePCA(data).singular_values, rtol=1e-9)
    assert float(pca.error_bound.max()) < 1e-6
    hard = Passes(falling(0.25, size=100))  # 84 columns and then the 16 that are left
    pca = randomised_pca(hard, 100, 20, tolerance=0.0)
    assert hard.count == 3
    exact = DensePCA(hard.data).singular_values[:20]
    np.testing.assert_allclose(pca.singular_values, exact, rtol=1e-12)


def test_a_seed_decides_and_order_and_batches_do_not() -> None:
    data = falling(1.5)[:200]
    state = torch.random.get_rng_state()
    one, two, other = (
        randomised_pca(Passes(data), 300, 8, generator=torch.Generator().manual_seed(seed))
        for seed in (7, 7, 8)
    )
    assert torch.equal(one.basis, two.basis)
    assert not torch.equal(one.basis, other.basis)
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing is drawn from the global one
    seven = torch.Generator().manual_seed(7)
    turned = randomised_pca(lambda: [data[:0], *data.flip(0).split(33)], 300, 8, generator=seven)
    torch.testing.assert_close(one.basis, turned.basis, rtol=0, atol=1e-6)


def test_bad_input() -> None:
    data = falling(1.5)[:30]
    with pytest.raises(OptionError, match=r"needs a whole number of components; found .*0\.9"):
        randomised_pca(lambda: [data], 300, 0.9)
    with pytest.raises(OptionError, match="`max_passes` must be a whole number from 2"):
        randomised_pca(lambda: [data], 300, 3, max_passes=1)
    with pytest.raises(NotEnoughDataError, match="31 samples; found 30"):
        randomised_pca(lambda: [data], 300, 30)
    with pytest.raises(NotEnoughDataError, match="same output"):
        randomised_pca(lambda: [torch.ones(9, 300)], 300, 3)
    data[3, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        randomised_pca(lambda: [data], 300, 3)
