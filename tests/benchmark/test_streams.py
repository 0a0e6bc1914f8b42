"""Orders of arrival."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.worlds import plain_streams, plain_stretches
from ttapca.benchmark import Setting
from ttapca.benchmark.rows import EPISODIC, INTERLEAVED, JOINT, SETTINGS
from ttapca.benchmark.streams import FORGETTING, dirichlet_stretches, segments

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=30).map(np.array)


@given(st.sampled_from(SETTINGS), LABELS, st.integers(1, 4), st.integers(0, 5))
def test_every_image_arrives_once(
    setting: Setting, labels: np.ndarray, corruptions: int, seed: int
) -> None:
    corruptions *= 5 if setting == "gradual" else 1  # one for each severity
    parts = segments(setting, labels, corruptions, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(corruptions * len(labels)))
    expected = plain_streams(setting, labels.tolist(), corruptions, seed)
    found = [[divmod(number, len(labels)) for number in part.tolist()] for part in parts]
    assert found == expected
    assert len(parts) == (1 if setting in INTERLEAVED else corruptions)
    if setting in (
        "correlated",
        "episodic-sorted",
        "continual-correlated",
    ):  # one class after another
        changes = np.count_nonzero(np.diff(labels[parts[0]]))
        assert 1 + changes == len(np.unique(labels))


def test_corruptions_take_turns_of_500_images() -> None:
    labels = np.arange(1200) % 10
    (stream,) = segments("changing", labels, 3, seed=1)
    (online,) = segments("online", labels, 1, seed=1)
    lengths = [(int(number), len(list(run))) for number, run in groupby(stream // 1200)]
    first, last = [(number, 500) for number in range(3)], [(number, 200) for number in range(3)]
    assert lengths == [*first, *first, *last]
    for number in range(3):  # each corruption shows its images in the order of `online`
        assert np.array_equal(stream[stream // 1200 == number] % 1200, online)
    (few,) = segments("changing", labels[:500], 3, seed=1)
    assert np.array_equal(few, np.concatenate(segments("continual", labels[:500], 3, seed=1)))


def test_a_corruption_fades_into_the_next() -> None:
    (stream,) = segments("drifting", np.zeros(2000, np.int64), 4, seed=0)
    shown = stream // 2000
    for number in (1, 2):  # its share rises from 0 to 1 within one turn, and falls in the next
        shares = [np.mean(part == number) for part in np.array_split(shown, 16)]
        start = 4 * number - 2
        assert shares[start : start + 8] == pytest.approx(
            [1 / 8, 3 / 8, 5 / 8, 7 / 8, 7 / 8, 5 / 8, 3 / 8, 1 / 8], abs=0.07
        )
        assert sum(shares[:start]) == sum(shares[start + 8 :]) == 0


@pytest.mark.parametrize("classes", [1, 3, 120])
@pytest.mark.parametrize("concentration", [0.1, 1, 10])
def test_stretches_are_dealt_out_as_by_hand(classes: int, concentration: float) -> None:
    labels = np.random.default_rng(5).integers(0, classes, 700) * 2  # some classes are missing
    parts = dirichlet_stretches(labels, concentration, np.random.default_rng(7))
    expected = plain_stretches(labels.tolist(), concentration, np.random.default_rng(7))
    assert [part.tolist() for part in parts] == expected
    assert len(parts) == min(classes, 100)
    for part in parts:  # within a stretch, every class comes once, its images in their order
        runs = [list(run) for _, run in groupby(part, key=lambda place: labels[place])]
        assert len(runs) == len(np.unique(labels[part]))
        assert all(run == sorted(run) for run in runs)


@pytest.mark.parametrize("concentration", [0.1, 1, 10])
def test_shares_follow_the_dirichlet_distribution(concentration: float) -> None:
    classes, each, draws = 10, 500, 100
    labels = np.arange(classes * each) % classes
    shares = []  # of each class, by stretch
    for seed in range(draws):
        parts = dirichlet_stretches(labels, concentration, np.random.default_rng(seed))
        counts = [np.bincount(labels[part], minlength=classes) for part in parts]
        shares.append(np.array(counts).T / each)
    found = np.concatenate(shares)  # (draws x classes, stretches)
    assert np.allclose(found.sum(1), 1)
    # The textbook's moments: mean 1 / K; sum of squares (a + 1) / (K a + 1).
    deviation = np.sqrt((1 - 1 / classes) / classes / (classes * concentration + 1))
    assert np.allclose(found.mean(0), 1 / classes, atol=4 * deviation / np.sqrt(len(found)) + 2e-3)
    squares = (concentration + 1) / (classes * concentration + 1)
    assert (found**2).sum(1).mean() == pytest.approx(squares, rel=0.05)


def test_seeds_give_other_orders() -> None:
    labels = np.arange(100) % 10
    for setting in SETTINGS:
        orders = [segments(setting, labels, 1, seed)[0] for seed in range(3)]
        assert len({*map(tuple, orders), tuple(range(100))}) == 4
        if setting in ("correlated", "episodic-sorted"):
            assert len({tuple(dict.fromkeys(labels[order])) for order in orders}) == 3
    assert {setting for setting in SETTINGS if FORGETTING[setting] == "continual"} == set(JOINT)
    assert {setting for setting in SETTINGS if FORGETTING[setting] == "episodic"} == set(EPISODIC)
