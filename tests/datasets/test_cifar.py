"""CIFAR in its binary and python versions, and the CIFAR-C layout."""

from __future__ import annotations

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.datasets import (
    Images,
    corruptions_in,
    load,
    read_cifar_binary,
    read_cifar_c,
    read_cifar_python,
    write_cifar_binary,
)
from ttapca.datasets.cifar import (
    BINARY_VERSIONS,
    CIFAR10_BINARY,
    CIFAR10_CLASSES,
    CIFAR100_CLASSES,
    PYTHON_VERSIONS,
)
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def assert_same(found, expected):
    np.testing.assert_array_equal(found.images, expected.images)
    np.testing.assert_array_equal(found.labels, expected.labels)


@given(count=st.integers(5, 23))
def test_the_binary_version_comes_back(count, tmp_path_factory):
    pixels = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), np.uint8)
    for version in BINARY_VERSIONS:
        folder = tmp_path_factory.mktemp("cifar")
        labels = np.arange(count) % len(version.class_names)
        train = Images(pixels, labels, version.class_names)
        write_cifar_binary(folder, version, {"train": train, "test": train[:4]})
        assert_same(read_cifar_binary(folder, "train"), train)
        test = load(folder)
        assert_same(test, train[:4])
        assert test.class_names == version.class_names
        assert isinstance(test.images, np.memmap)
        assert not test.images.flags.writeable


def test_the_record_is_the_published_one(make_images, tmp_path):
    images = make_images(3)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": images})
    record = (tmp_path / "test_batch.bin").read_bytes()[3073 : 2 * 3073]
    assert record[0] == images.labels[1]
    assert record[1 + 33] == images.images[1, 1, 1, 0]  # second row, second pixel, red
    assert record[1 + 2048] == images.images[1, 0, 0, 2]  # first of the blue plane
    names = tmp_path / "batches.meta.txt"
    assert names.stat().st_size == 61  # as the official one
    with pytest.raises(ShapeError, match=r"32x32x3; found Images\(2 of 8x8x3"):
        write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2, (8, 8, 3))})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3072), "whole number of records of 3073 bytes"),
        (b"", "whole number of records of 3073 bytes"),
        (bytes(3073) + b"\x63" + bytes(3072), "Labels must lie in 0 to 9.*found 0 to 99"),
    ],
)
def test_a_damaged_binary_file_is_refused(content, message, tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        read_cifar_binary(tmp_path)


@pytest.fixture
def publish(monkeypatch):
    """Write a file, and take its checksum for the publisher's."""
    known: dict[str, str] = {}
    monkeypatch.setattr("ttapca.datasets.cifar.known_checksums", lambda _folder: known)

    def write(path, content):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        known[path.name] = f"md5:{hashlib.md5(content).hexdigest()}"

    return write


def planes(images):
    return images.images.transpose(0, 3, 1, 2).reshape(len(images), -1).copy()


@pytest.mark.parametrize("version", PYTHON_VERSIONS, ids=lambda version: version.folder)
def test_the_python_version_comes_back(version, publish, make_images, tmp_path):
    images = make_images(10)
    for files in version.files.values():
        for part, name in enumerate(files):
            rows = images[part :: len(files)]
            batch = {"data": planes(rows), version.labels_key: rows.labels.tolist()}
            publish(tmp_path / version.folder / name, pickle.dumps(batch, protocol=2))
    found = load(tmp_path)  # torchvision's root
    assert_same(found, images)
    assert found.class_names == version.class_names
    assert len(read_cifar_python(tmp_path / version.folder, "train")) == 10


def test_a_pickle_of_python_2_is_read(publish, make_images, tmp_path):
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
    publish(tmp_path / "test_batch", batch)
    assert_same(read_cifar_python(tmp_path), images)


class Attack:
    """Unpickles by making a folder."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def test_another_pickle_is_refused_and_nothing_in_it_is_run(tmp_path, monkeypatch):
    trace, path = tmp_path / "it-ran", tmp_path / "test_batch"
    content = pickle.dumps({"data": Attack(str(trace)), "labels": [0]})
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DataFormatError, match="test_batch must"):
            read_cifar_python(tmp_path)
        assert not trace.exists()
        monkeypatch.setattr("ttapca.datasets.cifar.MAX_PICKLE_BYTES", 5)  # nor is it read whole
    pickle.loads(content)  # the attack is real
    assert trace.exists()


def test_missing_files_and_splits_are_named(make_images, tmp_path):
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch.bin`, `test.bin`"):
        read_cifar_binary(tmp_path)
    with pytest.raises(DataNotFoundError, match=r"holds none of `test_batch`, `test`"):
        read_cifar_python(tmp_path)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"train": make_images(10)})
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataNotFoundError, match=r"data_batch_3.bin does not exist"):
        read_cifar_binary(tmp_path, "train")
    for read in (read_cifar_binary, read_cifar_python, load):
        with pytest.raises(OptionError, match=r"one of train, test; found 'tset'. Did you mean `t"):
            read(tmp_path, "tset")


@pytest.fixture
def corrupted(tmp_path):
    """Blocks by severity, each filled with its number; labels repeat in every block."""
    folder = tmp_path / "mine"
    folder.mkdir()
    blocks = np.repeat(np.arange(1, 6, dtype=np.uint8), 4)
    for name in ("fog", "gaussian_noise"):
        np.save(folder / name, np.broadcast_to(blocks[:, None, None, None], (20, 32, 32, 3)))
    np.save(folder / "labels.npy", np.tile(np.arange(4, dtype=np.uint8), 5))
    return folder


@pytest.mark.parametrize("severity", range(1, 6))
def test_a_block_is_a_memory_mapped_severity(severity, corrupted):
    found = read_cifar_c(corrupted, "fog", severity)
    assert isinstance(found.images, np.memmap)
    assert (found.images == severity).all()
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert_same(load(corrupted, corruption="fog", severity=severity), found)
    assert_same(load(corrupted / "fog.npy", severity=severity), found)


def test_where_severities_and_class_names_come_from(corrupted):
    assert read_cifar_c(corrupted, "fog", 1).class_names == ("0", "1", "2", "3")
    named = read_cifar_c(corrupted, "fog", 1, class_names=list("abcd"))
    assert named.class_names == tuple("abcd")
    for name, classes in (("CIFAR-10-C", CIFAR10_CLASSES), ("CIFAR-100-C", CIFAR100_CLASSES)):
        corrupted = corrupted.rename(corrupted.with_name(name))
        assert read_cifar_c(corrupted, "fog", 1).class_names == classes
    manifest = {"severities": [5, 3, 1, 2], "class_names": list("abcd"), "seed": 3}
    (corrupted / "corruptions.json").write_text(json.dumps(manifest))
    found = read_cifar_c(corrupted, "fog", 5)
    assert len(found) == 5  # the first of four blocks
    assert found.class_names == tuple("abcd")
    with pytest.raises(OptionError, match=r"must be one of 5, 3, 1, 2, which .* holds; found 4"):
        read_cifar_c(corrupted, "fog", 4)


def test_what_is_not_there_is_named(corrupted):
    np.save(corrupted.parent / "secret.npy", np.zeros(3))
    assert corruptions_in(corrupted) == ("fog", "gaussian_noise")
    for severity in (0, 6, 2.5, "x"):
        with pytest.raises(OptionError, match="must be one of 1, 2, 3, 4, 5"):
            read_cifar_c(corrupted, "fog", severity)
    with pytest.raises(DataNotFoundError, match=r"`gausian_noise` in .* mean `gaussian_noise`"):
        read_cifar_c(corrupted, "gausian_noise", 1)
    with pytest.raises(DataNotFoundError, match=r"No corruption `\.\./secret`"):
        read_cifar_c(corrupted, "../secret", 1)
    with pytest.raises(DataNotFoundError, match="There are: none"):
        read_cifar_c(corrupted / "nowhere", "fog", 1)
    (corrupted / "labels.npy").unlink()
    with pytest.raises(DataNotFoundError, match=r"labels.npy does not exist"):
        read_cifar_c(corrupted, "fog", 1)


@pytest.mark.parametrize(
    ("name", "array", "error", "message"),
    [
        ("fog", np.zeros((19, 4, 4, 3), np.uint8), DataFormatError, "multiple of its 5 severities"),
        ("fog", np.zeros((20, 4, 4), np.uint8), DataFormatError, r"found \(20, 4, 4\)"),
        ("fog", np.zeros((25, 4, 4, 3), np.uint8), DataFormatError, "of the 25 images.*found 20"),
        ("fog", np.zeros((20, 4, 4, 3)), DataFormatError, "must be uint8"),
        ("fog", np.array([{}]), DataFormatError, "Files with pickled objects are refused"),
        ("labels", np.zeros(20), DataFormatError, "Labels must be integers; found float64"),
        ("labels", np.zeros((20, 1), np.uint8), ShapeError, "one label for each sample"),
        ("labels", np.array(3), DataFormatError, "found a single number"),
    ],
)
def test_wrong_arrays_are_refused(name, array, error, message, corrupted):
    np.save(corrupted / f"{name}.npy", array)
    with pytest.raises(error, match=message):
        read_cifar_c(corrupted, "fog", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "is not JSON as we read it"),
        ("[1]", "the content must be an object"),
        ('{"severities": []}', "`severities` must be a list of 1 to 5 entries"),
        ('{"severities": [1, 9]}', r"`severities\[1\]` must be a whole number from 1 to 5"),
        ('{"severities": [1, 1]}', r"each one once; found \[1, 1\]"),
        ('{"class_names": [7]}', r"`class_names\[0\]` must be text"),
        ("{}" + " " * 1_000_000, "must have at most 1,000,000 bytes"),
    ],
)
def test_a_damaged_manifest_is_refused(text, message, corrupted):
    (corrupted / "corruptions.json").write_text(text)
    with pytest.raises(DataFormatError, match=rf"corruptions\.json.* {message}"):
        read_cifar_c(corrupted, "fog", 1)
