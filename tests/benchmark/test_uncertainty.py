"""Intervals and tests over images: against known distributions, enumeration and bootstrap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from ttapca.benchmark.uncertainty import ImageTally, differences, holm, sign_flip_p, standings

SIMULATED, IMAGES = 500, 200
CORRUPTIONS = np.array([-1.5, -0.5, 0.5, 1.0])  # how much harder each makes an image
METHODS = np.array([-1.0, -0.7])
SPREAD = 1.5  # of how hard images are in themselves


def chance_of_wrong(difficulty: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of shape (methods, corruptions, images); a hard image is hard for both methods."""
    effort = METHODS[:, None, None] + CORRUPTIONS[:, None] + SPREAD * difficulty
    return 1 / (1 + np.exp(-effort))


def true_errors() -> NDArray[np.float64]:
    """The mean error of each method over all images there could be, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    return 100 * chance_of_wrong(nodes).mean(1) @ (weights / weights.sum())


def simulated_tallies() -> list[list[ImageTally]]:
    """Comparisons of two methods, each on images of its own."""
    random = np.random.default_rng(20)
    found = []
    for _ in range(SIMULATED):
        chances = chance_of_wrong(random.standard_normal(IMAGES))
        wrong = (random.random(chances.shape) < chances).sum(1)
        found.append([ImageTally(own, len(CORRUPTIONS)) for own in wrong])
    return found


def test_intervals_hold_the_truth_in_95_of_100_comparisons() -> None:
    truth = true_errors()
    first, second, both = [], [], []
    for one, other in simulated_tallies():
        first.append(one.error.low <= truth[0] <= one.error.high)
        second.append(other.error.low <= truth[1] <= other.error.high)
        gap = other.above(one)
        both.append(gap.low <= truth[1] - truth[0] <= gap.high)
    for held in (first, second, both):
        assert 0.93 <= np.mean(held) <= 0.97


def test_methods_that_are_equally_good_are_told_apart_in_5_of_100_comparisons() -> None:
    random = np.random.default_rng(21)
    apart = []
    for _ in range(SIMULATED):
        chances = chance_of_wrong(random.standard_normal(IMAGES))[0]
        one, other = (
            ImageTally((random.random(chances.shape) < chances).sum(0), len(CORRUPTIONS))
            for _ in range(2)
        )
        apart.append(standings([one, other])[0].rank != standings([one, other])[1].rank)
    assert 0.02 <= np.mean(apart) <= 0.07


@pytest.mark.parametrize("images", [100, 2000])
def test_an_interval_is_that_of_a_paired_bootstrap(images: int) -> None:
    random = np.random.default_rng(images)
    chances = chance_of_wrong(random.standard_normal(images))
    one, other = (random.random(chances.shape) < chances).sum(1)  # of each method
    tallies = [ImageTally(own, len(CORRUPTIONS)) for own in (one, other)]
    gap = tallies[1].above(tallies[0])
    means = []
    for _ in range(4000):
        drawn = random.integers(0, images, images)  # the same images for both methods
        means.append(100 * (other[drawn].mean() - one[drawn].mean()) / len(CORRUPTIONS))
    low, high = np.quantile(means, [0.025, 0.975])
    assert gap.low == pytest.approx(low, abs=0.1 * gap.half_width)
    assert gap.high == pytest.approx(high, abs=0.1 * gap.half_width)
    # The same images: an interval that ignored this would be wider.
    assert gap.half_width < np.hypot(*(tally.error.half_width for tally in tallies))


@given(st.lists(st.integers(-6, 6), min_size=1, max_size=10))
def test_flipped_signs_are_those_of_enumeration(differences: list[int]) -> None:
    total = abs(sum(differences))
    flips = list(itertools.product((-1, 1), repeat=len(differences)))
    sums = [
        abs(sum(sign * each for sign, each in zip(signs, differences, strict=True)))
        for signs in flips
    ]
    expected = sum(each >= total for each in sums) / len(flips)
    assert sign_flip_p(np.array(differences)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("worse", "better"), [(9, 2), (300, 240), (5000, 4700), (400, 0)])
def test_with_one_prediction_an_image_it_is_mcnemars_test(worse: int, better: int) -> None:
    differences = np.repeat([1, -1, 0], [worse, better, 1000])
    expected = stats.binomtest(worse, worse + better).pvalue
    assert sign_flip_p(differences) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_its_definition(p_values: list[float]) -> None:
    corrected = holm(p_values)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for place, (p, at) in enumerate(sorted((p, at) for at, p in enumerate(p_values))):
            if p * (len(p_values) - place) > level:
                break
            rejected.add(at)
        assert {at for at, p in enumerate(corrected) if p <= level} == rejected


def test_bits_are_counted_in_the_order_of_images_without_padding() -> None:
    correct = np.random.default_rng(0).random((3, 13)) < 0.6
    tally = ImageTally.of([np.packbits(own).tobytes() for own in correct], 13)
    assert tally.wrong.tolist() == (~correct).sum(0).tolist()
    assert tally.predictions == 3
    assert tally.error.mean == pytest.approx(100 * (~correct).mean())


def test_more_seeds_of_one_method_change_no_unit() -> None:
    once, thrice = ImageTally(np.array([1, 0, 1, 0]), 1), ImageTally(np.array([2, 1, 3, 0]), 3)
    gap = thrice.above(once)
    assert gap.mean == pytest.approx(thrice.error.mean - once.error.mean)
    assert thrice.above(once).p == once.above(thrice).p
    assert thrice.above(thrice).told_apart is False


def test_images_that_are_all_alike_say_how_little_is_known() -> None:
    for count in (1, 30, 1000):
        none = ImageTally(np.zeros(count, dtype=np.int64), 1)
        exact = stats.binomtest(0, count).proportion_ci(0.95, "exact")
        assert none.error.mean == 0
        assert none.error.high == pytest.approx(100 * exact.high)


def shifted(errors: list[int]) -> list[ImageTally]:
    """Methods that are wrong on the first images, one on more of them than the other."""
    return [ImageTally((np.arange(400) < each).astype(np.int64), 1) for each in errors]


def test_methods_that_are_not_told_apart_share_a_rank() -> None:
    tallies = shifted([100, 40, 42, 41, 103, 200])
    assert [each.rank for each in standings(tallies)] == [4, 1, 1, 1, 4, 6]
    gaps = differences(tallies, 1)
    assert [each.mean for each in gaps] == pytest.approx([15, 0, 0.5, 0.25, 15.75, 40])
    assert [each.told_apart for each in gaps] == [True, False, False, False, True, True]
    assert [each.rank for each in standings(tallies[:1])] == [1]
    assert standings([]) == []


def test_the_more_methods_are_compared_the_surer_each_difference_must_be() -> None:
    two, many = shifted([40, 46]), shifted([40, *[46] * 9])
    # Six images, all on one side.
    assert [each.p for each in differences(two, 0)] == pytest.approx([1, 2 / 2**6])
    assert [each.rank for each in standings(two)] == [1, 2]
    assert [each.p for each in differences(many, 0)] == pytest.approx([1, *[9 * 2 / 2**6] * 9])
    assert {each.rank for each in standings(many)} == {1}
