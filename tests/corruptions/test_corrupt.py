"""`corrupt`: what it accepts, and what an image's bytes depend on."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD, corrupt, find
from ttapca.errors import DataNotFoundError, OptionError, PixelTypeError, ShapeError

WITHOUT_CHANCE = {
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "saturate"),
    *("pixelate", "jpeg_compression"),
}


def test_the_nineteen_are_the_papers_fifteen_and_four_more():
    assert len(STANDARD) == 15
    assert len(EXTRA) == 4
    assert STANDARD + EXTRA == CORRUPTIONS
    assert STANDARD[:4] == ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur")
    assert STANDARD[-1] == "jpeg_compression"


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_changes_images_and_keeps_their_form(name, severity, images, textures):
    before = images.copy()
    spoilt = corrupt(images, name, severity, textures=textures)
    assert spoilt.shape == images.shape
    assert spoilt.dtype == np.uint8
    assert (spoilt != images).any()
    assert (images == before).all()


@pytest.mark.parametrize("shape", [(32, 48), (67, 33)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_takes_other_sizes(name, shape, make_images, textures):
    images = make_images(2, *shape)
    spoilt = corrupt(images, name, 5, textures=textures)
    assert spoilt.shape == images.shape
    assert (spoilt[1] == corrupt(images[1:], name, 5, start=1, textures=textures)[0]).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_order_slices_batches_and_strides_do_not_matter(name, images, textures, monkeypatch):
    spoil = partial(corrupt, corruption=name, severity=5, seed=3, textures=textures)
    whole = spoil(images)
    order = np.array([7, 3, 4, 5, 0, 11, 3])
    assert (spoil(images[order], indices=order) == whole[order]).all()
    pieces = [spoil(images[a:b], start=a) for a, b in ((0, 1), (1, 6), (6, 12))]
    assert (np.concatenate(pieces) == whole).all()
    mirrored = images[:, :, ::-1]
    assert (spoil(mirrored) == spoil(np.ascontiguousarray(mirrored))).all()
    monkeypatch.setattr("ttapca.corruptions.apply._VALUES_A_PIECE", 5 * 32 * 32 * 3)
    assert (spoil(images) == whole).all()


def _noisy(start: int) -> np.ndarray:
    images = np.full((4, 32, 32, 3), 90, dtype=np.uint8)
    return np.concatenate(
        [corrupt(images, name, 5, start=start) for name in ("snow", "shot_noise")]
    )


def test_another_process_gives_the_same_bytes():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(_noisy, 9).result()
    assert (there == _noisy(9)).all()


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 11), max_size=6),
    seed=st.integers(0, 2**63 - 1),
    name=st.sampled_from(["impulse_noise", "fog", "glass_blur", "elastic_transform", "spatter"]),
)
def test_any_cutting_gives_the_same_bytes(images, cuts, seed, name):
    edges = [0, *sorted(cuts), 12]
    pieces = [corrupt(images[a:b], name, 3, seed, start=a) for a, b in pairwise(edges)]
    assert (np.concatenate(pieces) == corrupt(images, name, 3, seed)).all()


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
        ({"corruption": "frost"}, DataNotFoundError, "no folder.*`ttapca data get frost`"),
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
        (np.zeros((1, 32, 32, 3), np.float32), PixelTypeError, "of uint8.*found dtype float32"),
        ([[1]], PixelTypeError, "a numpy array.*found a builtins.list"),
        (np.zeros((32, 32, 3), np.uint8), ShapeError, r"found \(32, 32, 3\)\. Add an axis"),
        (np.zeros((2, 3, 32, 32), np.uint8), ShapeError, r"32, 32\)\. Move the channels"),
        (np.zeros((2, 32, 32, 1), np.uint8), ShapeError, r"found \(2, 32, 32, 1\)"),
        (np.zeros((2, 31, 32, 3), np.uint8), ShapeError, "32 by 32 pixels; found 31 by 32"),
    ],
)
def test_images_are_uint8_channels_last_and_large_enough(bad, error, message):
    with pytest.raises(error, match=message):
        corrupt(bad, "fog", 1)
