"""Pictures of any size: what is cut out of them, and classes by the names of files."""

import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from ttapca.datasets import load, pictures, read_image_folder
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def noise():
    random = np.random.default_rng(0)
    return lambda *shape: random.integers(0, 256, (*shape, 3), np.uint8)


def test_the_centre_is_cut_out_where_nothing_has_to_be_resized(tmp_path, noise):
    tall, wide = noise(12, 8), noise(8, 13)
    save(tmp_path / "a" / "tall.png", tall)
    save(tmp_path / "a" / "wide.png", wide)
    found = read_image_folder(tmp_path, size=6, shorter_side=8)
    np.testing.assert_array_equal(found.images[0], tall[3:9, 1:7])
    np.testing.assert_array_equal(found.images[1], wide[1:7, 3:9])
    same = load(tmp_path, size=8)
    np.testing.assert_array_equal(same.images[0], tall[2:10])
    np.testing.assert_array_equal(same.images[1], wide[:, 2:10])


@pytest.mark.parametrize(("shape", "resized"), [((10, 20), (16, 32)), ((15, 10), (24, 16))])
def test_proportions_are_kept(shape, resized, noise):
    picture = Image.fromarray(noise(*shape))
    whole = np.asarray(picture.resize(resized[::-1]))
    top, left = ((side - 12) // 2 for side in resized)
    found = np.asarray(PictureSize(12, shorter_side=16).of(picture))
    np.testing.assert_array_equal(found, whole[top : top + 12, left : left + 12])


def test_a_pair_is_taken_exactly(noise):
    picture = Image.fromarray(noise(10, 20))
    assert PictureSize((4, 5)).of(picture).size == (5, 4)
    assert PictureSize().of(picture) is picture


@pytest.mark.parametrize(
    ("size", "shorter_side", "message"),
    [
        (None, 256, "needs `size=`, one number that is not larger; found None"),
        (224, 200, "not larger; found 224 with a shorter side of 200"),
        ((8, 8), 9, r"one number that is not larger; found \(8, 8\)"),
        (0, None, "`size` must be a side of 1 to 16,384 pixels, or height and width; found 0"),
        ((1, 2, 3), None, "`size` must be a side of 1"),
        (8, 10**6, "`shorter_side` must be a whole number from 1 to 16,384"),
    ],
)
def test_impossible_sizes(size, shorter_side, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        load(tmp_path, size=size, shorter_side=shorter_side)


def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path):
    save(tmp_path / "a" / "hair.png", np.zeros((1, 40_000, 3), np.uint8))
    with pytest.raises(DataFormatError, match=r"hair.png.*8,960,000 x 224 pixels, as it is so"):
        load(tmp_path, size=224)


def test_classes_by_the_names_of_files(tmp_path, noise):
    names = ("0002_cat_b.png", "0000_dog.png", "0002-cat_a.png", "0004_hen.png")
    pixels = {name: noise(4, 4) for name in names}
    for name, each in pixels.items():
        save(tmp_path / name, each)
    found = load(tmp_path)
    assert found.labels.tolist() == [0, 2, 2, 4]
    assert found.class_names == ("0", "1", "2", "3", "4")
    np.testing.assert_array_equal(found.images, [pixels[name] for name in sorted(names)])


def test_names_of_classes_with_one_picture_each(tmp_path, noise):
    for split in ("train", "test"):
        for name in ("0000_n01440764_tench", "0001_n01443537_goldfish"):
            save(tmp_path / split / f"{name}.png", noise(4, 4))
    assert load(tmp_path).class_names == ("n01440764_tench", "n01443537_goldfish")
    np.testing.assert_array_equal(
        load(tmp_path, "train").images, read_image_folder(tmp_path / "train").images
    )
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(DataNotFoundError, match=r"test split must be in .* in `train` only"):
        load(tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_train_beside_a_bus_is_a_class(split, tmp_path, noise):
    for name in ("bus", "train"):
        save(tmp_path / name / "0001_a.png", noise(4, 4))
    assert load(tmp_path, split).class_names == ("bus", "train")


@pytest.mark.parametrize("name", ["holiday", "0001", "12345678901_a"])
def test_pictures_without_a_class(name, tmp_path, noise):
    save(tmp_path / f"{name}.png", noise(4, 4))
    with pytest.raises(DataFormatError, match=rf"or their names start .*; found .*{name}.png"):
        load(tmp_path)


def test_a_number_that_is_no_class(tmp_path, noise):
    save(tmp_path / "20241117_holiday.png", noise(4, 4))
    with pytest.raises(DataFormatError, match="class numbers from 0 up; found 20241117"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_grey_levels_above_255_are_refused(dtype, tmp_path):
    (tmp_path / "a").mkdir()
    levels = np.arange(64, dtype=dtype).reshape(8, 8) * 1000
    Image.fromarray(levels).save(tmp_path / "a" / "scan.tif")
    with pytest.raises(DataFormatError, match=r"scan.tif .* more than 8 bits .* convert it to 8"):
        load(tmp_path)


def test_a_folder_of_pictures_comes_back(make_images, tmp_path):
    images, folder = make_images(6, (5, 7, 3)), tmp_path / "train"
    for row in range(6):
        save(folder / ("dog" if row % 2 else "cat") / f"{row}.PNG", images.images[row])
    (folder / "cat" / "notes.txt").write_text("no picture")
    (folder / "empty").mkdir()
    found = read_image_folder(folder)
    assert found.class_names == ("cat", "dog")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(found.images, images.images[[0, 2, 4, 1, 3, 5]])
    assert load(folder).fingerprint() == found.fingerprint()
    with pytest.raises(DataNotFoundError, match=r"test split must be in .* in `train` only"):
        load(tmp_path)
    save(tmp_path / "test" / "cat" / "a.png", images.images[1])
    assert load(tmp_path, "train").fingerprint() == found.fingerprint()
    np.testing.assert_array_equal(load(tmp_path, "test").images, images.images[1:2])


def test_pictures_become_rgb_of_one_size(tmp_path):
    save(tmp_path / "a" / "grey.png", np.full((4, 4), 9, np.uint8))
    save(tmp_path / "a" / "wide.png", np.zeros((4, 8, 3), np.uint8))
    with pytest.raises(ShapeError, match=r"grey.png has \(4, 4\) and .*wide.png has \(4, 8\)"):
        read_image_folder(tmp_path)
    assert load(tmp_path, size=(6, 5)).images.shape == (2, 6, 5, 3)
    assert (read_image_folder(tmp_path, size=4).images[0] == 9).all()


def png(width, height, *chunks):
    """A PNG, chunk by chunk, that says what it likes about its size."""
    start = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", start), *chunks, (b"IEND", b"")):
        checksum = zlib.crc32(name + data)
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no picture", "not a readable picture"),
        (png(8000, 8000), "8,000 x 8,000 pixels, more than 50,000,000"),
        (png(60_000, 60_000), "not a readable picture"),
        (png(4, 4, (b"IDAT", zlib.compress(bytes(5)))), "not a readable picture"),
        (png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))), "not a readable picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n", "none of PNG, JPEG"),
    ],
    ids=["text", "large", "huge", "few-pixels", "text-bomb", "program"],
)
def test_a_hostile_picture_is_refused(content, message, tmp_path):
    with pytest.raises(DataNotFoundError, match="a folder of pictures for each class"):
        read_image_folder(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.png").write_bytes(content)
    with pytest.raises(DataFormatError, match=rf"bad\.png.*{message}"):
        read_image_folder(tmp_path)


def test_more_pictures_than_memory_are_refused_by_name(tmp_path, monkeypatch):
    save(tmp_path / "a" / "one.png", np.zeros((4, 4, 3), np.uint8))

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(pictures.np, "empty", full)
    with pytest.raises(DataFormatError, match=f"{tmp_path} needs more memory than there is"):
        read_image_folder(tmp_path)
