"""Test images that workers share, and read again on other machines."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ttapca.benchmark.image_shelf import ImageShelf
from ttapca.benchmark.subject import ImageRecipe
from ttapca.datasets import read_digits
from ttapca.errors import DataNotFoundError, EngineError


def test_images_are_made_once(tmp_path: Path) -> None:
    shelf, made = ImageShelf(tmp_path / "shelf", most=2), []

    def parts(value: int) -> Iterator[np.ndarray]:
        made.append(value)
        yield np.full((2, 4, 4, 3), value, np.uint8)
        yield np.full((1, 4, 4, 3), value + 1, np.uint8)

    for number, value in enumerate([1, 1, 7, 9, 7, 1]):
        found = shelf.get(f"all {value}", 3, lambda value=value: parts(value))
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, np.concatenate(list(parts(value))))
        assert made.pop() == value
        for path in tmp_path.glob("shelf/*.npy"):  # a second has passed
            os.utime(path, (number, path.stat().st_mtime - 1))
    assert made == [1, 7, 9, 1]  # there is room for two


def test_images_that_find_no_room_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shelf = ImageShelf(tmp_path / "file", most=2)
    one = np.ones((1, 2, 2, 1), np.uint8)
    np.testing.assert_array_equal(shelf.get("ones", 2, lambda: [one, one]), np.ones((2, 2, 2, 1)))

    def missing() -> Iterator[np.ndarray]:
        raise DataNotFoundError("no photographs")

    with pytest.raises(DataNotFoundError, match="no photographs"):
        ImageShelf(tmp_path, most=2).get("frost", 1, missing)


def test_a_full_disk_is_not_kept_full(tmp_path: Path) -> None:
    one = np.ones((1, 2, 2, 1), np.uint8)
    tries: list[int] = []

    def parts() -> Iterator[np.ndarray]:
        yield one
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    np.testing.assert_array_equal(ImageShelf(tmp_path, most=2).get("ones", 1, parts), one)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_images_of_another_machine() -> None:
    digits = read_digits()
    right = ImageRecipe("digits", None, None, None, 40, digits[:40].fingerprint())
    np.testing.assert_array_equal(right().images, digits.images[:40])
    with pytest.raises(EngineError, match=r"the same test images; here those of `digits` are"):
        dataclasses.replace(right, count=39)()
