"""`corrupt`: what it accepts, what the bytes of an image depend on; small images."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from corruptions.test_reference import WITHOUT_CHANCE
from ttapca.corruptions import CORRUPTIONS, STANDARD, corrupt, corrupt_any_size, find
from ttapca.corruptions.apply import needs_photographs
from ttapca.corruptions.pixels import between, integers, normals, stream_key, uniforms
from ttapca.errors import DataNotFoundError, OptionError, PixelTypeError, ShapeError


@pytest.mark.parametrize("shape", [(32, 48), (67, 33)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_takes_other_sizes(name, shape, make_images, textures):
    images = make_images(2, *shape)
    spoilt = corrupt(images, name, 5, textures=textures)
    assert spoilt.shape == images.shape
    assert (spoilt[1] == corrupt(images[1:], name, 5, start=1, textures=textures)[0]).all()


@pytest.mark.parametrize("size", [(32, 32), (99, 131)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_order_slices_batches_and_strides_do_not_matter(
    name, size, make_images, textures, monkeypatch
):
    images = make_images(6, *size)
    spoil = partial(corrupt, corruption=name, severity=5, seed=3, textures=textures)
    whole = spoil(images)
    order = np.array([5, 2, 3, 4, 0, 2])
    assert (spoil(images[order], indices=order) == whole[order]).all()
    pieces = [spoil(images[a:b], start=a) for a, b in ((0, 1), (1, 3), (3, 6))]
    assert (np.concatenate(pieces) == whole).all()
    mirrored = images[:, :, ::-1]
    assert (spoil(mirrored) == spoil(np.ascontiguousarray(mirrored))).all()
    monkeypatch.setattr("ttapca.corruptions.apply._VALUES_PER_PIECE", 4 * images[0].size)
    assert (spoil(images) == whole).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_and_index_matter_where_there_is_chance_only(name, images, textures):
    one = corrupt(images, name, 5, seed=1, textures=textures)
    assert (one == corrupt(images, name, 5, seed=1, textures=textures)).all()
    other = corrupt(images, name, 5, seed=2, textures=textures)
    assert (one == other).all() == (name in WITHOUT_CHANCE)
    first, second = corrupt(np.repeat(images[:1], 2, axis=0), name, 5, textures=textures)
    assert (first == second).all() == (name in WITHOUT_CHANCE)


def test_names_and_empty_batches():
    assert find("JPEG compression").name == "jpeg_compression"
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "fog", 1).shape == (0, 32, 32, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"corruption": "fogg"}, OptionError, r"found `fogg`\. Did you mean `fog`"),
        *(
            ({"severity": bad}, OptionError, "`severity` must be a whole number from 1 to 5; found")
            for bad in (0, 6, 2.5, "3", True, None)
        ),
        *(
            ({"seed": bad}, OptionError, "`seed` must be a whole number from 0 on; found")
            for bad in (-1, 0.5, "0")
        ),
        ({"indices": [0]}, ShapeError, r"one index for each image, \(2,\); found \(1,\)"),
        ({"indices": [0, -1]}, OptionError, "`indices` must be whole numbers from 0 on"),
        ({"indices": np.array([0.0, 1.0])}, OptionError, "`indices` must be whole numbers"),
        ({"indices": [0, 1], "start": 1}, OptionError, "either `start` or `indices`"),
        (
            {"corruption": "frost", "table": "imagenet-c"},
            DataNotFoundError,
            "none was given.*`ttapca data get frost`",
        ),
        (
            {"corruption": "frost", "textures": "/nowhere"},
            DataNotFoundError,
            r"lacks frost1\.png.*`ttapca data get frost`",
        ),
    ],
)
def test_options_that_make_no_sense(images, options, error, message):
    with pytest.raises(error, match=message):
        corrupt(images[:2], **{"corruption": "fog", "severity": 1, **options})


def test_numpys_whole_numbers_are_as_good(images):
    assert (corrupt(images, "fog", np.int64(2), np.uint8(3)) == corrupt(images, "fog", 2, 3)).all()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (np.zeros((1, 32, 32, 3), np.float32), PixelTypeError, "of uint8.*found float32"),
        ([[1]], PixelTypeError, "a numpy array.*found list"),
        (np.zeros((32, 32, 3), np.uint8), ShapeError, r"found \(32, 32, 3\)\. Add an axis"),
        (np.zeros((2, 3, 32, 32), np.uint8), ShapeError, r"32, 32\)\. Move the channels"),
        (np.zeros((2, 32, 32, 1), np.uint8), ShapeError, r"found \(2, 32, 32, 1\)"),
        (np.zeros((2, 31, 32, 3), np.uint8), ShapeError, "32 by 32 pixels; found 31 by 32"),
    ],
)
def test_images_are_uint8_channels_last_and_large_enough(bad, error, message):
    with pytest.raises(error, match=message):
        corrupt(bad, "fog", 1)


KEY = stream_key(0, "fog", 1)
# Some with consecutive indices, which are drawn together.
INDICES = st.lists(st.integers(0, 12) | st.integers(0, 2**40), min_size=1, max_size=8)


@given(indices=INDICES, count=st.integers(1, 9))
def test_random_numbers_depend_on_the_index_only(indices, count):
    together = uniforms(KEY, np.array(indices), count)
    for row, index in zip(together, indices, strict=True):
        assert (uniforms(KEY, np.array([index]), count)[0] == row).all()


def test_random_numbers_are_uniform_and_do_not_repeat():
    numbers = uniforms(KEY, np.arange(500), 401)
    assert 0.0 < numbers.min() < numbers.max() < 1.0
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-4
    assert np.unique(numbers).size == numbers.size
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01
    for other in ((1, "fog", 1), (0, "snow", 1), (0, "fog", 2), (2**80, "fog", 1)):
        assert (stream_key(*other) != KEY).all()


def test_random_numbers_become_what_is_needed():
    ends = np.array([2.0**-54, 1.0 - 2.0**-53])
    for stop in (1, 2, 3, 5, 7, 63, 64):
        assert integers(ends, stop).tolist() == [0, stop - 1]
    values = normals(uniforms(KEY, np.arange(100), 500), 2.0, 3.0).ravel()
    assert stats.kstest(values, "norm", args=(2.0, 3.0)).pvalue > 1e-4
    assert np.isfinite(normals(ends, 0.0, 1.0)).all()
    assert between(np.array([0.0, 0.5, 1.0]), -2.0, 4.0).tolist() == [-2.0, 1.0, 4.0]


@pytest.mark.parametrize("corruption", STANDARD)
def test_a_small_image_keeps_its_randomness_in_any_batch(corruption: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), np.uint8)
    whole = corrupt_any_size(images, corruption, 5, seed=3)
    rows = np.array([4, 1, 4])
    some = corrupt_any_size(images[rows], corruption, 5, seed=3, indices=rows)
    assert np.array_equal(some, whole[rows])


def test_only_frost_on_large_images_takes_photographs() -> None:
    large, grey = np.zeros((1, 63, 32, 3), np.uint8), np.zeros((1, 63, 32, 1), np.uint8)
    assert needs_photographs(large, "frost")
    assert not needs_photographs(large[:, :62], "frost")  # those that ship are large enough
    assert not needs_photographs(grey, "frost")
    assert not needs_photographs(large, "fog")
