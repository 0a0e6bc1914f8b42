from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch

from oracles import images
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError, ShapeError
from ttapca.spectral.cosine import CoefficientMoments, Cosine, fit_channel_dct

SHAPE = (3, 4, 6)


def dense_cosines(rotation: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Every basis vector as an image, by scipy, in rows: (C H W, C H W)."""
    size = int(np.prod(shape))
    unit = np.eye(size).reshape(size, *shape)
    spatial = scipy.fft.idctn(unit, axes=(2, 3), norm="ortho")
    return np.einsum("nkhw,ck->nchw", spatial, rotation).reshape(size, size)


def test_the_basis_is_that_of_scipy() -> None:
    rotation = torch.linalg.qr(images(3, shape=(3,)))[0]
    order = torch.randperm(72, generator=torch.Generator().manual_seed(0))[:40]
    basis = Cosine(rotation, order, SHAPE)
    dense = torch.from_numpy(dense_cosines(rotation.numpy(), SHAPE))[order]
    samples, components = images(5, shape=(72,)), images(5, shape=(40,))
    torch.testing.assert_close(basis.project(samples), samples @ dense.T)
    torch.testing.assert_close(basis.add_rebuilt(samples, components), samples + components @ dense)


@pytest.mark.parametrize("batches", [1, 40], ids=str)
def test_variances_are_those_of_the_dense_coefficients(batches: int) -> None:
    x = images(40, shape=SHAPE)
    moments = CoefficientMoments(SHAPE)
    for batch in x.chunk(batches):
        moments.update(batch)
    fitted = fit_channel_dct(moments, None)
    flat = x.flatten(1).numpy()
    np.testing.assert_allclose(fitted.mean, flat.mean(0), atol=1e-12)
    coefficients = (flat - flat.mean(0)) @ dense_cosines(fitted.rotation.numpy(), SHAPE).T
    scatter = (coefficients**2).sum(0)
    np.testing.assert_allclose(fitted.singular_values**2, scatter[fitted.order], rtol=1e-9)
    assert sorted(fitted.order.tolist()) == list(range(72))
    np.testing.assert_allclose(fitted.total_variance, flat.var(0, ddof=1).sum(), rtol=1e-10)
    _, _, vt = np.linalg.svd((x - x.mean(0)).permute(0, 2, 3, 1).reshape(-1, 3).numpy())
    np.testing.assert_allclose(np.abs(vt @ fitted.rotation.numpy()), np.eye(3), atol=1e-7)


def test_it_is_the_pca_where_coefficients_do_not_correlate() -> None:
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    basis = dense_cosines(rotation, SHAPE)
    # A scatter matrix that is exactly diagonal: plus and minus every basis vector.
    scale = (0.8 ** np.arange(72))[np.random.default_rng(1).permutation(72)]
    scale[:24] *= 50  # the first channel varies most, and the rotation is found again
    scale[24:48] *= 7
    x = torch.from_numpy(np.concatenate([basis * scale[:, None], -basis * scale[:, None]]) + 0.3)
    fitted = fit_channel_dct(CoefficientMoments(SHAPE).update(x.reshape(-1, *SHAPE)), 30)
    _, singular_values, vt = np.linalg.svd(x.numpy() - 0.3, full_matrices=False)
    np.testing.assert_allclose(fitted.singular_values, singular_values[:30], rtol=1e-9)
    own = dense_cosines(fitted.rotation.numpy(), SHAPE)[fitted.order]
    np.testing.assert_allclose(np.abs((own * vt[:30]).sum(1)), 1.0, atol=1e-9)


def test_a_number_a_fraction_or_all() -> None:
    moments = CoefficientMoments(SHAPE).update(images(40, shape=SHAPE))
    whole = fit_channel_dct(moments, None)
    assert len(whole.order) == 72
    variances = whole.singular_values.square()
    for fraction in (0.3, 0.9, 0.999):
        kept = len(fit_channel_dct(moments, fraction).order)
        assert variances[:kept].sum() >= fraction * variances.sum()
        assert variances[: kept - 1].sum() < fraction * variances.sum()
    assert torch.equal(fit_channel_dct(moments, 7).order, whole.order[:7])
    flat = images(40, shape=(1, 1, 1)).expand(-1, 1, 4, 4)  # nothing varies but the mean
    moments = CoefficientMoments((1, 4, 4)).update(flat)
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
