from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import Images, TensorBatches, to_tensor
from ttapca.errors import DataFormatError, OptionError, ShapeError


def some(count: int) -> Images:
    pixels = np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 2, 3)
    return Images(pixels, np.arange(count) % 3, ("a", "b", "c"))


@given(count=st.integers(0, 30), size=st.integers(1, 12), drop_last=st.booleans())
def test_batches_are_views_that_make_up_the_whole(count: int, size: int, drop_last: bool) -> None:
    images = some(count)
    batches = list(images.batches(size, drop_last=drop_last))
    expected = count - count % size if drop_last else count
    assert sum(map(len, batches)) == expected
    assert all(np.shares_memory(batch.images, images.images) for batch in batches)
    assert all(np.shares_memory(batch.labels, images.labels) for batch in batches)
    if batches:
        joined = np.concatenate([batch.images for batch in batches])
        np.testing.assert_array_equal(joined, images.images[:expected])


@given(count=st.integers(0, 20), rows=st.slices(20))
def test_a_slice_is_a_view_of_pixels_and_labels(count: int, rows: slice) -> None:
    images = some(count)
    np.testing.assert_array_equal(images[rows].images, images.images[rows])
    np.testing.assert_array_equal(images[rows].labels, images.labels[rows])
    assert images[rows].class_names == images.class_names


@given(st.lists(st.integers(0, 9)))
def test_a_subset_is_a_copy_in_the_order_asked_for(indices: list[int]) -> None:
    images = some(10)
    chosen = images.subset(indices)
    assert chosen.labels.tolist() == [int(images.labels[index]) for index in indices]
    assert not np.shares_memory(chosen.images, images.images)


def test_a_subset_by_mask() -> None:
    images = some(6)
    assert images.subset(images.labels == 2).labels.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("indices", "message"),
    [([10], "No such image among 10"), ([True], "No such image"), ([0.5], "list of numbers")],
)
def test_a_subset_of_what_is_not_there(indices: list[int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        some(10).subset(indices)


@pytest.mark.parametrize("index", [3, "a", [1, 2]])
def test_only_slices_index(index: object) -> None:
    with pytest.raises(OptionError, match=r"slices such as images\[100:200\]"):
        some(5)[index]  # type: ignore[index]


def test_a_batch_needs_a_positive_size() -> None:
    with pytest.raises(OptionError, match="at least 1 image; found size=0"):
        some(5).batches(0)
    with pytest.raises(OptionError, match="at least 1 image; found size=-1"):
        TensorBatches(some(5), -1)


@pytest.mark.parametrize(
    ("pixels", "labels", "error", "message"),
    [
        (np.zeros((2, 4, 4), np.uint8), np.zeros(2, np.int64), ShapeError, "height, width"),
        (np.zeros((2, 4, 4, 3)), np.zeros(2, np.int64), DataFormatError, "uint8.*float64"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(3, np.int64), ShapeError, "one label an image"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.zeros(2, np.int32), DataFormatError, "int64"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 2]), DataFormatError, "0 to 1.*0 to 2"),
        (np.zeros((2, 4, 4, 3), np.uint8), np.array([-1, 0]), DataFormatError, "found -1 to 0"),
    ],
)
def test_the_rules_are_checked(
    pixels: np.ndarray, labels: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Images(pixels, labels, ("a", "b"))


def test_the_fingerprint_does_not_depend_on_the_strides() -> None:
    images = some(7)
    planar = np.ascontiguousarray(images.images.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    other = Images(planar, images.labels, images.class_names)
    assert planar.strides != images.images.strides
    assert other.fingerprint() == images.fingerprint()


@given(row=st.integers(0, 6), value=st.integers(0, 255))
def test_the_fingerprint_sees_every_pixel_and_label(row: int, value: int) -> None:
    images = some(7)
    pixels = images.images.copy()
    pixels[row, 1, 1, 2] = value
    changed = Images(pixels, images.labels, images.class_names)
    same = value == images.images[row, 1, 1, 2]
    assert (changed.fingerprint() == images.fingerprint()) == same
    labels = images.labels.copy()
    labels[row] = (labels[row] + 1) % 3
    assert Images(images.images, labels, ("a", "b", "c")).fingerprint() != images.fingerprint()


def test_channel_means_do_not_depend_on_the_order() -> None:
    images = some(9)
    shuffled = images.subset(np.random.default_rng(0).permutation(9))
    assert shuffled.channel_means() == images.channel_means()
    assert images.channel_means() == pytest.approx((images.images / 255).mean(axis=(0, 1, 2)))


def test_repr_is_short() -> None:
    assert repr(some(4)) == "Images(4 of 2x2x3, 3 classes)"


def test_a_tensor_is_a_scaled_copy_of_the_pixels() -> None:
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


def test_tensor_batches_can_be_gone_through_twice() -> None:
    loader = TensorBatches(some(5), 2)
    assert len(loader) == 3
    for _ in range(2):
        batches = list(loader)
        assert [tuple(pixels.shape) for pixels, _ in batches] == [(2, 3, 2, 2)] * 2 + [(1, 3, 2, 2)]
        assert torch.cat([labels for _, labels in batches]).tolist() == [0, 1, 2, 0, 1]
