"""The value that every reader returns, its tensors, and a choice among its images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import Images, TensorBatches, choose, to_tensor
from ttapca.datasets.images import lies_by_class
from ttapca.errors import DataFormatError, OptionError, ShapeError
from ttapca.networks import evaluate

BY_CLASS = np.repeat(np.arange(10), 50)
MIXED = np.random.default_rng(3).permutation(BY_CLASS)


def some(count):
    pixels = np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 2, 3)
    return Images(pixels, np.arange(count) % 3, ("a", "b", "c"))


@given(count=st.integers(0, 30), size=st.integers(1, 12), rows=st.slices(30))
def test_slices_and_batches_are_views(count, size, rows):
    images = some(count)
    part = images[rows]
    np.testing.assert_array_equal(part.images, images.images[rows])
    np.testing.assert_array_equal(part.labels, images.labels[rows])
    assert part.class_names == images.class_names
    batches = list(images.batches(size))
    assert sum(map(len, batches)) == count
    assert all(np.shares_memory(batch.images, images.images) for batch in batches)
    assert all(np.shares_memory(batch.labels, images.labels) for batch in batches)
    if batches:
        joined = np.concatenate([batch.images for batch in batches])
        np.testing.assert_array_equal(joined, images.images)


@given(st.lists(st.integers(0, 9)))
def test_a_subset_is_a_copy_in_the_order_asked_for(indices):
    images = some(10)
    chosen = images.subset(indices)
    assert chosen.labels.tolist() == [int(images.labels[index]) for index in indices]
    assert not np.shares_memory(chosen.images, images.images)
    if indices:
        assert chosen.channel_means() == chosen[::-1].channel_means()
        assert chosen.channel_means() == pytest.approx((chosen.images / 255).mean(axis=(0, 1, 2)))
    assert set(images.subset(images.labels == 2).labels.tolist()) == {2}


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda images: images.subset([10]), "among 10: index 10"),
        (lambda images: images.subset([True]), "among 10: boolean"),
        (lambda images: images.subset([0.5]), "a row of numbers or a mask"),
        (lambda images: images[3], r"slices such as images\[100:200\]; found int"),
        (lambda images: images.batches(0), "`size` must be a whole number from 1 on; found 0"),
        (lambda images: TensorBatches(images, -1), "`size` must be a whole .* found -1"),
        (lambda images: choose(MIXED, order="sortd"), "one of auto, .*; found 'sortd'. Did you"),
        (lambda images: choose(MIXED, 0), "`limit` must be a whole number from 1 on; found 0"),
        (lambda images: choose(MIXED, seed=-1), "`seed` must be a whole number from 0 on; found"),
    ],
)
def test_options_that_make_no_sense_are_refused(use, message):
    with pytest.raises(OptionError, match=message):
        use(some(10))


PIXELS = np.zeros((2, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("pixels", "labels", "error", "message"),
    [
        (PIXELS[0], np.zeros(4, np.int64), ShapeError, "height, width"),
        (PIXELS / 255, np.zeros(2, np.int64), DataFormatError, "uint8.*float64"),
        (PIXELS, np.zeros(3, np.int64), ShapeError, "one label for each sample"),
        (PIXELS, np.zeros(2, np.int32), DataFormatError, "int64"),
        (PIXELS, np.array([0, 2]), DataFormatError, "0 to 1.*0 to 2"),
        (PIXELS, np.array([-1, 0]), DataFormatError, "found -1 to 0"),
    ],
)
def test_the_rules_of_images_are_checked(pixels, labels, error, message):
    with pytest.raises(error, match=message):
        Images(pixels, labels, ("a", "b"))


@given(row=st.integers(0, 6), value=st.integers(0, 255))
def test_the_fingerprint_sees_every_pixel_and_label_but_not_the_strides(row, value):
    images = some(7)
    planar = np.ascontiguousarray(images.images.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    assert Images(planar, images.labels, ("a", "b", "c")).fingerprint() == images.fingerprint()
    pixels, labels = images.images.copy(), images.labels.copy()
    pixels[row, 1, 1, 2] = value
    same = value == images.images[row, 1, 1, 2]
    found = Images(pixels, images.labels, images.class_names).fingerprint()
    assert (found == images.fingerprint()) == same
    labels[row] = (labels[row] + 1) % 3
    assert Images(images.images, labels, ("a", "b", "c")).fingerprint() != images.fingerprint()


def test_a_tensor_is_a_scaled_copy_of_the_pixels():
    images = some(4)
    images.images.flags.writeable = False  # as a memory map is
    tensor = to_tensor(images.images)
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    expected = torch.tensor(images.images.tolist()).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    tensor.zero_()
    assert images.images.any()
    with pytest.raises(ShapeError, match=r"Give one image as image\[None\]"):
        to_tensor(images.images[0])


def test_tensor_batches_can_be_iterated_twice_and_in_any_order():
    loader = TensorBatches(some(5), 2)
    assert len(loader) == 3
    for _ in range(2):
        batches = list(loader)
        assert [tuple(pixels.shape) for pixels, _ in batches] == [(2, 3, 2, 2)] * 2 + [(1, 3, 2, 2)]
        assert torch.cat([labels for _, labels in batches]).tolist() == [0, 1, 2, 0, 1]
    chosen = TensorBatches(some(5), 2, np.array([4, 2, 0]))
    assert len(chosen) == 2
    assert [labels.tolist() for _, labels in chosen] == [[1, 2], [0]]


@given(
    counts=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    limit=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_a_limit_takes_as_many_of_each_class_as_there_are(counts, limit, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    choice = choose(labels, limit, order="shuffled", seed=seed)
    assert len(set(choice.rows.tolist())) == len(choice.rows) == min(limit, len(labels))
    taken = np.bincount(labels[choice.rows], minlength=len(counts))
    # No class has two more than one that has images left.
    left = [number for number, count in enumerate(counts) if taken[number] < count]
    assert all(taken.max() <= taken[number] + 1 for number in left)


ONE_CLASS = np.zeros(100, np.int64)


@pytest.mark.parametrize(
    ("labels", "limit", "words"),
    [
        (BY_CLASS, 75, "75 of 500 samples, 7 to 8 of each class, shuffled with seed 0"),
        (BY_CLASS, None, "all 500 samples, shuffled with seed 0"),
        (MIXED, 70, "the first 70 of 500 samples, in stored order"),
        (ONE_CLASS, 10, "10 of 100 samples, drawn at random, shuffled with seed 0"),
    ],
)
def test_a_choice_is_told_in_words(labels, limit, words):
    assert str(choose(labels, limit)) == words


def test_only_images_that_lie_class_by_class_are_drawn_and_shuffled():
    """Numbers that were measured on the first images of CIFAR can be found again."""
    choice, other = choose(BY_CLASS, 70), choose(BY_CLASS, 70, seed=1)
    assert np.bincount(BY_CLASS[choice.rows]).tolist() == [7] * 10
    assert not lies_by_class(BY_CLASS[choice.rows])
    assert not lies_by_class(BY_CLASS[choose(BY_CLASS).rows])
    assert choose(BY_CLASS, 70).rows.tolist() == choice.rows.tolist()
    assert sorted(other.rows.tolist()) != sorted(choice.rows.tolist())
    assert choose(ONE_CLASS, 10).rows.max() >= 10
    assert choose(MIXED, 70).rows.tolist() == list(range(70))
    assert not lies_by_class(np.arange(1000))  # one image in each class
    assert len(choose(np.zeros(0, np.int64), 3).rows) == 0
    assert choose(np.zeros(1, np.int64)).rows.tolist() == [0]


def test_every_order_takes_the_same_images():
    drawn = sorted(choose(BY_CLASS, 70).rows.tolist())
    by_class = choose(BY_CLASS, 70, order="sorted")
    assert BY_CLASS[by_class.rows].tolist() == sorted(BY_CLASS[drawn].tolist())
    assert sorted(by_class.rows.tolist()) == drawn
    assert sorted(choose(MIXED, 70, order="sorted").rows.tolist()) == list(range(70))
    assert choose(BY_CLASS, 70, order="stored").rows.tolist() == drawn
    assert choose(BY_CLASS, order="stored").rows.tolist() == list(range(500))
    shuffled = choose(MIXED, 70, order="shuffled")
    assert np.bincount(MIXED[shuffled.rows]).tolist() == [7] * 10


def test_the_last_ones_can_be_chosen():
    choice = choose(MIXED, 70, order="stored", last=True)
    assert choice.rows.tolist() == list(range(430, 500))
    assert str(choice) == "the last 70 of 500 samples, in stored order"


def test_the_first_ones_are_a_view():
    images = Images(np.zeros((500, 2, 2, 1), np.uint8), MIXED, tuple("0123456789"))
    assert np.shares_memory(choose(MIXED, 70).of(images).images, images.images)
    drawn = choose(BY_CLASS, 70)
    assert (drawn.drawn, choose(MIXED, 70).drawn, choose(BY_CLASS).drawn) == (True, False, False)
    by_class = Images(images.images, BY_CLASS, images.class_names)
    assert drawn.of(by_class).labels.tolist() == BY_CLASS[drawn.rows].tolist()


def test_evaluation_mixes_classes():
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
