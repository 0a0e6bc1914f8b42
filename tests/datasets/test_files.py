from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ttapca.datasets import load
from ttapca.datasets import own_images as files, read_image_folder, read_npz
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError


def test_an_npz_comes_back(make_images: Any, tmp_path: Path) -> None:
    images = make_images(6, (5, 7, 3))
    path = tmp_path / "mine.npz"
    np.savez(path, images=images.images, labels=images.labels)
    found = read_npz(path)
    assert found.fingerprint() == images.fingerprint()
    assert found.class_names == ("0", "1", "2", "3", "4", "5")
    assert load(path).fingerprint() == images.fingerprint()


def test_an_npz_may_name_arrays_and_classes(make_images: Any, tmp_path: Path) -> None:
    images = make_images(3, (4, 4, 1))
    path = tmp_path / "mine.npz"
    labels = images.labels.astype(np.uint8)
    np.savez_compressed(path, clean=images.images, y=labels, class_names=np.array(["a", "b", "c"]))
    found = read_npz(path, images="clean", labels="y")
    assert found.fingerprint() == images.fingerprint()
    assert found.class_names == ("a", "b", "c")


def test_a_missing_array_gets_near_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", image=np.zeros(1))
    with pytest.raises(DataFormatError, match=r"no array `images`. Did you mean `image`"):
        read_npz(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "not a plain `.npz`"), (b"PK\x03\x04abc", "not a plain `.npz`"), (b"x", "not a plain")],
)
def test_a_damaged_npz_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        read_npz(tmp_path / "mine.npz")


def test_a_truncated_npz_is_refused(make_images: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    images = make_images(5)
    np.savez(path, images=images.images, labels=images.labels)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataFormatError, match=r"not a plain `.npz`"):
        read_npz(path)


def test_an_npz_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", images=np.array([{}], dtype=object), labels=np.zeros(1, int))
    with pytest.raises(DataFormatError, match=r"not a plain `.npz`"):
        read_npz(tmp_path / "mine.npz")


def test_an_npy_is_no_npz(tmp_path: Path) -> None:
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataFormatError, match=r"single array, not an `.npz` archive"):
        read_npz(tmp_path / "mine.npz")


def test_a_missing_npz_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"mine.npz does not exist"):
        read_npz(tmp_path / "mine.npz")


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_a_folder_of_pictures_comes_back(make_images: Any, tmp_path: Path) -> None:
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


def test_a_folder_above_the_splits(make_images: Any, tmp_path: Path) -> None:
    images = make_images(2, (4, 4, 3))
    save(tmp_path / "train" / "cat" / "a.png", images.images[0])
    save(tmp_path / "test" / "cat" / "a.png", images.images[1])
    np.testing.assert_array_equal(load(tmp_path, "train").images, images.images[:1])
    np.testing.assert_array_equal(load(tmp_path, "test").images, images.images[1:])


def test_pictures_become_rgb_of_one_size(tmp_path: Path) -> None:
    save(tmp_path / "a" / "grey.png", np.full((4, 4), 9, np.uint8))
    save(tmp_path / "a" / "wide.png", np.zeros((4, 8, 3), np.uint8))
    with pytest.raises(ShapeError, match=r"grey.png has \(4, 4\) and .*wide.png has \(4, 8\)"):
        read_image_folder(tmp_path)
    assert read_image_folder(tmp_path, size=6).images.shape == (2, 6, 6, 3)
    assert load(tmp_path, size=(6, 5)).images.shape == (2, 6, 5, 3)
    assert (read_image_folder(tmp_path, size=4).images[0] == 9).all()


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="one folder of pictures a class"):
        read_image_folder(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "fake.png").write_bytes(b"no picture")
    with pytest.raises(DataFormatError, match=r"fake.png is not a readable picture"):
        read_image_folder(tmp_path)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
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
        (png(8000, 8000), "8,000 x 8,000 pixels, more than 50,000,000"),
        (png(60_000, 60_000), "not a readable picture"),
        (png(4, 4), "not a readable picture"),
        (png(4, 4, (b"IDAT", zlib.compress(bytes(5)))), "not a readable picture"),
        (png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))), "not a readable picture"),
        (b"GIF89a", "not a readable picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n", "cannot identify"),
    ],
    ids=["large", "huge", "no pixels", "few pixels", "a bomb of text", "cut short", "a program"],
)
def test_a_hostile_picture_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.png").write_bytes(content)
    with pytest.raises(DataFormatError, match=rf"bad\.png.*{message}"):
        read_image_folder(tmp_path)


def test_more_pictures_than_memory_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a" / "one.png", np.zeros((4, 4, 3), np.uint8))

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(files.np, "empty", full)
    with pytest.raises(DataFormatError, match=f"{tmp_path} needs more memory than there is"):
        read_image_folder(tmp_path)
