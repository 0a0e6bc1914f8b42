from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttapca
from oracles import images, left_untouched, small_convnet
from ttapca.errors import (
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.spectral.cosine import (
    CoefficientMoments,
    dct_coefficients,
    dct_images,
    dct_matrix,
    fit_channel_dct,
)

SHAPE = (3, 4, 6)


def dense_basis(rotation: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Every basis vector as an image, by scipy, one a row: (C H W, C H W)."""
    size = int(np.prod(shape))
    unit = np.eye(size).reshape(size, *shape)
    spatial = scipy.fft.idctn(unit, axes=(2, 3), norm="ortho")
    return np.einsum("nkhw,ck->nchw", spatial, rotation).reshape(size, size)


@given(size=st.integers(1, 40))
@settings(deadline=None, max_examples=20)
def test_the_matrix_is_scipys_transform(size: int) -> None:
    expected = scipy.fft.dct(np.eye(size), axis=0, norm="ortho")
    np.testing.assert_allclose(dct_matrix(size).numpy(), expected, atol=1e-12)


def test_two_dimensions_and_back() -> None:
    x = images(5, shape=SHAPE)
    height, width = dct_matrix(4), dct_matrix(6)
    coefficients = dct_coefficients(x, height, width)
    np.testing.assert_allclose(
        coefficients, scipy.fft.dctn(x.numpy(), axes=(2, 3), norm="ortho"), atol=1e-12
    )
    torch.testing.assert_close(dct_images(coefficients, height, width), x)


@pytest.mark.parametrize("batches", [1, 3, 40], ids=str)
def test_variances_are_those_of_the_dense_coefficients(batches: int) -> None:
    x = images(40, shape=SHAPE)
    moments = CoefficientMoments(SHAPE)
    for batch in x.chunk(batches):
        moments.update(batch)
    fitted = fit_channel_dct(moments, None)
    flat = x.flatten(1).numpy()
    np.testing.assert_allclose(fitted.mean, flat.mean(0), atol=1e-12)
    coefficients = (flat - flat.mean(0)) @ dense_basis(fitted.rotation.numpy(), SHAPE).T
    scatter = (coefficients**2).sum(0)
    np.testing.assert_allclose(fitted.singular_values**2, scatter[fitted.order], rtol=1e-9)
    assert sorted(fitted.order.tolist()) == list(range(72))
    np.testing.assert_allclose(fitted.total_variance, flat.var(0, ddof=1).sum(), rtol=1e-10)


def test_the_rotation_is_the_pca_of_the_channels() -> None:
    x = images(60, shape=SHAPE)
    fitted = fit_channel_dct(CoefficientMoments(SHAPE).update(x), 5)
    centred = (x - x.mean(0)).permute(0, 2, 3, 1).reshape(-1, 3).numpy()
    _, _, vt = np.linalg.svd(centred, full_matrices=False)
    overlap = np.abs(vt @ fitted.rotation.numpy())
    np.testing.assert_allclose(overlap, np.eye(3), atol=1e-7)


def test_it_is_the_pca_where_coefficients_do_not_correlate() -> None:
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    basis = dense_basis(rotation, SHAPE)
    # A scatter matrix that is exactly diagonal: plus and minus every basis vector.
    scale = (0.8 ** np.arange(72))[np.random.default_rng(1).permutation(72)]
    scale[:24] *= 50  # the first channel varies most, and the rotation is found again
    scale[24:48] *= 7
    x = torch.from_numpy(np.concatenate([basis * scale[:, None], -basis * scale[:, None]]) + 0.3)
    moments = CoefficientMoments(SHAPE).update(x.reshape(-1, *SHAPE))
    fitted = fit_channel_dct(moments, 30)
    _, singular_values, vt = np.linalg.svd(x.numpy() - 0.3, full_matrices=False)
    np.testing.assert_allclose(fitted.singular_values, singular_values[:30], rtol=1e-9)
    own = dense_basis(fitted.rotation.numpy(), SHAPE)[fitted.order]
    np.testing.assert_allclose(np.abs((own * vt[:30]).sum(1)), 1.0, atol=1e-9)


def test_a_number_a_fraction_or_all() -> None:
    x = images(40, shape=SHAPE)
    moments = CoefficientMoments(SHAPE).update(x)
    whole = fit_channel_dct(moments, None)
    assert len(whole.order) == 72
    variances = whole.singular_values.square()
    for fraction in (0.3, 0.9, 0.999):
        part = fit_channel_dct(moments, fraction)
        kept = len(part.order)
        assert variances[:kept].sum() >= fraction * variances.sum()
        assert variances[: kept - 1].sum() < fraction * variances.sum()
    assert torch.equal(fit_channel_dct(moments, 7).order, whole.order[:7])


def test_coefficients_that_never_vary_are_left_out() -> None:
    x = images(40, shape=(1, 4, 4)).mean((2, 3), keepdim=True).expand(-1, 1, 4, 4)
    moments = CoefficientMoments((1, 4, 4)).update(x)
    assert fit_channel_dct(moments, None).order.tolist() == [0]
    with pytest.raises(NotEnoughDataError, match="here 1; found n_components=2"):
        fit_channel_dct(moments, 2)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(OptionError, match=r"channels, height, width\); found \(4,\)"):
        CoefficientMoments((4,))
    moments = CoefficientMoments(SHAPE)
    with pytest.raises(ShapeError, match="72 numbers"):
        moments.update(torch.zeros(2, 3, 4, 5))
    x = images(4, shape=SHAPE)
    x[2, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        moments.update(x)
    assert moments.count == 0
    with pytest.raises(NotEnoughDataError, match="at least 2 samples; found 0"):
        fit_channel_dct(moments, None)
    moments.update(torch.ones(5, *SHAPE))
    with pytest.raises(NotEnoughDataError, match="same output for all 5 samples"):
        fit_channel_dct(moments, None)


IMAGE = (3, 6, 6)
DATA = images(90, shape=IMAGE)
X = images(12, seed=8, shape=IMAGE)


@pytest.fixture(params=["conv1", "act"], ids=["input", "output"])
def fitted(request: pytest.FixtureRequest) -> ttapca.FittedFilter:
    return ttapca.fit(small_convnet(), request.param, DATA, route="dct")


def test_the_filter_equals_one_with_a_dense_basis(fitted: ttapca.FittedFilter) -> None:
    fitted = fitted.truncated(40)
    samples = images(9, seed=3, shape=fitted.shape)
    basis = dense_basis(fitted.basis.rotation.numpy(), fitted.shape)[fitted.basis.order]  # (40, d)
    relative = (fitted.singular_values_ / fitted.singular_values_[0]).numpy()
    center = fitted.center_.numpy()
    components = (samples.flatten(1).numpy() - center) @ basis.T
    expected = (components * relative / (relative + 0.2)) @ basis + center
    output = fitted.spectral_filter("relu", dtype=torch.float64, initial=0.2)(samples)
    np.testing.assert_allclose(output.flatten(1).detach(), expected, atol=1e-10)


def test_it_filters_the_smaller_side_of_an_affine_layer() -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, "conv1", DATA, route="dct")
    assert (fitted.basis.at_input, fitted.shape, fitted.output_shape) == (
        True,
        (3, 6, 6),
        (8, 6, 6),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            fitted.mean_, model.conv1(DATA).flatten(1).mean(0), rtol=0, atol=1e-10
        )
    assert not ttapca.fit(model, "act", DATA, route="dct").basis.at_input


def test_all_coefficients_and_unit_gains_are_the_identity(fitted: ttapca.FittedFilter) -> None:
    model = small_convnet()
    plain = model(X).detach()
    if (
        fitted.basis.at_input
    ):  # else some coefficients of a ReLU's output never vary, and are dropped
        ttapca.attach(model, fitted)
        torch.testing.assert_close(model(X).detach(), plain, rtol=0, atol=1e-10)
    rows = fitted.spectral_filter(dtype=torch.float64)
    torch.testing.assert_close(rows(rows(s := images(4, shape=fitted.shape))), rows(s))


@pytest.mark.parametrize("method", ["ttapca-relu", "ttapca-exp", "wiener", "tent"])
def test_every_method_takes_it(fitted: ttapca.FittedFilter, method: str) -> None:
    model = small_convnet()
    noisy = X + torch.randn(X.shape, generator=torch.Generator().manual_seed(0), dtype=X.dtype)
    with left_untouched(model, X):
        adapted = ttapca.adapt(model, method, filter=fitted)
        first = adapted(noisy)
        assert torch.isfinite(first).all()
        assert torch.equal(adapted(noisy), first)
        adapted.detach()


def test_saved_and_loaded_it_is_the_same(fitted: ttapca.FittedFilter, tmp_path: Path) -> None:
    fitted.save(tmp_path / "filter", dtype="float64")
    again = ttapca.load(tmp_path / "filter")
    assert (again.route, again.basis.at_input) == ("dct", fitted.basis.at_input)
    assert torch.equal(again.basis.order, fitted.basis.order)
    assert torch.equal(again.energies_, fitted.energies_)
    samples = images(4, shape=fitted.shape)
    one, two = (each.spectral_filter("relu", dtype=torch.float64) for each in (fitted, again))
    assert torch.equal(one(samples), two(samples))
    assert (tmp_path / "filter" / "filter.safetensors").stat().st_size < 200_000


def test_energies_are_those_of_the_components() -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", DATA, route="dct")
    # Ninety samples: all are kept. Their mean energy is that of the source, 1, in every band.
    expected = np.full(fitted.energies_.shape[1], 89 / 90)
    np.testing.assert_allclose(fitted.energies_.double().mean(0), expected, rtol=1e-4)


def test_a_layer_without_images_is_refused() -> None:
    with pytest.raises(OptionError, match=r"found \(5,\)"):
        ttapca.fit(small_convnet(), "fc", DATA, route="dct")


@torch.no_grad()
def test_a_compiled_model_with_cosines() -> None:
    torch.compiler.reset()
    model = small_convnet()
    ttapca.attach(model, ttapca.fit(model, "conv1", DATA, 50, route="dct"), "relu", initial=0.3)
    torch.testing.assert_close(torch.compile(model, backend="eager")(X), model(X))
