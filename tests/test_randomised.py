from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ttapca
from oracles import DensePCA, images
from ttapca import fitting
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError
from ttapca.randomised import randomised_pca


def decaying(n: int = 500, size: int = 300) -> torch.Tensor:
    """Samples whose variances fall fast enough for a gap, as activations' do."""
    generator = torch.Generator().manual_seed(2)
    scale = torch.arange(1, size + 1, dtype=torch.float64) ** -1.5
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    samples = torch.randn(n, size, generator=generator, dtype=torch.float64) * scale
    return samples @ rotation.T + 3.0


def test_close_to_the_exact_one() -> None:
    data = decaying()
    dense = DensePCA(data)
    pca = randomised_pca(lambda: data.split(64), 300, 20)
    np.testing.assert_allclose(pca.singular_values, dense.singular_values[:20], rtol=2e-3)
    cosines = np.linalg.svd(pca.basis.numpy().T @ dense.vt[:20].T)[1]
    assert cosines.min() > 0.99
    assert pca.total_variance == pytest.approx((dense.singular_values**2).sum() / 499)
    np.testing.assert_allclose(pca.mean, dense.mean, atol=1e-10)


def test_the_error_bound_holds_and_shrinks_with_passes() -> None:
    data = decaying()
    exact = DensePCA(data).singular_values ** 2
    worst = []
    for passes in (2, 3, 5):
        pca = randomised_pca(lambda: data.split(64), 300, 20, passes=passes)
        found = pca.singular_values.numpy() ** 2
        distance = np.abs(found[:, None] - exact[None]).min(1) / found
        assert (distance <= pca.error_bound.numpy() + 1e-12).all()
        worst.append(float(pca.error_bound.max()))
    assert worst[0] > worst[1] > worst[2]
    assert worst[2] < 1e-2


def test_exact_when_the_block_spans_everything() -> None:
    data = images(100, shape=(30,))
    dense = DensePCA(data)
    pca = randomised_pca(lambda: [data], 30, 30)
    np.testing.assert_allclose(pca.singular_values, dense.singular_values, rtol=1e-9)
    assert float(pca.error_bound.max()) < 1e-6
    assert pca.missed_variance < 1e-12


def test_missed_variance_is_what_lies_outside_the_block() -> None:
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
        randomised_pca(lambda: [data], 300, 3, passes=1)
    with pytest.raises(NotEnoughDataError, match="31 samples; found 30"):
        randomised_pca(lambda: [data], 300, 30)
    with pytest.raises(NotEnoughDataError, match="same output"):
        randomised_pca(lambda: [torch.ones(9, 300)], 300, 3)
    data[3, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        randomised_pca(lambda: [data], 300, 3)


def test_fit_takes_this_route_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "EXACT_LIMIT", 20)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)).double()
    data = images(200, shape=(40,))
    fitted = ttapca.fit(model, "1", data, 10)
    assert fitted.route == "randomised"
    assert fitted.error_bound_ is not None
    assert fitted.error_bound_.shape == (10,)
    with torch.no_grad():
        dense = DensePCA(model[:2](data))
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:10], rtol=1e-2)
    with pytest.raises(OptionError, match="reads the data twice; found an iterator"):
        ttapca.fit(model, "1", iter([data]), 10)
    with pytest.raises(OptionError, match="needs a whole number of components"):
        ttapca.fit(model, "1", data)
