"""One `.npy` for each corruption, in blocks by severity."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ttapca.datasets import corruptions_in, load, read_cifar_c
from ttapca.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def write_set(folder, count=4, severities=5):
    """Blocks by severity, each filled with its number; labels repeat in every block."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = np.repeat(np.arange(1, severities + 1, dtype=np.uint8), count)
    pixels = np.broadcast_to(blocks[:, None, None, None], (count * severities, 32, 32, 3)).copy()
    np.save(folder / "labels.npy", np.tile(np.arange(count, dtype=np.uint8), severities))
    for corruption in ("fog", "gaussian_noise"):
        np.save(folder / f"{corruption}.npy", pixels)


@pytest.mark.parametrize("severity", range(1, 6))
def test_a_block_is_a_memory_mapped_severity(severity, tmp_path):
    write_set(tmp_path)
    found = read_cifar_c(tmp_path, "fog", severity)
    assert isinstance(found.images, np.memmap)
    assert (found.images == severity).all()
    assert found.labels.tolist() == [0, 1, 2, 3]
    assert load(tmp_path, corruption="fog", severity=severity).fingerprint() == found.fingerprint()
    one = load(tmp_path / "fog.npy", severity=severity)
    assert one.fingerprint() == found.fingerprint()


def test_a_manifest_says_which_severities_there_are(tmp_path):
    write_set(tmp_path, severities=2)
    manifest = {"severities": [1, 5], "class_names": list("abcd"), "seed": 3}
    (tmp_path / "corruptions.json").write_text(json.dumps(manifest))
    found = read_cifar_c(tmp_path, "fog", 5)
    assert (found.images == 2).all()  # the second block
    assert found.class_names == tuple("abcd")
    with pytest.raises(OptionError, match=r"must be one of 1, 5, which .* holds; found 3"):
        read_cifar_c(tmp_path, "fog", 3)


def test_class_names_follow_the_folder(tmp_path):
    for name, classes in (("CIFAR-10-C", CIFAR10_CLASSES), ("CIFAR-100-C", CIFAR100_CLASSES)):
        write_set(tmp_path / name)
        assert read_cifar_c(tmp_path / name, "fog", 1).class_names == classes
    write_set(tmp_path / "mine")
    assert read_cifar_c(tmp_path / "mine", "fog", 1).class_names == ("0", "1", "2", "3")
    named = read_cifar_c(tmp_path / "mine", "fog", 1, class_names=list("abcd"))
    assert named.class_names == tuple("abcd")


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, "x"])
def test_an_impossible_severity_is_refused(severity, tmp_path):
    write_set(tmp_path)
    with pytest.raises(OptionError, match="must be one of 1, 2, 3, 4, 5"):
        read_cifar_c(tmp_path, "fog", severity)


def test_what_is_not_there_is_named(tmp_path):
    write_set(tmp_path / "set")
    np.save(tmp_path / "secret.npy", np.zeros(3))
    assert corruptions_in(tmp_path / "set") == ("fog", "gaussian_noise")
    with pytest.raises(DataNotFoundError, match=r"`gausian_noise` in .* mean `gaussian_noise`"):
        read_cifar_c(tmp_path / "set", "gausian_noise", 1)
    with pytest.raises(DataNotFoundError, match=r"No corruption `\.\./secret`"):
        read_cifar_c(tmp_path / "set", "../secret", 1)
    with pytest.raises(DataNotFoundError, match="holds no corruption"):
        read_cifar_c(tmp_path / "nowhere", "fog", 1)
    (tmp_path / "set" / "labels.npy").unlink()
    with pytest.raises(DataNotFoundError, match=r"labels.npy does not exist"):
        read_cifar_c(tmp_path / "set", "fog", 1)


@pytest.mark.parametrize(
    ("name", "array", "error", "message"),
    [
        ("fog", np.zeros((19, 4, 4, 3), np.uint8), DataFormatError, "multiple of its 5 severities"),
        ("fog", np.zeros((20, 4, 4), np.uint8), DataFormatError, r"found \(20, 4, 4\)"),
        ("fog", np.zeros((25, 4, 4, 3), np.uint8), DataFormatError, "of the 25 images.*found 20"),
        ("fog", np.zeros((20, 4, 4, 3)), DataFormatError, "must be uint8"),
        ("fog", np.array([{}]), DataFormatError, "Files with pickled objects are refused"),
        ("labels", np.zeros(20), DataFormatError, "Labels must be integers; found float64"),
        ("labels", np.zeros((20, 1), np.uint8), ShapeError, "one label for each image"),
        ("labels", np.array(3), DataFormatError, "found a single number"),
    ],
)
def test_wrong_arrays_are_refused(name, array, error, message, tmp_path):
    write_set(tmp_path)
    np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(error, match=message):
        read_cifar_c(tmp_path, "fog", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON as we read it"),
        ("[1]", "the content must be an object"),
        ('{"severities": []}', "`severities` must be a list of 1 to 5 entries"),
        ('{"severities": 3}', "`severities` must be a list"),
        ('{"severities": ["x"]}', r"`severities\[0\]` must be a whole number from 1 to 5"),
        ('{"severities": [1, 9]}', r"`severities\[1\]` must be a whole number from 1 to 5"),
        ('{"severities": [true]}', r"`severities\[0\]` must be a whole number from 1 to 5"),
        ('{"severities": [1, 1]}', r"each one once; found \[1, 1\]"),
        ('{"class_names": 7}', "`class_names` must be a list"),
        ('{"class_names": [7]}', r"`class_names\[0\]` must be text"),
        ("[" * 100_000, "is not JSON as we read it"),
        ('{"seed": ' + "9" * 5000 + "}", "is not JSON as we read it"),
        ("{}" + " " * 1_000_000, "must have at most 1,000,000 bytes"),
    ],
)
def test_a_damaged_manifest_is_refused(text, message, tmp_path):
    write_set(tmp_path)
    (tmp_path / "corruptions.json").write_text(text)
    with pytest.raises(DataFormatError, match=rf"corruptions\.json.* {message}"):
        read_cifar_c(tmp_path, "fog", 1)
