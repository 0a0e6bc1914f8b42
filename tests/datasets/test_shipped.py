"""The photographs that ship are those of CIFAR-10, without loss and not chosen by any result."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ttapca.cli.arguments import cache_root
from ttapca.datasets import CIFAR10_500, load, read_cifar10_500
from ttapca.datasets.cifar import CIFAR10_CLASSES
from ttapca.datasets.layouts import SHIPPED_FOLDER
from ttapca.errors import DataNotFoundError


def test_they_are_the_first_fifty_of_each_class() -> None:
    images = load(CIFAR10_500)
    assert (images.images.shape, images.class_names) == ((500, 32, 32, 3), CIFAR10_CLASSES)
    assert np.bincount(images.labels).tolist() == [50] * 10
    rows = json.loads((SHIPPED_FOLDER / "cifar10-500.json").read_text())["rows"]
    assert rows == sorted(set(rows))
    assert images.fingerprint() in (SHIPPED_FOLDER / "cifar10-500.md").read_text()
    try:
        test = load("cifar10", root=cache_root())
    except DataNotFoundError:
        pytest.skip("CIFAR-10 is not there: ttapca data get cifar10")
    first = [row for row in range(630) if (test.labels[: row + 1] == test.labels[row]).sum() <= 50]
    assert rows == first
    assert np.array_equal(images.images, test.images[rows])
    assert np.array_equal(images.labels, test.labels[rows])


def test_there_are_no_training_images() -> None:
    with pytest.raises(DataNotFoundError, match=r"has test images only.*--filter.*--data cifar10"):
        read_cifar10_500("train")
