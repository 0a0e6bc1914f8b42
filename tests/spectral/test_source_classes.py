"""What classes do to a network: corrections, likeness, and whether two images have one class."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttapca.fitting.source_statistics import ChannelSums
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.source_classes import (
    IMAGES_A_FEATURE,
    LARGEST_RANK,
    SMALLEST_RATIO,
    PairStatistic,
    SourceClasses,
    corrections,
    late_layers,
    pair_statistic,
)


def random_sums(classes: int, channels: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return class weights and sums of moments that belong to real samples."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 + torch.rand(classes, generator=generator, dtype=torch.float64)
    sums = {}
    for path in ("early", "late"):
        mean = torch.randn(classes, channels, generator=generator, dtype=torch.float64)
        more = torch.rand(mean.shape, generator=generator, dtype=torch.float64)
        square = mean.square() + 0.5 + more
        sums[path] = torch.stack([mean, square], 1) * weights[:, None, None]
    return weights, sums


def corrections_for(classes: SourceClasses, path: str, shares: Tensor) -> tuple[Tensor, Tensor]:
    """What to do to the mean and variance of a layer, for shares of classes, (groups, classes)."""
    place = (shares.to(classes.shares) - classes.shares) @ classes.loadings
    return corrections(classes.layers[path], place)


# What the classes of a batch explain.


@pytest.mark.parametrize("classes", [2, 5, LARGEST_RANK])
def test_corrections_are_those_of_the_formula(classes: int) -> None:
    weights, sums = random_sums(classes, 7)
    moments = SourceClasses.from_sums(weights, sums)
    shares = np.random.default_rng(1).dirichlet(np.ones(classes), size=3)  # of three groups
    source = (weights / weights.sum()).numpy()
    for path, each in sums.items():
        mean_k, square_k = (each / weights[:, None, None]).numpy().transpose(1, 0, 2)
        mean, source_mean = shares @ mean_k, source @ mean_k
        var = shares @ square_k - mean**2
        source_var = source @ square_k - source_mean**2
        shift, scale = corrections_for(moments, path, torch.tensor(shares))
        assert shift.shape == scale.shape == (3, 7)
        np.testing.assert_allclose(shift, mean - source_mean, atol=1e-5)
        np.testing.assert_allclose(scale, source_var / var, rtol=1e-4)


def test_many_classes_are_kept_in_few_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    place = torch.randn(200, 3, generator=generator)  # three directions hold all there is
    mean = place @ torch.randn(3, 50, generator=generator)
    sums = {"late": torch.stack([mean, torch.full_like(mean, 40.0)], 1)}
    moments = SourceClasses.from_sums(torch.ones(200), sums)
    assert moments.loadings.shape[1] <= LARGEST_RANK
    shift, _ = corrections_for(moments, "late", torch.eye(200)[[17, 140]])
    torch.testing.assert_close(shift, mean[[17, 140]] - mean.mean(0), rtol=1e-3, atol=1e-3)


def test_source_shares_change_nothing() -> None:
    moments = SourceClasses.from_sums(*random_sums(6, 5))
    for path in moments.layers:
        shift, scale = corrections_for(moments, path, moments.shares[None])
        torch.testing.assert_close(shift, torch.zeros(1, 5), rtol=0, atol=1e-6)
        torch.testing.assert_close(scale, torch.ones(1, 5), rtol=1e-5, atol=0)


def test_a_variance_is_scaled_by_no_more_than_a_low_rank_is_believed() -> None:
    """Class moments that say that all variance lies within others, or none."""
    table = torch.zeros(2, 2, 2)
    table[0, 1] = 1.0  # the source has mean 0 and variance 1
    table[1, 1] = torch.tensor([1e3, -1.0])
    shift, scale = corrections(table, torch.ones(1, 1))
    assert not shift.any()
    assert scale.tolist() == [[pytest.approx(SMALLEST_RATIO), pytest.approx(1 / SMALLEST_RATIO)]]


# How alike images of one class are.


def means_by_class(between: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Channel means of images, shape (images, channels), and their classes; one is constant."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=600)
    means = between * rng.standard_normal((4, 9))[labels] + rng.standard_normal((600, 9))
    means[:, 4] = 2.0
    return means, labels


@pytest.mark.parametrize("between", [0.0, 0.3, 3.0])
def test_likeness_is_the_intraclass_correlation(between: float) -> None:
    """The share of the variance of each channel that lies between classes, on average."""
    means, labels = means_by_class(between)
    shares = torch.tensor(np.eye(4)[labels])
    rows = torch.tensor(np.stack([means, means**2 + 1], 1))
    sums = {"bn": torch.einsum("nk,nsc->ksc", shares, rows)}
    squares = {"bn": torch.tensor((means**2).sum(0))}
    found = SourceClasses.from_sums(shares.sum(0), sums, squares).likeness
    by_channel = []
    for column in np.delete(means, 4, 1).T:
        total = ((column - column.mean()) ** 2).mean()
        within = sum(
            ((column[labels == k] - column[labels == k].mean()) ** 2).sum() for k in range(4)
        )
        by_channel.append(1 - within / len(column) / total)
    assert found == {"bn": pytest.approx(np.mean(by_channel), abs=1e-9)}


def test_a_layer_that_never_changes_has_no_likeness() -> None:
    sums = {"bn": torch.tensor([[[1.0], [2.0]], [[1.0], [2.0]]])}
    classes = SourceClasses.from_sums(torch.ones(2), sums, {"bn": torch.tensor([2.0])})
    assert classes.likeness == {"bn": 0.0}


# Whether two images have one class.

LAYERS = {"late.1": 12, "late.2": 8}
CLASSES = 5


def features_of(
    separation: float, images: int = 900, seed: int = 0
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Channel means that correlate within classes, sure class probabilities, and the classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=images)
    mixing = np.random.default_rng(99).standard_normal((20, 20)) + 2 * np.eye(20)
    centres = np.random.default_rng(98).standard_normal((CLASSES, 20))
    rows = (rng.standard_normal((images, 20)) + separation * centres[labels]) @ mixing
    shares = 0.95 * np.eye(CLASSES)[labels] + 0.05 / CLASSES
    return torch.tensor(rows).float(), torch.tensor(shares).float(), labels


def statistic_of(separation: float, images: int = 900) -> PairStatistic | None:
    rows, shares, _ = features_of(separation, images)
    return pair_statistic(rows, shares, torch.ones(len(rows)), LAYERS, 1)


@functools.cache
def known() -> PairStatistic:
    found = statistic_of(1.0)
    assert found is not None
    return found


def described(pairs: PairStatistic, rows: Tensor) -> np.ndarray:
    """The features of images, of channel means in all layers."""
    parts = rows.split(list(LAYERS.values()), 1)
    found = pairs.described(dict(zip(LAYERS, parts, strict=True)))
    assert found is not None
    return found.double().numpy()


def log_ratios(pairs: PairStatistic, rows: Tensor) -> np.ndarray:
    """Of each image and the one before it, without the first."""
    features = described(pairs, rows)[None]
    return pairs.log_ratio(features[:, 0], features)[0, 1:]


def test_new_pairs_of_one_class_are_told_from_others() -> None:
    pairs = known()
    rows, _, labels = features_of(1.0, 2000, seed=1)
    order = np.concatenate([labels[:1000].argsort(kind="stable"), np.arange(1000, 2000)])
    same = np.diff(labels[order]) == 0
    features = described(pairs, rows[order])
    squares = np.diff(features, axis=0) ** 2
    between, within = squares[:, : pairs.directions], squares[:, pairs.directions :]
    log_f = np.log(between.mean(1) / within.mean(1))
    assert pairs.directions == CLASSES - 1
    assert log_f[same].mean() == pytest.approx(pairs.same, abs=0.3 * pairs.deviation)
    assert log_f[~same].mean() == pytest.approx(pairs.other, abs=0.3 * pairs.deviation)
    assert pairs.other - pairs.same > 0.5 * pairs.deviation
    # What a pair says is linear in log F, and 0 where both are as likely.
    middle = pairs.same + CONSTANTS.pair_middle * (pairs.other - pairs.same)
    slope = (pairs.other - pairs.same) / pairs.deviation**2
    expected = CONSTANTS.pair_weight * slope * (middle - log_f)
    np.testing.assert_allclose(log_ratios(pairs, rows[order]), expected, atol=1e-9)
    assert expected[same].mean() > 0 > expected[~same].mean()


@given(st.integers(0, 10_000), st.floats(0.05, 20.0), st.floats(-5.0, 5.0))
def test_a_common_shift_and_a_common_scale_change_nothing(
    seed: int, scale: float, shift: float
) -> None:
    pairs, (rows, _, _) = known(), features_of(1.0, 8, seed)
    rows = rows.double()
    moved = scale * (rows + shift * torch.arange(20))
    np.testing.assert_allclose(log_ratios(pairs, moved), log_ratios(pairs, rows), atol=1e-6)


def test_moments_of_a_stream_are_sums_that_fade() -> None:
    pairs, (rows, _, _) = known(), features_of(1.0, 24, seed=4)
    features = described(pairs, rows).reshape(2, 12, -1)
    sizes, before = [12, 5], np.abs(features[:, 0, :1]) * np.ones(2 * features.shape[2] + 1)
    found = pairs.past_after(before, features, sizes)
    for stream, size in enumerate(sizes):
        wanted = before[stream] * np.exp(-size / CONSTANTS.regime_memory)
        for row in features[stream, :size]:
            wanted = wanted + np.concatenate([[1.0], row, row * row])
        np.testing.assert_allclose(found[stream], wanted)


def test_if_any_two_images_look_alike_two_neighbours_say_nothing() -> None:
    """As on images of something else, in which a network sees no classes."""
    pairs = known()
    rows, _, _ = features_of(1.0, 600, seed=5)
    features = described(pairs, rows)[None]
    features[..., : pairs.directions] *= 0.4
    nothing, uneven = np.zeros((1, 2 * features.shape[2] + 1)), np.zeros(1)
    past = pairs.past_after(nothing, features)
    absolute = pairs.log_ratio(features[:, 0], features)[0, 1:]
    found = pairs.said_by_any(past, uneven)
    assert absolute.mean() > 0.5
    assert found[0] == pytest.approx(absolute.mean(), rel=0.1)
    # Unless the predictions agree: then it may be one class so far.
    assert pairs.said_by_any(past, np.ones(1))[0] < 0.5 * found[0]
    # Where two images are usually of two classes, nothing changes.
    plain = described(pairs, rows)[None]
    assert pairs.said_by_any(pairs.past_after(nothing, plain), uneven)[0] == 0.0


def test_the_image_before_is_that_of_the_stream() -> None:
    pairs, (rows, _, _) = known(), features_of(1.0, 30, seed=2)
    features = described(pairs, rows)[None]
    whole = pairs.log_ratio(np.zeros_like(features[:, 0]), features)
    first = pairs.log_ratio(np.zeros_like(features[:, 0]), features[:, :12])
    second = pairs.log_ratio(features[:, 11], features[:, 12:])
    np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)


def test_streams_are_looked_at_one_beside_the_other_in_any_library() -> None:
    pairs, (rows, _, _) = known(), features_of(1.0, 30, seed=4)
    features = described(pairs, rows).reshape(3, 10, -1)
    before = described(pairs, features_of(1.0, 3, seed=5)[0])
    found = pairs.log_ratio(before, features)
    for number in range(3):
        own = slice(number, number + 1)
        np.testing.assert_array_equal(pairs.log_ratio(before[own], features[own]), found[own])
    given = (torch.from_numpy(before), torch.from_numpy(features))
    in_torch = pairs.log_ratio(*given, xp=torch)
    assert isinstance(in_torch, Tensor)
    np.testing.assert_allclose(in_torch, found, rtol=0, atol=1e-10)


def test_two_equal_images_say_something_finite() -> None:
    pairs, (rows, _, _) = known(), features_of(1.0, 3)
    rows[1] = rows[0]
    assert np.isfinite(log_ratios(pairs, rows)).all()


@pytest.mark.parametrize(
    ("separation", "images"),
    [(0.0, 900), (1.0, 20 * IMAGES_A_FEATURE - 1)],
    ids=["classes are alike", "too few images"],
)
def test_pairs_that_say_nothing_are_left_out(separation: float, images: int) -> None:
    assert statistic_of(separation, images) is None


def test_one_class_has_no_pairs() -> None:
    rows, _, _ = features_of(1.0)
    ones = torch.ones(len(rows))
    assert pair_statistic(rows, ones[:, None], ones, LAYERS, 1) is None


def test_the_order_of_the_images_does_not_matter() -> None:
    rows, shares, _ = features_of(1.0)
    expected = known()
    other = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    found = pair_statistic(rows[other], shares[other], torch.ones(len(rows)), LAYERS, 1)
    assert found is not None
    torch.testing.assert_close(found.numbers, expected.numbers, rtol=1e-6, atol=1e-9)
    new = features_of(1.0, 50, seed=3)[0]
    np.testing.assert_allclose(log_ratios(found, new), log_ratios(expected, new), atol=1e-3)


def test_it_is_written_as_numbers_and_layers() -> None:
    pairs = known()
    again = PairStatistic.of_numbers(pairs.layers, pairs.numbers)
    for each in dataclasses.fields(PairStatistic):
        assert getattr(again, each.name) == getattr(pairs, each.name)
    assert again.features == 20


def test_every_stride_th_channel_is_looked_at() -> None:
    pairs = PairStatistic({"a": torch.ones(2, 3), "b": torch.ones(1, 3)}, 4, 1, 0.0, 1.0, 1.0)
    means = {"a": torch.arange(8.0)[None], "b": torch.full((1, 4), 100.0), "c": torch.ones(1, 1)}
    found = pairs.described(means)
    assert found is not None
    assert found.tolist() == [[0.0 + 4.0 + 100.0] * 3]
    assert pairs.described({"a": means["a"]}) is None


@pytest.mark.parametrize(
    ("layers", "late"),
    [(0, []), (1, [0]), (2, [0]), (3, [1]), (4, [2]), (8, [6]), (20, [15, 16, 17, 18])],
)
def test_late_layers_are_the_last_quarter_without_the_last(layers: int, late: list[int]) -> None:
    assert late_layers([str(number) for number in range(layers)]) == [str(each) for each in late]


# Sums of parts.


def sums_of(rows: Tensor, shares: Tensor) -> ChannelSums:
    """What `fit` adds up of some images, in two parts."""
    found = ChannelSums()
    for some in torch.arange(len(rows)).split(70):
        moments = torch.stack([rows[some], rows[some].square() + 1], 1).double()
        by_class = torch.einsum("nk,nsc->ksc", shares[some].double(), moments)
        squares = rows[some].double().square().sum(0)
        late = [(rows[some], shares[some], torch.ones(len(some)))]
        weights = shares[some].double().sum(0)
        found.merge(
            ChannelSums(
                weights=weights,
                by_class={"bn": by_class},
                squares={"bn": squares},
                late_features=late,
            )
        )
    return found


def test_parts_that_are_merged_are_as_the_whole() -> None:
    rows, shares, _ = features_of(1.0)
    whole, parts = sums_of(rows, shares), sums_of(rows[:500], shares[:500])
    parts.merge(pickle.loads(pickle.dumps(sums_of(rows[500:], shares[500:]))))
    found = []
    for sums in (whole, parts):
        assert sums.weights is not None
        tables = map(torch.cat, zip(*sums.late_features, strict=True))
        pairs = pair_statistic(*tables, LAYERS, 1)
        found.append(SourceClasses.from_sums(sums.weights, sums.by_class, sums.squares, pairs))
    for other in found[1:]:
        torch.testing.assert_close(other.shares, found[0].shares)
        torch.testing.assert_close(other.layers["bn"][0], found[0].layers["bn"][0])
        assert other.likeness["bn"] == pytest.approx(found[0].likeness["bn"])
        assert other.pairs is not None
        assert found[0].pairs is not None
        torch.testing.assert_close(other.pairs.numbers, found[0].pairs.numbers)
