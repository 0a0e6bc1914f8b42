from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ttapca.datasets.catalog import CIFAR10_C
from ttapca.datasets.cifar import write_cifar_binary
from ttapca.datasets.cifar import CIFAR10_BINARY
from ttapca.datasets.fetching import fetch
from ttapca.datasets.inventory import Holding, inspect, inventory
from ttapca.datasets.catalog import DataSet


def look(data_set: DataSet, folder: Path) -> Holding:
    return inspect(data_set, data_set.layouts[0], folder)


def test_an_empty_root(tmp_path: Path) -> None:
    assert inventory(tmp_path) == []


def test_verified(tiny_set: DataSet, tmp_path: Path) -> None:
    holding = fetch(tiny_set, tmp_path / "root").holding
    assert look(tiny_set, holding.folder) == holding
    assert holding.state == "verified"
    assert holding.size == sum(path.stat().st_size for path in holding.folder.iterdir())


def test_one_flipped_bit_is_damage(tiny_set: DataSet, tmp_path: Path) -> None:
    folder = fetch(tiny_set, tmp_path / "root").holding.folder
    path = folder / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    holding = look(tiny_set, folder)
    assert (holding.state, holding.detail) == ("damaged", "another checksum: data_batch_2.bin")


def test_a_missing_and_a_truncated_file(tiny_set: DataSet, tmp_path: Path) -> None:
    folder = fetch(tiny_set, tmp_path / "root").holding.folder
    (folder / "data_batch_2.bin").write_bytes(b"short")
    assert look(tiny_set, folder).state == "damaged"
    assert "whole number of records" in look(tiny_set, folder).detail
    (folder / "test_batch.bin").unlink()
    assert look(tiny_set, folder).detail == (
        "missing: test_batch.bin; another checksum: data_batch_2.bin"
    )


def test_fewer_training_images_in_another_order(
    tiny_set: DataSet, tmp_path: Path, make_images: Any
) -> None:
    order = np.random.default_rng(0).permutation(10)
    splits = {"train": make_images(10)[:5], "test": make_images(10, seed=1).subset(order)}
    write_cifar_binary(tmp_path, CIFAR10_BINARY, splits)  # type: ignore[arg-type]
    holding = look(tiny_set, tmp_path)
    assert holding.state == "partial"
    assert holding.detail == ("5 of 10 training images; all test images, in an order of their own")


def test_only_the_split_that_differs_is_remarked_on(
    tiny_set: DataSet, tmp_path: Path, make_images: Any
) -> None:
    order = np.random.default_rng(0).permutation(10)
    splits = {"train": make_images(10), "test": make_images(10, seed=1).subset(order)}
    write_cifar_binary(tmp_path, CIFAR10_BINARY, splits)  # type: ignore[arg-type]
    assert look(tiny_set, tmp_path).detail == "all test images, in an order of their own"


def test_other_images_of_the_right_number(
    tiny_set: DataSet, tmp_path: Path, make_images: Any
) -> None:
    splits = {"train": make_images(10), "test": make_images(10, seed=2)}
    write_cifar_binary(tmp_path, CIFAR10_BINARY, splits)  # type: ignore[arg-type]
    holding = look(tiny_set, tmp_path)
    assert (holding.state, holding.detail) == ("damaged", "another checksum: test_batch.bin")


def write_cifar_c(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(2, np.uint8))
    np.save(folder / "fog.npy", np.zeros((2, 4, 4, 3), np.uint8))


def test_a_generated_set(tmp_path: Path) -> None:
    folder = tmp_path / "CIFAR-10-C"
    write_cifar_c(folder)
    (folder / "corruptions.json").write_text(json.dumps({"severities": [1, 5]}))
    (holding,) = inventory(tmp_path)
    assert holding.state == "generated"
    assert holding.detail == "1 corruptions, not the publisher's files"
    (folder / "fog.npy").write_bytes(b"torn")
    (holding,) = inventory(tmp_path)
    assert holding.state == "damaged"
    assert "not a plain `.npy` array" in holding.detail


def test_other_files_under_the_official_name(tmp_path: Path) -> None:
    write_cifar_c(tmp_path / "CIFAR-10-C")
    (holding,) = inventory(tmp_path)
    assert holding.state == "damaged"
    assert holding.detail.endswith("another checksum: fog.npy, labels.npy")


def test_some_of_the_official_corruptions(tmp_path: Path, digest: Any) -> None:
    write_cifar_c(tmp_path / "CIFAR-10-C")
    sums = dict(CIFAR10_C.layouts[0].checksums)
    for name in ("fog.npy", "labels.npy"):
        sums[name] = digest((tmp_path / "CIFAR-10-C" / name).read_bytes())
    layout = dataclasses.replace(CIFAR10_C.layouts[0], checksums=sums)
    holding = inspect(CIFAR10_C, layout, tmp_path / "CIFAR-10-C")
    assert (holding.state, holding.detail) == ("partial", "1 of 19 corruptions, all verified")


def test_a_manifest_that_makes_no_sense_is_damage(tmp_path: Path) -> None:
    for content in ('{"severities": 3}', '{"severities": [[]]}', "[" * 100_000):
        (tmp_path / "corruptions.json").write_text(content)
        holding = look(CIFAR10_C, tmp_path)
        assert holding.state == "damaged"
        assert "corruptions.json" in holding.detail
