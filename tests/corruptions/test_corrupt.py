"""`corrupt`: what it accepts, and what an image's bytes depend on."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD, corrupt, find
from ttapca.errors import DataNotFoundError, OptionError, PixelTypeError, ShapeError

WITHOUT_CHANCE = {
    "defocus_blur",
    "zoom_blur",
    "gaussian_blur",
    "brightness",
    "contrast",
    "saturate",
    "pixelate",
    "jpeg_compression",
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


@pytest.mark.parametrize("shape", [(32, 48), (67, 33), (96, 96)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_takes_other_sizes(name, shape, make_images, textures):
    images = make_images(2, *shape)
    spoilt = corrupt(images, name, 5, textures=textures)
    assert spoilt.shape == images.shape
    assert (spoilt[1] == corrupt(images[1:], name, 5, start=1, textures=textures)[0]).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_order_slices_and_batches_do_not_matter(name, images, textures):
    whole = corrupt(images, name, 5, seed=3, textures=textures)
    order = np.array([7, 3, 4, 5, 0, 11, 3])
    shuffled = corrupt(images[order], name, 5, seed=3, indices=order, textures=textures)
    assert (shuffled == whole[order]).all()
    pieces = [
        corrupt(images[first:last], name, 5, seed=3, start=first, textures=textures)
        for first, last in ((0, 1), (1, 6), (6, 12))
    ]
    assert (np.concatenate(pieces) == whole).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_size_of_the_pieces_does_not_matter(name, images, textures, monkeypatch):
    whole = corrupt(images, name, 4, textures=textures)
    monkeypatch.setattr("ttapca.corruptions.apply._VALUES_A_PIECE", 5 * 32 * 32 * 3)
    assert (corrupt(images, name, 4, textures=textures) == whole).all()


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
def test_the_seed_matters_where_there_is_chance_only(name, images, textures):
    one = corrupt(images, name, 5, seed=1, textures=textures)
    assert (one == corrupt(images, name, 5, seed=1, textures=textures)).all()
    other = corrupt(images, name, 5, seed=2, textures=textures)
    assert (one == other).all() == (name in WITHOUT_CHANCE)


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - WITHOUT_CHANCE))
def test_equal_images_are_spoilt_differently(name, images, textures):
    twins = np.repeat(images[:1], 2, axis=0)
    first, second = corrupt(twins, name, 5, textures=textures)
    assert (first != second).any()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_view_with_odd_strides_is_read_right(name, images, textures):
    mirrored = images[:, :, ::-1]
    copied = np.ascontiguousarray(mirrored)
    spoilt = corrupt(mirrored, name, 3, textures=textures)
    assert (spoilt == corrupt(copied, name, 3, textures=textures)).all()


def test_no_images_give_no_images():
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "fog", 1).shape == (0, 32, 32, 3)


def test_names_may_be_written_with_spaces():
    assert find("JPEG compression").name == "jpeg_compression"


@pytest.mark.parametrize("name", ["fogg", "gausian_noise"])
def test_an_unknown_corruption_gets_near_names(name, images):
    with pytest.raises(OptionError, match=r"found `.*`\. Did you mean `(fog|gaussian_noise)`"):
        corrupt(images, name, 1)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, "3", True, None])
def test_a_severity_is_a_whole_number_from_1_to_5(severity, images):
    with pytest.raises(OptionError, match="`severity` must be a whole number from 1 to 5; found"):
        corrupt(images, "fog", severity)


@pytest.mark.parametrize("seed", [-1, 0.5, "0"])
def test_a_seed_is_a_whole_number_from_0(seed, images):
    with pytest.raises(OptionError, match="`seed` must be a whole number from 0 on; found"):
        corrupt(images, "fog", 1, seed=seed)


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (np.zeros((1, 32, 32, 3), np.float32), "dtype float32"),
        (np.zeros((1, 32, 32, 3), np.int64), "dtype int64"),
        ([[1]], "a builtins.list"),
    ],
)
def test_images_are_uint8(bad, found):
    with pytest.raises(PixelTypeError, match=f"must be a numpy array of uint8.*found {found}"):
        corrupt(bad, "fog", 1)


def test_a_tensor_is_not_an_array():
    import torch  # here and not above: a test of this file starts a process that reads the file

    with pytest.raises(PixelTypeError, match=r"must be a numpy array.*found a torch\.Tensor"):
        corrupt(torch.zeros((1, 32, 32, 3), dtype=torch.uint8), "fog", 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 32, 3), r"\(n, height, width, 3\); found \(32, 32, 3\)\. Add an axis"),
        ((2, 3, 32, 32), r"found \(2, 3, 32, 32\)\. Move the channels"),
        ((2, 32, 32, 1), r"found \(2, 32, 32, 1\)"),
        ((2, 31, 32, 3), "at least 32 by 32 pixels; found 31 by 32"),
    ],
)
def test_images_are_channels_last_and_large_enough(shape, message):
    with pytest.raises(ShapeError, match=message):
        corrupt(np.zeros(shape, np.uint8), "fog", 1)


def test_indices_are_one_an_image_and_not_negative(images):
    with pytest.raises(ShapeError, match=r"one index for each image, \(12,\); found \(2,\)"):
        corrupt(images, "fog", 1, indices=[0, 1])
    with pytest.raises(OptionError, match="`indices` must be whole numbers from 0 on"):
        corrupt(images[:2], "fog", 1, indices=[0, -1])
    with pytest.raises(OptionError, match="`indices` must be whole numbers from 0 on"):
        corrupt(images[:2], "fog", 1, indices=np.array([0.0, 1.0]))
    with pytest.raises(OptionError, match="either `start` or `indices`"):
        corrupt(images[:2], "fog", 1, start=1, indices=[0, 1])


def test_frost_without_photographs_says_how_to_get_them(images, tmp_path):
    with pytest.raises(DataNotFoundError, match=r"no folder.*`ttapca data get frost`"):
        corrupt(images, "frost", 1)
    with pytest.raises(DataNotFoundError, match=r"lacks frost1\.png.*`ttapca data get frost`"):
        corrupt(images, "frost", 1, textures=tmp_path)
