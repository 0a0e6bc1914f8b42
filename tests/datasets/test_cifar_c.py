from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ttapca.datasets import corruptions_in, load, read_cifar_c
from ttapca.datasets.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError


def write_set(folder: Path, count: int = 4, severities: int = 5) -> np.ndarray:
    """Blocks by severity, each filled with its number; labels repeat in every block."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = np.repeat(np.arange(1, severities + 1, dtype=np.uint8), count)
    pixels = np.broadcast_to(blocks[:, None, None, None], (count * severities, 32, 32, 3)).copy()
    labels = np.arange(count, dtype=np.uint8)
    np.save(folder / "labels.npy", np.tile(labels, severities))
    for corruption in ("fog", "gaussian_noise"):
        np.save(folder / f"{corruption}.npy", pixels)
    return labels


@pytest.mark.parametrize("severity", range(1, 6))
def test_a_block_is_a_memory_mapped_severity(severity: int, tmp_path: Path) -> None:
    labels = write_set(tmp_path)
    found = read_cifar_c(tmp_path, "fog", severity)
    assert isinstance(found.images, np.memmap)
    assert len(found) == 4
    assert (found.images == severity).all()
    assert found.labels.tolist() == labels.tolist()
    assert load(tmp_path, corruption="fog", severity=severity).fingerprint() == found.fingerprint()
    one = load(tmp_path / "fog.npy", severity=severity)
    assert one.fingerprint() == found.fingerprint()


def test_a_manifest_says_which_severities_there_are(tmp_path: Path) -> None:
    write_set(tmp_path, severities=2)
    names = list("abcd")
    manifest = {"severities": [1, 5], "class_names": names}
    (tmp_path / "corruptions.json").write_text(json.dumps(manifest))
    found = read_cifar_c(tmp_path, "fog", 5)
    assert (found.images == 2).all()  # the second block
    assert found.class_names == tuple(names)
    with pytest.raises(OptionError, match=r"must be one of 1, 5, which .* holds; found 3"):
        read_cifar_c(tmp_path, "fog", 3)


def test_class_names_follow_the_folder(tmp_path: Path) -> None:
    for name, classes in (("CIFAR-10-C", CIFAR10_CLASSES), ("CIFAR-100-C", CIFAR100_CLASSES)):
        write_set(tmp_path / name)
        assert read_cifar_c(tmp_path / name, "fog", 1).class_names == classes
    write_set(tmp_path / "mine")
    assert read_cifar_c(tmp_path / "mine", "fog", 1).class_names == ("0", "1", "2", "3")
    named = read_cifar_c(tmp_path / "mine", "fog", 1, class_names=list("abcd"))
    assert named.class_names == ("a", "b", "c", "d")


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, "x"])
def test_an_impossible_severity_is_refused(severity: int, tmp_path: Path) -> None:
    write_set(tmp_path)
    with pytest.raises(OptionError, match="must be one of 1, 2, 3, 4, 5"):
        read_cifar_c(tmp_path, "fog", severity)


def test_an_unknown_corruption_gets_near_names(tmp_path: Path) -> None:
    write_set(tmp_path)
    assert corruptions_in(tmp_path) == ("fog", "gaussian_noise")
    with pytest.raises(DataNotFoundError, match=r"`gausian_noise` in .* mean `gaussian_noise`"):
        read_cifar_c(tmp_path, "gausian_noise", 1)
    with pytest.raises(DataNotFoundError, match="holds no corruption"):
        read_cifar_c(tmp_path / "nowhere", "fog", 1)


def test_a_path_is_no_corruption(tmp_path: Path) -> None:
    write_set(tmp_path / "inner")
    np.save(tmp_path / "secret.npy", np.zeros(3))
    with pytest.raises(DataNotFoundError, match=r"No corruption `\.\./secret`"):
        read_cifar_c(tmp_path / "inner", "../secret", 1)


def test_missing_labels_are_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "labels.npy").unlink()
    with pytest.raises(DataNotFoundError, match=r"labels.npy does not exist"):
        read_cifar_c(tmp_path, "fog", 1)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    np.save(tmp_path / "fog.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataFormatError, match="Files with pickled objects are refused"):
        read_cifar_c(tmp_path, "fog", 1)


@pytest.mark.parametrize("keep", [0, 20, 130, 20_000])
def test_a_truncated_array_is_refused(keep: int, tmp_path: Path) -> None:
    write_set(tmp_path)
    path = tmp_path / "fog.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataFormatError, match=r"not a plain `.npy` array"):
        read_cifar_c(tmp_path, "fog", 1)


@pytest.mark.parametrize(
    ("pixels", "error", "message"),
    [
        (np.zeros((19, 4, 4, 3), np.uint8), DataFormatError, "multiple of its 5 severities"),
        (np.zeros((20, 4, 4), np.uint8), DataFormatError, r"found \(20, 4, 4\)"),
        (np.zeros((25, 4, 4, 3), np.uint8), DataFormatError, "each of the 25 images.*found 20"),
        (np.zeros((20, 4, 4, 3)), DataFormatError, "must be uint8"),
    ],
)
def test_wrong_arrays_are_refused(
    pixels: np.ndarray, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_set(tmp_path)
    np.save(tmp_path / "fog.npy", pixels)
    with pytest.raises(error, match=message):
        read_cifar_c(tmp_path, "fog", 1)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.zeros(20), DataFormatError, "Labels must be integers; found float64"),
        (np.zeros((20, 1), np.uint8), ShapeError, "one label an image"),
        (np.array(3), DataFormatError, "found a single number"),
    ],
)
def test_wrong_labels_are_refused(
    labels: np.ndarray, error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_set(tmp_path)
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(error, match=message):
        read_cifar_c(tmp_path, "fog", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable JSON"),
        ("[1]", "must hold a JSON object; found list"),
        ('{"severities": []}', "`severities` must list at least one"),
        ('{"severities": 3}', "`severities` must list at least one"),
        ('{"severities": ["x"]}', "`severities` must be numbers from 1 to 5"),
        ('{"severities": [1, 9]}', "`severities` must be numbers from 1 to 5"),
        ('{"severities": [true]}', "`severities` must be numbers from 1 to 5"),
        ('{"severities": [1, 1]}', r"each one once; found \[1, 1\]"),
        ('{"class_names": 7}', "`class_names` must be a list of text"),
        ('{"class_names": [7]}', "`class_names` must be a list of text"),
        ("[" * 100_000, "not readable JSON"),
        ('{"seed": ' + "9" * 5000 + "}", "not readable JSON"),
        ("{}" + " " * (16 << 20), "larger than 16,777,216 bytes"),
    ],
)
def test_a_damaged_manifest_is_refused(text: str, message: str, tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "corruptions.json").write_text(text)
    with pytest.raises(DataFormatError, match=message):
        read_cifar_c(tmp_path, "fog", 1)
