"""An `.npz`, a folder of pictures, and the digits of scikit-learn."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ttapca.datasets import load, own_images, read_digits, read_image_folder, read_npz
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError


def test_an_npz_comes_back(make_images, tmp_path):
    images = make_images(6, (5, 7, 3))
    path = tmp_path / "mine.npz"
    np.savez(path, images=images.images, labels=images.labels)
    assert read_npz(path).fingerprint() == images.fingerprint()
    assert load(path).class_names == ("0", "1", "2", "3", "4", "5")
    names = np.array(list("abcdef"))
    labels = images.labels.astype(np.uint8)
    np.savez_compressed(path, clean=images.images, y=labels, class_names=names)
    found = read_npz(path, images="clean", labels="y")
    assert found.fingerprint() == images.fingerprint()
    assert found.class_names == tuple("abcdef")


def test_what_is_no_npz_of_images(make_images, tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(DataNotFoundError, match=r"mine.npz does not exist"):
        read_npz(path)
    np.savez(path, image=np.zeros(1))
    with pytest.raises(DataFormatError, match=r"no array `images`. Did you mean `image`"):
        read_npz(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataFormatError, match=r"single array, not an `.npz` archive"):
        read_npz(path)
    images = make_images(5)
    np.savez(path, images=images.images, labels=images.labels)
    whole = path.read_bytes()
    np.savez(path, images=np.array([{}], dtype=object), labels=np.zeros(1, int))
    for content in (b"", b"x", b"PK\x03\x04abc", whole[:5000], path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=r"not a plain `.npz`"):
            read_npz(path)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_a_folder_of_pictures_comes_back(make_images, tmp_path):
    images = make_images(6, (5, 7, 3))
    for row in range(6):
        save(tmp_path / ("dog" if row % 2 else "cat") / f"{row}.PNG", images.images[row])
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / "empty").mkdir()
    found = read_image_folder(tmp_path)
    assert found.class_names == ("cat", "dog")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(found.images, images.images[[0, 2, 4, 1, 3, 5]])
    assert load(tmp_path).fingerprint() == found.fingerprint()


def test_a_folder_above_the_splits(make_images, tmp_path):
    images = make_images(2, (4, 4, 3))
    save(tmp_path / "train" / "cat" / "a.png", images.images[0])
    with pytest.raises(DataNotFoundError, match=r"test split must lie in .* in `train` only"):
        load(tmp_path)
    save(tmp_path / "test" / "cat" / "a.png", images.images[1])
    np.testing.assert_array_equal(load(tmp_path, "train").images, images.images[:1])
    np.testing.assert_array_equal(load(tmp_path, "test").images, images.images[1:])


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
        (png(4, 4), "not a readable picture"),
        (png(4, 4, (b"IDAT", zlib.compress(bytes(5)))), "not a readable picture"),
        (png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))), "not a readable picture"),
        (b"GIF89a", "not a readable picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n", "cannot identify"),
    ],
    ids=["text", "large", "huge", "no-pixels", "few-pixels", "text-bomb", "cut-short", "program"],
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

    monkeypatch.setattr(own_images.np, "empty", full)
    with pytest.raises(DataFormatError, match=f"{tmp_path} needs more memory than there is"):
        read_image_folder(tmp_path)


def test_digits_have_a_fixed_split_of_all_classes():
    train, test = load("digits", "train"), load("digits")
    assert (len(train), len(test)) == (1201, 596)
    assert test.fingerprint() == read_digits("test").fingerprint()
    assert set(np.bincount(test.labels)) <= set(range(57, 62))  # a third of each class
    assert train.class_names == tuple("0123456789")
    both = np.concatenate([train.images, test.images])
    assert (both.max(), len(np.unique(both))) == (255, 17)
    ink = np.sort(np.rint(both / 255 * 16).sum(axis=(1, 2, 3)))
    np.testing.assert_array_equal(ink, np.sort(load_digits().images.sum(axis=(1, 2))))
