"""One way in for every layout; your own images; the documentation; real images, if any."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import ttapca.datasets
from ttapca.cli.arguments import cache_root
from ttapca.datasets import (
    inventory,
    load,
    read_cifar10_500,
    read_digits,
    read_npz,
    write_cifar_binary,
)
from ttapca.datasets.cifar import CIFAR10_BINARY, CIFAR10_CLASSES, CIFAR100_BINARY, CIFAR100_CLASSES
from ttapca.datasets.layouts import SHIPPED_FOLDER
from ttapca.datasets.sources import DATA_SETS
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_cifar10 = pytest.mark.skipif(
    not (cache_root() / DATA_SETS["cifar10"].layouts[0].folder).is_dir(),
    reason="CIFAR-10 is not in the cache; get it with: ttapca data get cifar10",
)
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")


def test_a_name_is_looked_for_in_the_root(make_images, tmp_path):
    with pytest.raises(OptionError, match="`cifar10`, say with `root=` which folder"):
        load("cifar10")
    for name, version in (("cifar10", CIFAR10_BINARY), ("cifar100", CIFAR100_BINARY)):
        with pytest.raises(DataNotFoundError, match=f"Get it with: ttapca data get {name}"):
            load(name, root=tmp_path)
        images = make_images(4, seed=len(name))
        (tmp_path / version.folder).mkdir()
        write_cifar_binary(tmp_path / version.folder, version, {"test": images})
        assert load(name, root=tmp_path).fingerprint() == images.fingerprint()
    with pytest.raises(OptionError, match="several data sets: cifar-10-batches-bin, cifar-100-b"):
        load(tmp_path)
    with pytest.raises(OptionError, match="are for the CIFAR-C layout only"):
        load("cifar10", root=tmp_path, corruption="fog", severity=1)


@pytest.mark.parametrize("name", ["digits", "cifar10-500"])
def test_options_that_would_have_no_effect(name):
    with pytest.raises(OptionError, match=f"CIFAR-C layout only; {name} has another"):
        load(name, corruption="fog")
    with pytest.raises(OptionError, match="CIFAR-C layout only"):
        load(name, severity=3)
    with pytest.raises(OptionError, match=f"the images of `{name}` have one size already"):
        load(name, size=16)


def test_a_size_is_for_pictures(make_images, tmp_path):
    images = make_images(4, seed=0)
    archive, binary, corrupted = (tmp_path / name for name in ("a.npz", "bin", "CIFAR-10-C"))
    np.savez(archive, images=images.images, labels=images.labels)
    for folder in (binary, corrupted):
        folder.mkdir()
    write_cifar_binary(binary, CIFAR10_BINARY, {"test": images})
    np.save(corrupted / "labels.npy", np.zeros(5, np.uint8))
    np.save(corrupted / "fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    for path, options in (
        (archive, {}),
        (binary, {}),
        (corrupted, {"corruption": "fog", "severity": 1}),
    ):
        assert len(load(path, **options))
        with pytest.raises(OptionError, match=f"{path.name}` have one size already"):
            load(path, size=16, **options)


def test_what_is_neither_a_name_nor_a_layout(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"`cifar-10` is neither .* Did you mean `cifar10`"):
        load("cifar-10")
    with pytest.raises(DataFormatError, match="has no known layout: neither CIFAR"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(DataFormatError, match=r"is an `.npz`, or an `.npy` beside"):
        load(tmp_path / "a.csv")


def test_options_of_cifar_c(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(5, np.uint8))
    np.save(folder / "fog.npy", np.zeros((5, 4, 4, 3), np.uint8))
    found = load("cifar10-c", root=tmp_path, corruption="fog", severity=1)
    assert (len(found), len(found.class_names)) == (1, 10)
    with pytest.raises(OptionError, match=r"give `corruption=` and `severity=`. Corruptions: fog"):
        load("cifar10-c", root=tmp_path)
    with pytest.raises(OptionError, match="CIFAR-C has a test split only"):
        load(folder, "train", corruption="fog", severity=1)


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


def test_the_documentation():
    constants = {
        "CIFAR10_500",
        "DATA_SETS",
        "DIGITS",
        "DataSet",
        "FROST",
        "Fetched",
        "Holding",
        "Order",
        "Split",
    }
    for name in set(ttapca.datasets.__all__) - constants:
        assert ">>>" in (getattr(ttapca.datasets, name).__doc__ or ""), name
    page = Path(__file__).parents[2] / "docs" / "data.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_data_need_no_torch():
    code = "import sys, ttapca.datasets; sys.exit('torch' in sys.modules or 'pooch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_shared
def test_cifar100_in_part_is_read_and_called_so(tmp_path):
    script = SHARED / "unpack_cifar100.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    train, test = load("cifar100", "train", root=tmp_path), load("cifar100", root=tmp_path)
    assert (len(train), len(test)) == (20_000, 10_000)
    assert test.class_names == CIFAR100_CLASSES
    assert set(np.bincount(test.labels)) == {100}
    assert test.channel_means() == pytest.approx((0.5088, 0.4874, 0.4419), abs=1e-4)
    (holding,) = inventory(tmp_path)
    assert holding.state == "damaged"
    assert holding.detail.startswith("another checksum: train.bin")


@needs_cifar10
def test_cifar10_is_the_published_one():
    fingerprints = {
        "train": "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2",
        "test": "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
    }
    for split, fingerprint in fingerprints.items():
        assert load("cifar10", split, root=cache_root()).fingerprint() == fingerprint


def shipped_rows():
    return json.loads((SHIPPED_FOLDER / "cifar10-500.json").read_text())["rows"]


def test_the_shipped_images_are_the_first_fifty_of_each_class_without_loss():
    images = load("cifar10-500")
    assert (images.images.shape, images.class_names) == ((500, 32, 32, 3), CIFAR10_CLASSES)
    assert np.bincount(images.labels).tolist() == [50] * 10
    assert shipped_rows() == sorted(set(shipped_rows()))
    assert images.fingerprint() in (SHIPPED_FOLDER / "cifar10-500.md").read_text()


@needs_cifar10
def test_the_shipped_images_are_those_of_cifar10():
    images, test = load("cifar10-500"), load("cifar10", root=cache_root())
    first = [row for row in range(630) if (test.labels[: row + 1] == test.labels[row]).sum() <= 50]
    assert shipped_rows() == first
    assert np.array_equal(images.images, test.images[first])
    assert np.array_equal(images.labels, test.labels[first])


def test_no_training_images_ship():
    with pytest.raises(DataNotFoundError, match=r"has test images only.*--filter.*--data cifar10"):
        read_cifar10_500("train")


def test_series_of_both_splits_in_one_archive(tmp_path: Path) -> None:
    path, random = tmp_path / "mine.npz", np.random.default_rng(0)
    parts = {"train": random.standard_normal((6, 2, 9)), "test": random.standard_normal((4, 2, 9))}
    arrays = {f"x_{name}": series for name, series in parts.items()}
    labels = {f"y_{name}": np.arange(len(series)) % 3 for name, series in parts.items()}
    np.savez(path, **arrays, **labels, class_names=np.array(["a", "b", "c"]))
    for name, series in parts.items():
        found = ttapca.datasets.load(path, name)
        assert repr(found) == f"Series({len(series)} of 2x9, 3 classes)"
        np.testing.assert_array_equal(found.images, series)
        np.testing.assert_array_equal(found[1:].images, series[1:])
        tensor = ttapca.datasets.to_tensor(found.images)
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor, series, rtol=1e-6)
    np.savez(path, x_test=parts["test"] * np.nan, y_test=labels["y_test"])
    with pytest.raises(DataFormatError, match=r"mine\.npz: Series must be finite"):
        ttapca.datasets.load(path)
