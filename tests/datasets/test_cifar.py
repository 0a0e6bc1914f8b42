from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import Images, load, read_cifar_binary, read_cifar_python, write_cifar_binary
from ttapca.datasets.cifar import (
    BINARY_VERSIONS,
    CIFAR10_BINARY,
    CIFAR100_BINARY,
    CIFAR100_PYTHON,
    PYTHON_VERSIONS,
    BinaryVersion,
    PythonVersion,
)
from ttapca.datasets.cifar import CIFAR100_CLASSES
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def assert_same(found: Images, expected: Images) -> None:
    np.testing.assert_array_equal(found.images, expected.images)
    np.testing.assert_array_equal(found.labels, expected.labels)


def planes(images: Images) -> np.ndarray:
    return images.images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_python(folder: Path, version: PythonVersion, images: Images, protocol: int = 2) -> None:
    """The official files were pickled by Python 2; these are as close as Python 3 comes."""
    folder.mkdir(parents=True, exist_ok=True)
    for files in version.files.values():
        for part, name in enumerate(files):
            rows = images[part :: len(files)]
            batch = {"data": planes(rows).copy(), version.labels_key: rows.labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = {version.names_key: list(version.class_names)}
    (folder / version.names_file).write_bytes(pickle.dumps(names, protocol=protocol))


@pytest.mark.parametrize("version", BINARY_VERSIONS, ids=lambda version: version.folder)
def test_the_binary_version_comes_back(
    version: BinaryVersion, make_images: Any, tmp_path: Path
) -> None:
    splits = {"train": make_images(20), "test": make_images(7, seed=1)}
    write_cifar_binary(tmp_path, version, splits)
    for split, images in splits.items():
        found = read_cifar_binary(tmp_path, split)
        assert_same(found, images)
        assert found.class_names == version.class_names
        assert_same(load(tmp_path, split), images)


@given(count=st.integers(5, 23))
def test_any_number_of_images_comes_back(count: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("cifar")
    pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), np.uint8)
    images = Images(pixels, np.arange(count), CIFAR100_CLASSES)
    for version in BINARY_VERSIONS:
        (folder / version.folder).mkdir()
        small = Images(pixels, np.arange(count) % 10, version.class_names)
        expected = images if version is CIFAR100_BINARY else small
        write_cifar_binary(folder / version.folder, version, {"train": expected})
        assert_same(read_cifar_binary(folder / version.folder, "train"), expected)


def test_the_record_is_the_published_one(make_images: Any, tmp_path: Path) -> None:
    images = make_images(3)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": images})
    record = (tmp_path / "test_batch.bin").read_bytes()[3073 : 2 * 3073]
    assert record[0] == images.labels[1]
    assert record[1 + 33] == images.images[1, 1, 1, 0]  # second row, second pixel, red
    assert record[1 + 2048] == images.images[1, 0, 0, 2]  # first of the blue plane
    assert (tmp_path / "batches.meta.txt").stat().st_size == 61  # as the official one


def test_one_file_is_memory_mapped(make_images: Any, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CIFAR100_BINARY, {"test": make_images(5)})
    found = read_cifar_binary(tmp_path)
    assert isinstance(found.images, np.memmap)
    assert not found.images.flags.writeable


def test_class_names_come_from_their_file(make_images: Any, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    (tmp_path / "batches.meta.txt").write_text("\n".join("ABCDEFGHIJ"))
    assert read_cifar_binary(tmp_path).class_names == tuple("ABCDEFGHIJ")
    (tmp_path / "batches.meta.txt").unlink()
    assert read_cifar_binary(tmp_path).class_names == CIFAR10_BINARY.class_names


@pytest.mark.parametrize("cut", [1, 3072, 3073 * 2])
def test_a_truncated_file_is_refused(cut: int, make_images: Any, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    path = tmp_path / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataFormatError, match="whole number of records of 3073 bytes"):
        read_cifar_binary(tmp_path)


def test_a_label_without_a_class_is_refused(make_images: Any, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    path = tmp_path / "test_batch.bin"
    path.write_bytes(b"\x63" + path.read_bytes()[1:])
    with pytest.raises(DataFormatError, match=r"Labels must lie in 0 to 9.*found 1 to 99"):
        read_cifar_binary(tmp_path)


def test_missing_files_are_named(make_images: Any, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch.bin`, `test.bin`"):
        read_cifar_binary(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch`, `test`"):
        read_cifar_python(tmp_path)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"train": make_images(10)})
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"missing in .*: data_batch_3.bin"):
        read_cifar_binary(tmp_path, "train")


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    for read in (read_cifar_binary, read_cifar_python, load):
        with pytest.raises(OptionError, match=r"`train` or `test`; found `tset`. Did you mean `te"):
            read(tmp_path, "tset")  # type: ignore[arg-type]


def test_other_sizes_cannot_be_written(make_images: Any, tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"32x32x3; found Images\(2 of 8x8x3"):
        write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2, (8, 8, 3))})


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("version", PYTHON_VERSIONS, ids=lambda version: version.folder)
def test_the_python_version_comes_back(
    version: PythonVersion, protocol: int, make_images: Any, tmp_path: Path
) -> None:
    images = make_images(10)
    folder = tmp_path / version.folder
    write_python(folder, version, images, protocol)
    assert_same(read_cifar_python(folder), images)
    assert read_cifar_python(folder).class_names == version.class_names
    assert len(read_cifar_python(folder, "train")) == 10
    assert_same(load(folder), images)
    assert_same(load(tmp_path), images)  # torchvision's root


def python2_string(text: bytes) -> bytes:
    return b"T" + len(text).to_bytes(4, "little") + text


def python2_batch(images: Images) -> bytes:
    """A pickle with the opcodes and module names that Python 2 wrote, byte by byte."""
    shape = b"(M" + len(images).to_bytes(2, "little") + b"M" + (3072).to_bytes(2, "little") + b"t"
    dtype = (
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01" + shape + dtype + b"\x89" + python2_string(planes(images).tobytes()) + b"tb"
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in images.labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."


def test_a_pickle_of_python_2_is_read(make_images: Any, tmp_path: Path) -> None:
    images = make_images(4)
    (tmp_path / "test_batch").write_bytes(python2_batch(images))
    assert_same(read_cifar_python(tmp_path), images)


def test_keys_in_bytes_are_read(make_images: Any, tmp_path: Path) -> None:
    images = make_images(2)
    batch = {b"data": planes(images).copy(), b"fine_labels": images.labels.tolist()}
    (tmp_path / "test").write_bytes(pickle.dumps(batch))
    meta = {b"fine_label_names": [name.encode() for name in CIFAR100_CLASSES]}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta))
    found = read_cifar_python(tmp_path)
    assert_same(found, images)
    assert found.class_names == CIFAR100_PYTHON.class_names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "must hold a dict; found list"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "entries `data` and `labels`; found `data`"),
        ({}, "entries `data` and `labels`; found none"),
        ({"data": [1], "labels": [1]}, "`data` must be a uint8 array"),
        ({"data": np.zeros((1, 3072)), "labels": [1]}, "`data` must be a uint8 array"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, r"found \(1, 3071\)"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [1, 2]}, "and 2 labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["x"]}, "labels must be integers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [77]}, "Labels must lie in 0 to 9"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": 7}, "must be a list; found int"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [2**70]}, "must be integers from 0 up"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [[1], [2]]}, "must be integers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, "integers from 0 up; found '-1'"),
        ({f"key {n}": n for n in range(1000)}, r"`key 0`.*`key 19`\.$"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(DataFormatError, match=message):
        read_cifar_python(tmp_path)


def test_a_names_file_without_names_is_refused(make_images: Any, tmp_path: Path) -> None:
    write_python(tmp_path, CIFAR100_PYTHON, make_images(2))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": []}))
    with pytest.raises(DataFormatError, match="must have a list `fine_label_names`"):
        read_cifar_python(tmp_path)
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": [[]]}))
    with pytest.raises(DataFormatError, match="must be a list of text"):
        read_cifar_python(tmp_path)


def test_labels_in_an_array_and_names_that_are_no_utf_8(make_images: Any, tmp_path: Path) -> None:
    images = make_images(2)
    batch = {"data": planes(images).copy(), "fine_labels": images.labels}
    (tmp_path / "test").write_bytes(pickle.dumps(batch))
    meta = {"fine_label_names": [b"caf\xe9"] * 100}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta))
    found = read_cifar_python(tmp_path)
    assert_same(found, images)
    assert found.class_names[0] == "caf\N{REPLACEMENT CHARACTER}"


def test_a_huge_file_of_names_is_refused(make_images: Any, tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    (tmp_path / "batches.meta.txt").write_bytes(b"x " * 600_000)
    with pytest.raises(DataFormatError, match=r"batches\.meta\.txt is larger than 1,000,000 bytes"):
        read_cifar_binary(tmp_path)
