"""Moments of a stream, and the PCA by a p x p matrix and by one of samples x samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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
from ttapca.spectral import pca as pca_module
from ttapca.spectral.pca import SampleGram, hold, signs

Find = Callable[..., PCA]


def by_moments(batches: list[Tensor], wish: int | float | None = None) -> PCA:
    moments = Moments(batches[0].shape[1:].numel())
    for batch in batches:
        moments.update(batch)
    return PCA.from_moments(moments, wish)


def by_gram(batches: list[Tensor], wish: int | float | None = None) -> PCA:
    return SampleGram(batches, batches[0].shape[1:].numel()).pca(wish)


both = pytest.mark.parametrize("find", [by_moments, by_gram])


def assert_same_moments(a: Moments, b: Moments) -> None:
    assert a.count == b.count
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.scatter, b.scatter, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)], ids=["vector", "image"])
@pytest.mark.parametrize("offset", [0.0, 1e8], ids=["near zero", "far from zero"])
def test_moments_equal_numpy(shape: tuple[int, ...], offset: float) -> None:
    data = images(60, shape=shape) + offset
    moments = Moments(int(np.prod(shape)))
    for batch in data.split(13):
        moments.update(batch)
    flat = data.flatten(1).numpy()
    np.testing.assert_allclose(moments.mean, flat.mean(0), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(
        moments.covariance, np.cov(flat.T), rtol=1e-6, atol=1e-12 + offset / 1e14
    )


@given(
    cuts=st.lists(st.integers(0, 40), max_size=6).map(sorted),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_split_and_any_order_of_merging_give_the_same(cuts: list[int], order) -> None:
    data = images(40, shape=(4,))
    parts = [Moments(4).update(data[a:b]) for a, b in itertools.pairwise([0, *cuts, 40])]
    order.shuffle(parts)
    while len(parts) > 1:  # as a tree of any shape
        parts.append(parts.pop(order.randrange(len(parts))).merge(parts.pop()))
    assert_same_moments(parts[0], Moments(4).update(data))
    parts[0].merge(parts[0])
    assert_same_moments(parts[0], Moments(4).update(torch.cat([data, data])))


def test_samples_that_are_removed_or_left_out_were_never_there() -> None:
    data = images(60, shape=(9,)) + 3
    rest = torch.cat([data[:10], data[40:]])
    found = Moments(9).update(data).remove(data[10:40])
    assert_same_moments(found, Moments(9).update(rest))
    without = SampleGram(data.split(8), 9).pca(5, leave_out=range(10, 40))
    assert without.n_samples == 30
    for name in ("mean", "singular_values", "basis"):
        torch.testing.assert_close(getattr(without, name), getattr(by_gram([rest], 5), name))
    with pytest.raises(NotEnoughDataError, match="Some of 30 samples must be left"):
        found.remove(data[:30])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_that_is_not_finite_adds_nothing(bad: float) -> None:
    moments = Moments(4).update(images(10, shape=(4,)))
    before = Moments(4).merge(moments)
    poisoned = images(5, shape=(4,))
    poisoned[2, 1] = bad
    with pytest.raises(NonFiniteError, match="found NaN or infinity"):
        moments.update(poisoned)
    assert_same_moments(moments, before)
    with pytest.raises(NonFiniteError, match="found NaN or infinity"):
        by_gram([poisoned])


def test_moments_refuse_other_sizes() -> None:
    for wrong in (torch.zeros(5, 3), torch.zeros(4)):
        with pytest.raises(ShapeError, match="4 numbers each"):
            Moments(4).update(wrong)
        with pytest.raises(ShapeError, match="4 numbers each"):
            SampleGram([wrong], 4)
    with pytest.raises(ShapeError, match="4 and 3"):
        Moments(4).merge(Moments(3))
    with pytest.raises(OptionError, match="at least one number"):
        Moments(0)
    with pytest.raises(NotEnoughDataError, match="2 samples; found 1"):
        _ = Moments(4).update(torch.zeros(1, 4)).covariance


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_sklearn(find: Find, dtype: torch.dtype) -> None:
    data = images(80, shape=(3, 2, 2)).to(dtype) + 10
    ours = find([data[:0], *data.split(13)])
    theirs = decomposition.PCA(svd_solver="full").fit(data.flatten(1).double().numpy())
    np.testing.assert_allclose(ours.mean, theirs.mean_, atol=1e-12)
    np.testing.assert_allclose(ours.singular_values, theirs.singular_values_, rtol=1e-9)
    np.testing.assert_allclose(ours.explained_variance, theirs.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(
        ours.explained_variance_ratio, theirs.explained_variance_ratio_, rtol=1e-9
    )
    overlap = np.abs(np.sum(ours.basis.numpy().T * theirs.components_, axis=1))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-9)
    np.testing.assert_allclose(ours.inverse_transform(ours.transform(data)), data.flatten(1))
    for wish, kept in ((None, 12), (5, 5), (1, 1), (12, 12), (1.0, 12)):
        assert find([data], wish).basis.shape == (12, kept)


@pytest.mark.parametrize("columns", [1024, 7])
@pytest.mark.parametrize("wish", [None, 1, 12, 0.9])
def test_few_long_samples(
    wish: int | float | None, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pca_module, "COLUMNS", columns)
    samples = images(25, shape=(4, 50)) + 1e3
    one, two = by_gram(list(samples.split(6)), wish), by_moments([samples], wish)
    torch.testing.assert_close(one.basis, two.basis, rtol=0, atol=1e-8)  # signs as well
    torch.testing.assert_close(one.singular_values, two.singular_values)
    assert one.total_variance == pytest.approx(two.total_variance)
    if wish is None:
        assert one.basis.shape[1] == 24  # as many as centred samples have


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 30), size=st.integers(1, 60), decades=st.floats(0, 6), seed=st.integers(0, 99)
)
def test_columns_stay_orthonormal_where_singular_values_are_small(
    n: int, size: int, decades: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.linspace(0, -decades, size, dtype=torch.float64)
    samples = torch.randn(n, size, generator=generator, dtype=torch.float64) * scale
    pca = by_gram(list(samples.split(4)))
    kept = len(pca.singular_values)
    torch.testing.assert_close(
        pca.basis.T @ pca.basis, torch.eye(kept, dtype=torch.float64), rtol=0, atol=1e-12
    )
    exact = DensePCA(samples).singular_values
    np.testing.assert_allclose(pca.singular_values, exact[:kept], rtol=1e-3, atol=1e-9 * exact[0])


def test_what_is_held_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = images(50, shape=(8,)).split(10)
    held, complete = hold(iter(batches))
    assert (len(held), complete) == (5, True)
    assert all(copy.data_ptr() != own.data_ptr() for copy, own in zip(held, batches, strict=True))
    for name, limit in (("MOST_SAMPLES", 25), ("MOST_BYTES", 25 * 8 * 8)):
        with monkeypatch.context() as patch:
            patch.setattr(pca_module, name, limit)
            stream = iter(batches)
            held, complete = hold(stream)
            assert (len(held), complete) == (3, False)
            assert torch.equal(next(stream), batches[3])
            assert hold(iter(batches), limited=False)[1]


def test_signs_are_fixed() -> None:
    data = images(80, shape=(12,))
    pca = by_moments([data])
    torch.testing.assert_close(pca.basis, by_moments([-data]).basis, rtol=1e-9, atol=1e-9)
    peaks = pca.basis.gather(0, pca.basis.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())
    tied = torch.tensor([[1.0, -1.0]], dtype=torch.float64).T / 2**0.5
    for nudge in (1 + 1e-12, 1 - 1e-12):  # rounding does not decide
        nudged = tied * torch.tensor([[1.0], [nudge]], dtype=torch.float64)
        assert signs(nudged).tolist() == [1.0]
        assert signs(-nudged).tolist() == [-1.0]


@both
def test_data_that_have_fewer_components(find: Find) -> None:
    thin = images(50, shape=(3,)) @ images(3, seed=5, shape=(10,))
    assert find([thin]).basis.shape[1] == 3
    with pytest.raises(NotEnoughDataError, match=r"here 3; found n_components=4\. Ask for 3"):
        find([thin], 4)
    few = images(6, shape=(10,))
    assert find([few]).basis.shape[1] == 5
    with pytest.raises(NotEnoughDataError, match="6 components need at least 7 samples; found 6"):
        find([few], 6)
    with pytest.raises(NotEnoughDataError, match="at least 2 samples; found 1"):
        find([few[:1]])
    with pytest.raises(NotEnoughDataError, match="same output for all 20 samples"):
        find([torch.full((20, 3), 0.1)])


@pytest.mark.parametrize("wish", [0, -1, 0.0, 1.5, float("nan"), True, "all"], ids=repr)
def test_a_wish_that_makes_no_sense(wish: object) -> None:
    with pytest.raises(OptionError, match="`n_components` must be a whole number"):
        by_moments([images(80, shape=(12,))], wish)  # type: ignore[arg-type]
