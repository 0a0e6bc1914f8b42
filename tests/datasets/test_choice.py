"""Which images are used, and in which order: never one class at a time without a word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import Images, TensorBatches, choose
from ttapca.datasets.images import lies_by_class
from ttapca.errors import OptionError
from ttapca.networks import evaluate

BY_CLASS = np.repeat(np.arange(10), 50)
MIXED = np.random.default_rng(3).permutation(BY_CLASS)


@given(
    counts=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    limit=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_a_limit_takes_as_many_of_each_class_as_there_are(
    counts: list[int], limit: int, seed: int
) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    choice = choose(labels, limit, order="shuffled", seed=seed)
    assert len(set(choice.rows.tolist())) == len(choice.rows) == min(limit, len(labels))
    taken = np.bincount(labels[choice.rows], minlength=len(counts))
    # No class has two more than one that has images left.
    left = [number for number, count in enumerate(counts) if taken[number] < count]
    assert all(taken.max() <= taken[number] + 1 for number in left)


def test_images_that_lie_class_by_class_are_drawn_and_shuffled() -> None:
    choice = choose(BY_CLASS, 70)
    assert str(choice) == "70 of 500 images, 7 of each class, shuffled with seed 0"
    assert np.bincount(BY_CLASS[choice.rows]).tolist() == [7] * 10
    assert not lies_by_class(BY_CLASS[choice.rows])
    assert not lies_by_class(BY_CLASS[choose(BY_CLASS).rows])
    assert str(choose(BY_CLASS)) == "all 500 images, shuffled with seed 0"
    assert str(choose(BY_CLASS, 75)) == "75 of 500 images, 7 to 8 of each class, " + (
        "shuffled with seed 0"
    )


def test_a_seed_is_an_order() -> None:
    again, other = choose(BY_CLASS, 70), choose(BY_CLASS, 70, seed=1)
    assert choose(BY_CLASS, 70).rows.tolist() == again.rows.tolist()
    assert sorted(other.rows.tolist()) != sorted(again.rows.tolist())


def test_images_that_are_mixed_stay_as_they_lie() -> None:
    """Numbers that were measured on the first images of CIFAR can be found again."""
    assert choose(MIXED).rows.tolist() == list(range(500))
    choice = choose(MIXED, 70)
    assert choice.rows.tolist() == list(range(70))
    assert str(choice) == "the first 70 of 500 images, as they lie"
    assert not lies_by_class(np.arange(1000))  # one image a class


def test_every_order() -> None:
    by_class = choose(BY_CLASS, 70, order="sorted")
    assert BY_CLASS[by_class.rows].tolist() == sorted(BY_CLASS[by_class.rows].tolist())
    assert sorted(by_class.rows.tolist()) == sorted(choose(BY_CLASS, 70).rows.tolist())
    assert str(by_class).endswith("7 of each class, class by class")
    of_mixed = choose(MIXED, 70, order="sorted")
    assert sorted(of_mixed.rows.tolist()) == list(range(70))
    stored = choose(BY_CLASS, 70, order="stored")
    assert stored.rows.tolist() == sorted(choose(BY_CLASS, 70).rows.tolist())
    assert choose(BY_CLASS, order="stored").rows.tolist() == list(range(500))
    shuffled = choose(MIXED, 70, order="shuffled")
    assert np.bincount(MIXED[shuffled.rows]).tolist() == [7] * 10


def test_images_without_labels_worth_the_name_are_drawn_by_lot() -> None:
    choice = choose(np.zeros(100, np.int64), 10)
    assert choice.rows.max() >= 10
    assert str(choice) == "10 of 100 images, by lot, shuffled with seed 0"
    assert len(choose(np.zeros(0, np.int64), 3).rows) == 0
    assert choose(np.zeros(1, np.int64)).rows.tolist() == [0]


def test_the_first_ones_are_a_view() -> None:
    images = Images(np.zeros((500, 2, 2, 1), np.uint8), MIXED, tuple("0123456789"))
    assert np.shares_memory(choose(MIXED, 70).of(images).images, images.images)
    drawn = choose(BY_CLASS, 70)
    by_class = Images(images.images, BY_CLASS, images.class_names)
    assert drawn.of(by_class).labels.tolist() == BY_CLASS[drawn.rows].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sortd"}, "one of auto, shuffled, sorted, stored; found `sortd`. Did you mean"),
        ({"limit": 0}, "at least 1; found 0"),
        ({"seed": -1}, "at least 0; found -1"),
    ],
)
def test_what_makes_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        choose(MIXED, **options)  # type: ignore[arg-type]


def test_evaluation_mixes_classes() -> None:
    """A predictor that compares an image with its batch is lost when a batch has one class."""
    labels = np.repeat(np.arange(2), 100)
    pixels = np.broadcast_to(labels[:, None, None, None] * 100, (200, 2, 2, 1)).astype(np.uint8)
    images = Images(pixels, labels, ("dark", "bright"))

    def by_the_mean(batch):
        light = batch.mean((1, 2, 3))
        away = light - light.mean()
        return (away[:, None] * away.new_tensor([-1.0, 1.0])) + away.new_tensor([0.0, 1e-9])

    assert evaluate(by_the_mean, images, batch_size=20).error == 0
    assert evaluate(by_the_mean, images, batch_size=20, order="sorted").error == 50
    assert len(list(TensorBatches(images, 20, choose(labels, 40).rows))) == 2
