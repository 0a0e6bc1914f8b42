"""Orders of arrival, and the images that arrive."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.worlds import plain_streams, plain_stretches
from ttapca.benchmark import ImageSource, Setting
from ttapca.benchmark.rows import EPISODIC, INTERLEAVED, JOINT, SETTINGS
from ttapca.benchmark.streams import FORGETTING, dirichlet_stretches, segments
from ttapca.corruptions import STANDARD, corrupt
from ttapca.datasets import Images, read_digits
from ttapca.errors import DataFormatError, DataNotFoundError, NotEnoughDataError

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=30).map(np.array)


@given(st.sampled_from(SETTINGS), LABELS, st.integers(1, 4), st.integers(0, 5))
def test_every_image_arrives_once(
    setting: Setting, labels: np.ndarray, corruptions: int, seed: int
) -> None:
    parts = segments(setting, labels, corruptions, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(corruptions * len(labels)))
    expected = plain_streams(setting, labels.tolist(), corruptions, seed)
    found = [[divmod(number, len(labels)) for number in part.tolist()] for part in parts]
    assert found == expected
    assert len(parts) == (1 if setting in INTERLEAVED else corruptions)
    if setting in ("correlated", "episodic-sorted"):  # one class after another
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


def test_a_low_concentration_skews_the_batches() -> None:
    labels = np.arange(2000) % 10

    def classes_of_a_batch(order: np.ndarray) -> float:
        """The effective number of classes in batches of 200: 1 over the sum of squared shares."""
        shares = [np.bincount(labels[part]) / 200 for part in np.split(order, 10)]
        return float(np.mean([1 / (share**2).sum() for share in shares]))

    found = {}
    for concentration in (0.1, 1, 10):
        orders = [
            np.concatenate(dirichlet_stretches(labels, concentration, np.random.default_rng(seed)))
            for seed in range(20)
        ]
        found[concentration] = np.mean([classes_of_a_batch(order) for order in orders])
    assert 2 * found[0.1] < found[1]
    assert 3 * found[0.1] < found[10]
    by_class, shuffled = (
        np.mean([classes_of_a_batch(segments(name, labels, 1, seed)[0]) for seed in range(20)])
        for name in ("correlated", "online")
    )
    assert by_class < found[0.1] < found[1] < found[10] < shuffled


def test_seeds_give_other_orders() -> None:
    labels = np.arange(100) % 10
    for setting in SETTINGS:
        orders = [segments(setting, labels, 1, seed)[0] for seed in range(3)]
        assert len({*map(tuple, orders), tuple(range(100))}) == 4
        if setting in ("correlated", "episodic-sorted"):
            assert len({tuple(dict.fromkeys(labels[order])) for order in orders}) == 3
    assert {setting for setting in SETTINGS if FORGETTING[setting] == "continual"} == set(JOINT)
    assert {setting for setting in SETTINGS if FORGETTING[setting] == "episodic"} == set(EPISODIC)


def colour_images(count: int = 4) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 2, ("a", "b"))


def test_images_are_made_as_the_corruptions_make_them() -> None:
    clean = colour_images()
    source = ImageSource(clean, seed=7)
    found = source.images([("fog", 3), ("clean", 0)])
    assert np.array_equal(found.images[:4], corrupt(clean.images, "fog", 3, 7))
    assert np.array_equal(found.images[4:], clean.images)
    assert found.labels.tolist() == [*clean.labels, *clean.labels]
    assert source.images([("clean", 0)]).images is clean.images
    assert source.name == "generated, seed 7"
    first = source.images([("fog", 5)])  # made once for methods in a row
    assert source.images([("fog", 5)]) is first
    assert source.images([("fog", 4)]) is not first


def test_large_images_say_which_severities_they_have() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    source = ImageSource(Images(pixels, np.array([0, 1]), ("a", "b")))
    assert source.name == "generated with imagenet-c, seed 0"
    found = source.images([("contrast", 3)]).images
    assert np.array_equal(found, corrupt(pixels, "contrast", 3, table="imagenet-c"))


@pytest.mark.parametrize("corruption", STANDARD)
def test_small_grey_images(corruption: str) -> None:
    digits = read_digits()[:20]
    spoilt = ImageSource(digits).images([(corruption, 5)])
    assert spoilt.images.shape == digits.images.shape
    assert spoilt.labels.tolist() == digits.labels.tolist()
    difference = np.abs(spoilt.images.astype(int) - digits.images)
    assert 1 < difference.mean() < 150
    # An image's randomness is its own: fewer images, the same pixels.
    fewer = ImageSource(digits[:5]).images([(corruption, 5)])
    assert np.array_equal(fewer.images, spoilt.images[:5])


def test_a_small_image_is_blurred_as_a_large_one_is() -> None:
    # A step from black to white, the same in every row: blur sees the same neighbourhood.
    step, large = np.zeros((1, 8, 8, 1), np.uint8), np.zeros((1, 32, 32, 3), np.uint8)
    step[:, :, 4:] = large[:, :, 16:] = 255
    small = Images(step, np.zeros(1, np.int64), ("a",))
    spoilt = ImageSource(small).images([("defocus_blur", 1)]).images[0, :, :, 0]
    expected = corrupt(large, "defocus_blur", 1, 0)[0, 12:20, 12:20, 0]
    assert np.array_equal(spoilt[:, 2:6], expected[:, 2:6])


def test_images_of_a_folder(tmp_path: Path) -> None:
    clean, folder = colour_images(), tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "fog.npy", np.concatenate([clean.images // level for level in range(1, 6)]))
    np.save(folder / "labels.npy", np.tile(clean.labels, 5).astype(np.uint8))
    source = ImageSource(clean[:3], folder)
    assert source.name == "CIFAR-10-C"
    assert np.array_equal(source.images([("fog", 2)]).images, clean.images[:3] // 2)
    assert np.array_equal(source.images([("clean", 0)]).images, clean.images[:3])
    rows = np.array([1, 3])
    some = ImageSource(clean.subset(rows), folder, rows=rows).images([("fog", 2)])
    assert np.array_equal(some.images, clean.images[rows] // 2)
    source.check([("fog", 5), ("clean", 0)])
    with pytest.raises(DataNotFoundError, match="No corruption `snow`"):
        source.check([("snow", 5)])
    other = Images(clean.images, 1 - clean.labels, clean.class_names)
    with pytest.raises(DataFormatError, match="the labels of `fog` differ"):
        ImageSource(other, folder).images([("fog", 1)])
    with pytest.raises(NotEnoughDataError, match="must hold the 6 test images"):
        ImageSource(colour_images(6), folder).images([("fog", 1)])


def test_frost_is_asked_for_before_a_run(tmp_path: Path) -> None:
    small = colour_images()
    large = Images(np.tile(small.images, (1, 2, 2, 1)), small.labels, small.class_names)
    source = ImageSource(large, textures=tmp_path)
    source.check([("fog", 5), ("clean", 0)])
    with pytest.raises(DataNotFoundError, match="Frost needs 6 photographs"):
        source.check([("fog", 5), ("frost", 5)])
    ImageSource(read_digits()[:2]).check([("frost", 5)])  # drawn
    ImageSource(small, textures=tmp_path).check([("frost", 5)])  # ships
