"""Orders of arrival, and the images that arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.benchmark import ImageSource, Setting
from ttapca.benchmark.cells import JOINT, SETTINGS
from ttapca.benchmark.subject import FORGETTING, segments
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
    again = segments(setting, labels, corruptions, seed)
    assert all(np.array_equal(*pair) for pair in zip(parts, again, strict=True))
    assert len(parts) == (1 if setting == "mixed" else corruptions)
    if setting == "correlated":  # one class after another
        changes = np.count_nonzero(np.diff(labels[parts[0]]))
        assert 1 + changes == len(np.unique(labels))


def test_seeds_give_other_orders() -> None:
    labels = np.arange(100) % 10
    for setting in SETTINGS:
        orders = [segments(setting, labels, 1, seed)[0] for seed in range(3)]
        assert len({*map(tuple, orders), tuple(range(100))}) == 4
        if setting == "correlated":
            assert len({tuple(dict.fromkeys(labels[order])) for order in orders}) == 3
    assert {setting for setting in SETTINGS if FORGETTING[setting] == "continual"} == set(JOINT)


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
    source = ImageSource(colour_images(), textures=tmp_path)
    source.check([("fog", 5), ("clean", 0)])
    with pytest.raises(DataNotFoundError, match="Frost needs 6 photographs"):
        source.check([("fog", 5), ("frost", 5)])
    ImageSource(read_digits()[:2]).check([("frost", 5)])  # drawn
