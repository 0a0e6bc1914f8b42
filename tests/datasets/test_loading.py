from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttapca.datasets import load, read_digits, write_cifar_binary
from ttapca.datasets.cifar import CIFAR10_BINARY, CIFAR100_BINARY
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError


def test_a_name_is_looked_for_in_the_root(make_images: Any, tmp_path: Path) -> None:
    for name, version in (("cifar10", CIFAR10_BINARY), ("cifar100", CIFAR100_BINARY)):
        with pytest.raises(DataNotFoundError, match=f"Get it with: ttapca data get {name}"):
            load(name, root=tmp_path)
        images = make_images(4, seed=len(name))
        (tmp_path / version.folder).mkdir()
        write_cifar_binary(tmp_path / version.folder, version, {"test": images})
        assert load(name, root=tmp_path).fingerprint() == images.fingerprint()


def test_a_name_needs_a_root() -> None:
    with pytest.raises(OptionError, match="`cifar10` is looked for in a folder: give `root=`"):
        load("cifar10")


def test_neither_a_name_nor_a_path() -> None:
    with pytest.raises(DataNotFoundError, match=r"`cifar-10` is neither .* Did you mean `cifar10`"):
        load("cifar-10")


def test_several_data_sets_in_one_folder(make_images: Any, tmp_path: Path) -> None:
    for version in (CIFAR10_BINARY, CIFAR100_BINARY):
        (tmp_path / version.folder).mkdir()
        write_cifar_binary(tmp_path / version.folder, version, {"test": make_images(2)})
    with pytest.raises(OptionError, match="several data sets: cifar-10-batches-bin, cifar-100-b"):
        load(tmp_path)


def test_an_unknown_layout_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="is of no known layout: neither CIFAR"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(DataFormatError, match=r"must be an `.npz`, or an `.npy` beside"):
        load(tmp_path / "a.csv")


def test_options_of_cifar_c(make_images: Any, tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(5, np.uint8))
    np.save(folder / "fog.npy", np.zeros((5, 4, 4, 3), np.uint8))
    found = load("cifar10-c", root=tmp_path, corruption="fog", severity=1)
    assert len(found) == 1
    assert len(found.class_names) == 10
    with pytest.raises(OptionError, match=r"give `corruption=` and `severity=`. Corruptions: fog"):
        load("cifar10-c", root=tmp_path)
    with pytest.raises(OptionError, match="CIFAR-C has a test split only"):
        load(folder, "train", corruption="fog", severity=1)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    with pytest.raises(OptionError, match="are for the CIFAR-C layout only"):
        load(tmp_path, corruption="fog", severity=1)


def test_digits_have_a_fixed_split_of_all_classes() -> None:
    train, test = load("digits", "train"), load("digits")
    assert len(train) + len(test) == 1797
    assert test.fingerprint() == read_digits("test").fingerprint()
    assert set(np.bincount(test.labels)) <= set(range(57, 62))  # a third of each class
    assert test.images.shape[1:] == (8, 8, 1)
    assert int(train.images.max()) == 255
    assert len(np.unique(train.images)) == 17
    assert train.class_names == tuple("0123456789")


def test_digits_are_all_there() -> None:
    from sklearn.datasets import load_digits

    both = np.concatenate([read_digits("train").images, read_digits("test").images])
    ink = np.sort(np.rint(both / 255 * 16).sum(axis=(1, 2, 3)))
    np.testing.assert_array_equal(ink, np.sort(load_digits().images.sum(axis=(1, 2))))
