"""CIFAR-10 and CIFAR-100 in their binary and python versions."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import Images, load, read_cifar_binary, read_cifar_python, write_cifar_binary
from ttapca.datasets.cifar import (
    BINARY_VERSIONS,
    CIFAR10_BINARY,
    CIFAR100_CLASSES,
    PYTHON_VERSIONS,
)
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def assert_same(found, expected):
    np.testing.assert_array_equal(found.images, expected.images)
    np.testing.assert_array_equal(found.labels, expected.labels)


def planes(images):
    return images.images.transpose(0, 3, 1, 2).reshape(len(images), -1).copy()


@given(count=st.integers(5, 23))
def test_the_binary_version_comes_back(count, tmp_path_factory):
    pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), np.uint8)
    for version in BINARY_VERSIONS:
        folder = tmp_path_factory.mktemp("cifar")
        labels = np.arange(count) % len(version.class_names)
        train = Images(pixels, labels, version.class_names)
        write_cifar_binary(folder, version, {"train": train, "test": train[:4]})
        assert_same(read_cifar_binary(folder, "train"), train)
        assert_same(load(folder), train[:4])
        assert load(folder).class_names == version.class_names
        assert isinstance(load(folder).images, np.memmap)
        assert not load(folder).images.flags.writeable


def test_the_record_is_the_published_one(make_images, tmp_path):
    images = make_images(3)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": images})
    record = (tmp_path / "test_batch.bin").read_bytes()[3073 : 2 * 3073]
    assert record[0] == images.labels[1]
    assert record[1 + 33] == images.images[1, 1, 1, 0]  # second row, second pixel, red
    assert record[1 + 2048] == images.images[1, 0, 0, 2]  # first of the blue plane
    assert (tmp_path / "batches.meta.txt").stat().st_size == 61  # as the official one
    with pytest.raises(ShapeError, match=r"32x32x3; found Images\(2 of 8x8x3"):
        write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2, (8, 8, 3))})


def test_class_names_come_from_their_file(make_images, tmp_path):
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    names = tmp_path / "batches.meta.txt"
    names.write_text("\n".join("ABCDEFGHIJ"))
    assert read_cifar_binary(tmp_path).class_names == tuple("ABCDEFGHIJ")
    names.unlink()
    assert read_cifar_binary(tmp_path).class_names == CIFAR10_BINARY.class_names
    names.write_bytes(b"x " * 600_000)
    with pytest.raises(DataFormatError, match=r"meta\.txt must have at most 1,000,000 bytes"):
        read_cifar_binary(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "whole number of records of 3073 bytes"),
        (lambda content: content[:-3072], "whole number of records of 3073 bytes"),
        (lambda content: b"", "whole number of records of 3073 bytes"),
        (lambda content: b"\x63" + content[1:], "Labels must lie in 0 to 9.*found 1 to 99"),
    ],
)
def test_a_damaged_binary_file_is_refused(damage, message, make_images, tmp_path):
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    path = tmp_path / "test_batch.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataFormatError, match=message):
        read_cifar_binary(tmp_path)


def test_missing_files_and_splits_are_named(make_images, tmp_path):
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch.bin`, `test.bin`"):
        read_cifar_binary(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch`, `test`"):
        read_cifar_python(tmp_path)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"train": make_images(10)})
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"missing in .*: data_batch_3.bin"):
        read_cifar_binary(tmp_path, "train")
    for read in (read_cifar_binary, read_cifar_python, load):
        with pytest.raises(OptionError, match=r"one of train, test; found 'tset'. Did you mean `t"):
            read(tmp_path, "tset")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("version", PYTHON_VERSIONS, ids=lambda version: version.folder)
def test_the_python_version_comes_back(version, protocol, make_images, tmp_path):
    images, folder = make_images(10), tmp_path / version.folder
    folder.mkdir()
    for files in version.files.values():
        for part, name in enumerate(files):
            rows = images[part :: len(files)]
            batch = {"data": planes(rows), version.labels_key: rows.labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    names = {version.names_key: list(version.class_names)}
    (folder / version.names_file).write_bytes(pickle.dumps(names, protocol=protocol))
    assert_same(read_cifar_python(folder), images)
    assert read_cifar_python(folder).class_names == version.class_names
    assert len(read_cifar_python(folder, "train")) == 10
    assert_same(load(folder), images)
    assert_same(load(tmp_path), images)  # torchvision's root


def test_a_pickle_of_python_2_is_read(make_images, tmp_path):
    """The opcodes and module names that Python 2 wrote, byte by byte."""
    images = make_images(4)
    pixels = planes(images).tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
        b"(K\x01(K\x04M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in images.labels) + b"e"
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."
    (tmp_path / "test_batch").write_bytes(batch)
    assert_same(read_cifar_python(tmp_path), images)


def test_copies_that_others_made_are_read(make_images, tmp_path):
    """Keys in bytes, labels in an array, names that are no UTF-8."""
    images = make_images(2)
    batch = {b"data": planes(images), b"fine_labels": images.labels}
    (tmp_path / "test").write_bytes(pickle.dumps(batch))
    names = [b"caf\xe9", *(name.encode() for name in CIFAR100_CLASSES[1:])]
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    found = read_cifar_python(tmp_path)
    assert_same(found, images)
    assert found.class_names == ("caf\N{REPLACEMENT CHARACTER}", *CIFAR100_CLASSES[1:])


DATA = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "must hold a dict; found list"),
        ({}, "entries `data` and `fine_labels`; found none"),
        ({"data": DATA}, "found `data`"),
        ({"data": [1], "fine_labels": [0]}, "must be a uint8 array"),
        ({"data": DATA.astype(float), "fine_labels": [0]}, "must be a uint8 array"),
        ({"data": DATA[0], "fine_labels": [0]}, "must be a uint8 array"),
        ({"data": DATA[:, 1:], "fine_labels": [0]}, r"found \(1, 3071\) and 1 labels"),
        ({"data": DATA, "fine_labels": [0, 1]}, r"found \(1, 3072\) and 2 labels"),
        ({"data": DATA, "fine_labels": 7}, "`fine_labels` must be a list; found 7"),
        *(
            ({"data": DATA, "fine_labels": [label]}, r"`fine_labels\[0\]` must be a whole number")
            for label in ("x", 1.0, True, None, -1, 10**7, [0])
        ),
    ],
)
def test_a_pickle_of_something_else_is_refused(content, message, tmp_path):
    (tmp_path / "test").write_bytes(pickle.dumps(content))
    with pytest.raises(DataFormatError, match=rf"test.*{message}"):
        read_cifar_python(tmp_path)


@pytest.mark.parametrize(("names", "message"), [([], "have a list"), ([[]], "be a list of text")])
def test_a_names_file_without_names_is_refused(names, message, tmp_path):
    (tmp_path / "test").write_bytes(pickle.dumps({"data": DATA, "fine_labels": [0]}))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    with pytest.raises(DataFormatError, match=f"meta.* must {message}"):
        read_cifar_python(tmp_path)
