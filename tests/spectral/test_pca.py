from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import decomposition
from torch import Tensor

from oracles import DensePCA, images
from ttapca import PCA, Moments
from ttapca.errors import NonFiniteError, NotEnoughDataError, OptionError, ShapeError
from ttapca.spectral.pca import signs


def assert_same_moments(a: Moments, b: Moments) -> None:
    assert a.count == b.count
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.scatter, b.scatter, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (5, 3)], ids=["vector", "image", "tokens"])
def test_moments_equal_numpy(shape: tuple[int, ...]) -> None:
    data = images(60, shape=shape)
    moments = Moments(int(np.prod(shape)))
    for batch in data.split(13):
        moments.update(batch)
    flat = data.flatten(1).numpy()
    np.testing.assert_allclose(moments.mean, flat.mean(0), atol=1e-13)
    np.testing.assert_allclose(moments.covariance, np.cov(flat.T), atol=1e-12)


def test_moments_survive_a_mean_far_from_zero() -> None:
    data = images(400, shape=(5,)) + 1e8
    moments = Moments(5)
    for batch in data.split(7):
        moments.update(batch)
    np.testing.assert_allclose(moments.covariance, np.cov(data.T.numpy()), rtol=1e-6)


cuts = st.lists(st.integers(0, 40), min_size=0, max_size=6).map(sorted)


@given(cuts=cuts, order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_split_and_any_order_of_merging_give_the_same(cuts: list[int], order) -> None:
    data = images(40, shape=(4,))
    whole = Moments(4).update(data)
    bounds = [0, *cuts, 40]
    parts = [Moments(4).update(data[a:b]) for a, b in itertools.pairwise(bounds)]
    order.shuffle(parts)
    merged = Moments(4)
    for part in parts:
        merged.merge(part)
    assert_same_moments(merged, whole)


@given(cuts=cuts)
@settings(max_examples=40, deadline=None)
def test_merging_is_associative(cuts: list[int]) -> None:
    data = images(40, shape=(4,))
    first, second = cuts[0] if cuts else 10, cuts[-1] if cuts else 20

    def parts() -> list[Moments]:
        pieces = (data[:first], data[first:second], data[second:])
        return [Moments(4).update(piece) for piece in pieces]

    a, b, c = parts()
    left = a.merge(b).merge(c)
    a, b, c = parts()
    right = a.merge(b.merge(c))
    assert_same_moments(left, right)


def test_merging_with_itself_doubles_the_data() -> None:
    data = images(9, shape=(4,))
    moments = Moments(4).update(data)
    assert_same_moments(moments.merge(moments), Moments(4).update(torch.cat([data, data])))


def test_memory_does_not_grow_with_the_samples() -> None:
    moments = Moments(6)
    sizes = []
    for _ in range(3):
        moments.update(images(100, shape=(6,)))
        sizes.append(moments.mean.nbytes + moments._lower.nbytes)
    assert sizes == [6 * 8 + 36 * 8] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_that_is_not_finite_adds_nothing(bad: float) -> None:
    moments = Moments(4).update(images(10, shape=(4,)))
    before = Moments(4).merge(moments)
    poisoned = images(5, shape=(4,))
    poisoned[2, 1] = bad
    with pytest.raises(NonFiniteError, match="found NaN or infinity"):
        moments.update(poisoned)
    assert_same_moments(moments, before)


def test_moments_refuse_other_sizes() -> None:
    with pytest.raises(ShapeError, match=r"4 numbers each.*\(5, 3\)"):
        Moments(4).update(torch.zeros(5, 3))
    with pytest.raises(ShapeError, match="4 numbers each"):
        Moments(4).update(torch.zeros(4))
    with pytest.raises(ShapeError, match="4 and 3"):
        Moments(4).merge(Moments(3))
    with pytest.raises(OptionError, match="at least one number"):
        Moments(0)
    with pytest.raises(NotEnoughDataError, match="2 samples; found 1"):
        _ = Moments(4).update(torch.zeros(1, 4)).covariance


def test_pca_equals_sklearn() -> None:
    data = images(80, shape=(3, 2, 2))
    ours = PCA.from_moments(Moments(12).update(data))
    theirs = decomposition.PCA(svd_solver="full").fit(data.flatten(1).numpy())
    np.testing.assert_allclose(ours.mean, theirs.mean_, atol=1e-12)
    np.testing.assert_allclose(ours.singular_values, theirs.singular_values_, rtol=1e-9)
    np.testing.assert_allclose(ours.explained_variance, theirs.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(
        ours.explained_variance_ratio, theirs.explained_variance_ratio_, rtol=1e-9
    )
    overlap = np.abs(np.sum(ours.basis.numpy().T * theirs.components_, axis=1))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-9)


def test_singular_values_equal_a_float64_svd_of_float32_data() -> None:
    data = images(300, shape=(40,)).float()
    moments = Moments(40)
    for batch in data.split(32):
        moments.update(batch)
    dense = DensePCA(data)
    np.testing.assert_allclose(
        PCA.from_moments(moments).singular_values, dense.singular_values, rtol=1e-9
    )


def test_signs_are_fixed() -> None:
    pca = PCA.from_moments(Moments(12).update(images(80, shape=(12,))))
    flipped = PCA.from_moments(Moments(12).update(-images(80, shape=(12,))))
    torch.testing.assert_close(pca.basis, flipped.basis, rtol=1e-9, atol=1e-9)
    peaks = pca.basis.gather(0, pca.basis.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())


def test_rounding_does_not_decide_the_sign_of_a_tied_vector() -> None:
    tied = torch.tensor([[1.0, -1.0]], dtype=torch.float64).T / 2**0.5
    for nudge in (1 + 1e-12, 1 - 1e-12):
        nudged: Tensor = tied.clone()
        nudged[1] *= nudge
        assert signs(nudged).tolist() == [1.0]
        assert signs(-nudged).tolist() == [-1.0]


@pytest.mark.parametrize(
    ("wish", "kept"), [(None, 12), (5, 5), (1, 1), (12, 12), (1.0, 12)], ids=str
)
def test_number_of_components(wish: int | float | None, kept: int) -> None:
    moments = Moments(12).update(images(80, shape=(12,)))
    assert PCA.from_moments(moments, wish).basis.shape == (12, kept)


@given(fraction=st.floats(0.01, 0.999))
@settings(deadline=None, max_examples=40)
def test_a_fraction_keeps_just_enough_variance(fraction: float) -> None:
    pca = PCA.from_moments(Moments(12).update(images(80, shape=(12,))), fraction)
    ratios = pca.explained_variance_ratio
    assert float(ratios.sum()) >= fraction - 1e-12
    assert float(ratios[:-1].sum()) < fraction


def test_rank_deficient_data_keep_their_rank() -> None:
    thin = images(50, shape=(3,)) @ images(3, seed=5, shape=(10,))
    moments = Moments(10).update(thin)
    assert PCA.from_moments(moments).basis.shape[1] == 3
    with pytest.raises(NotEnoughDataError, match=r"here 3; found n_components=4\. Ask for 3"):
        PCA.from_moments(moments, 4)


def test_more_components_than_samples() -> None:
    moments = Moments(10).update(images(6, shape=(10,)))
    with pytest.raises(NotEnoughDataError, match="6 components need at least 7 samples; found 6"):
        PCA.from_moments(moments, 6)
    assert PCA.from_moments(moments).basis.shape[1] == 5
    with pytest.raises(NotEnoughDataError, match="at least 2 samples; found 0"):
        PCA.from_moments(Moments(10))


def test_constant_data_have_no_components() -> None:
    with pytest.raises(NotEnoughDataError, match="same output for all 20 samples"):
        PCA.from_moments(Moments(3).update(torch.full((20, 3), 0.1)))


@pytest.mark.parametrize("wish", [0, -1, 0.0, 1.5, float("nan"), True, "all"], ids=repr)
def test_a_wish_that_makes_no_sense(wish: object) -> None:
    moments = Moments(12).update(images(80, shape=(12,)))
    with pytest.raises(OptionError, match="`n_components` must be a whole number"):
        PCA.from_moments(moments, wish)  # type: ignore[arg-type]


@given(kept=st.integers(1, 12), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_projection_is_idempotent(kept: int, seed: int) -> None:
    pca = PCA.from_moments(Moments(12).update(images(80, shape=(12,))), kept)
    x = images(5, seed=seed, shape=(12,))
    once = pca.inverse_transform(pca.transform(x))
    twice = pca.inverse_transform(pca.transform(once))
    torch.testing.assert_close(once, twice, rtol=1e-10, atol=1e-10)
    if kept == 12:
        torch.testing.assert_close(once, x, rtol=1e-9, atol=1e-9)


def test_what_is_removed_was_never_there() -> None:
    data = torch.randn(60, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 3
    found = Moments(9).update(data).remove(data[10:40])
    expected = Moments(9).update(torch.cat([data[:10], data[40:]]))
    assert found.count == expected.count
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.scatter, expected.scatter, rtol=1e-10, atol=1e-10)
    with pytest.raises(NotEnoughDataError, match="Some of 30 samples must be left"):
        found.remove(data[:30])
