from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ttapca
from oracles import DensePCA, images
from ttapca import networks
from ttapca.errors import NonFiniteError, NotEnoughDataError, ShapeError
from ttapca.fitting import routes
from ttapca.spectral import gram
from ttapca.spectral.gram import SampleGram, hold
from ttapca.spectral.pca import PCA, Moments
from ttapca.spectral.randomised import TOLERANCE

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def long_network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 2)).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 5)
    return model


@pytest.mark.parametrize("columns", [1024, 7])
@pytest.mark.parametrize("wish", [None, 1, 12, 0.9])
def test_equals_a_dense_svd(
    wish: int | float | None, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "COLUMNS", columns)
    samples = images(25, shape=(4, 50)) + 1e3
    pca = SampleGram([samples[:0], *samples.split(6)], 200).pca(wish)
    dense = DensePCA(samples.flatten(1))
    kept = len(pca.singular_values)
    if wish is None:
        assert kept == 24  # as many as centred samples have
    np.testing.assert_allclose(pca.singular_values, dense.singular_values[:kept], rtol=1e-9)
    np.testing.assert_allclose(np.abs(np.sum(pca.basis.numpy() * dense.vt[:kept].T, 0)), 1)
    np.testing.assert_allclose(pca.mean, dense.mean, rtol=1e-12)
    assert pca.total_variance == pytest.approx((dense.singular_values**2).sum() / 24)
    moments = PCA.from_moments(Moments(200).update(samples), wish)
    torch.testing.assert_close(pca.basis, moments.basis, rtol=0, atol=1e-8)  # signs as well


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 30), size=st.integers(1, 60), decades=st.floats(0, 6), seed=st.integers(0, 99)
)
def test_laws(n: int, size: int, decades: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.linspace(0, -decades, size, dtype=torch.float64)
    samples = torch.randn(n, size, generator=generator, dtype=torch.float64) * scale
    pca = SampleGram(samples.split(4), size).pca()
    overlap = pca.basis.T @ pca.basis - torch.eye(len(pca.singular_values), dtype=torch.float64)
    assert float(overlap.abs().max()) < 1e-12
    exact = DensePCA(samples).singular_values
    np.testing.assert_allclose(
        pca.singular_values, exact[: len(pca.singular_values)], rtol=1e-3, atol=1e-9 * exact[0]
    )


def test_leaving_samples_out_is_as_if_they_had_never_been() -> None:
    samples = images(30, shape=(90,))
    out = [0, 7, 8, 29]
    kept = [number for number in range(30) if number not in out]
    without = SampleGram(samples.split(8), 90).pca(10, leave_out=out)
    never = SampleGram([samples[kept]], 90).pca(10)
    assert without.n_samples == never.n_samples == 26
    torch.testing.assert_close(without.mean, never.mean)
    torch.testing.assert_close(without.singular_values, never.singular_values)
    torch.testing.assert_close(without.basis, never.basis)


def test_bad_input() -> None:
    samples = images(10, shape=(20,))
    with pytest.raises(NotEnoughDataError, match="at least 2 samples; found 1"):
        SampleGram([samples[:1]], 20)
    with pytest.raises(NotEnoughDataError, match="at most the rank of the activations, here 9"):
        SampleGram([samples.repeat(2, 1)], 20).pca(12)
    with pytest.raises(NotEnoughDataError, match="same output"):
        SampleGram([torch.ones(5, 20)], 20).pca()
    with pytest.raises(ShapeError, match="must have 21 numbers each"):
        SampleGram([samples], 21)
    samples[3, 3] = float("inf")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        SampleGram([samples], 20)


def test_what_is_held_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = images(50, shape=(8,)).split(10)
    stream = iter(batches)
    held, complete = hold(stream)
    assert (len(held), complete, next(stream, None)) == (5, True, None)
    assert all(copy.data_ptr() != own.data_ptr() for copy, own in zip(held, batches, strict=True))
    for name, limit in (("MOST_SAMPLES", 25), ("MOST_BYTES", 25 * 8 * 8)):
        with monkeypatch.context() as patch:
            patch.setattr(gram, name, limit)
            stream = iter(batches)
            held, complete = hold(stream)
            assert (len(held), complete) == (3, False)
            assert torch.equal(next(stream), batches[3])
            assert hold(iter(batches), limited=False)[1]


def test_fit_takes_this_route_for_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EXACT_LIMIT", 20)
    model, samples = long_network(), images(64, shape=(40,))
    fitted = ttapca.fit(model, "1", samples, 10)
    assert (fitted.route, fitted.error_bound_) == ("gram", None)
    exact = ttapca.fit(model, "1", samples, 10, route="exact")
    torch.testing.assert_close(fitted.singular_values_, exact.singular_values_)
    torch.testing.assert_close(fitted.basis.to_components, exact.basis.to_components)
    torch.testing.assert_close(fitted.mean_, exact.mean_)
    # Fractions and all components are no matter, nor data that can be read once only.
    shares = (ttapca.fit(model, "1", samples, 0.9, route=route) for route in ("gram", "exact"))
    assert len({share.n_components_ for share in shares}) == 1
    assert ttapca.fit(model, "1", iter(samples.split(20))).n_components_ == 63


def test_calibration_is_that_of_the_exact_route() -> None:
    model, samples = long_network(), images(400, shape=(40,))
    one, two = (ttapca.fit(model, "1", samples, 20, route=r) for r in ("gram", "exact"))
    assert one.energies_ is not None
    assert len(one.energies_) == 50  # an eighth, which the basis it is measured by has not seen
    torch.testing.assert_close(one.energies_, two.energies_, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_trained_network_at_a_layer_past_the_limit() -> None:
    weights = SHARED / "weights" / "cifar10_resnet20.pth"
    photographs = SHARED / "cifar10c_reference" / "first200.npz"
    for needed in (weights, photographs):
        if not needed.exists():
            pytest.skip(f"{needed} is not on this machine")
    network = networks.load(weights, normalisation="cifar10")
    pixels = np.load(photographs)["clean"]
    batches = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).split(50)
    exact = ttapca.fit(network, "bn1", batches, 60)
    found = ttapca.fit(network, "bn1", batches, 60, route="randomised")
    assert (exact.route, found.route) == ("gram", "randomised")
    assert found.basis.to_components.shape == (16_384, 60)
    error = (found.singular_values_ / exact.singular_values_ - 1).abs()
    assert float(error[:30].max()) <= TOLERANCE
