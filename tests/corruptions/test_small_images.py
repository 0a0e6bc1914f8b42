"""Small and grey images are corrupted like large ones; `benchmark/test_streams.py` has more."""

from __future__ import annotations

import numpy as np
import pytest

from ttapca.corruptions import STANDARD
from ttapca.corruptions.apply import corrupt_any_size, needs_photographs


@pytest.mark.parametrize("corruption", STANDARD)
def test_an_image_keeps_its_randomness_in_any_batch(corruption: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), np.uint8)
    whole = corrupt_any_size(images, corruption, 5, seed=3)
    rows = np.array([4, 1, 4])
    some = corrupt_any_size(images[rows], corruption, 5, seed=3, indices=rows)
    assert np.array_equal(some, whole[rows])


def test_only_frost_on_large_images_takes_photographs() -> None:
    large, grey = np.zeros((1, 63, 32, 3), np.uint8), np.zeros((1, 63, 32, 1), np.uint8)
    assert needs_photographs(large, "frost")
    assert not needs_photographs(large[:, :62], "frost")  # those that ship are large enough
    assert not needs_photographs(grey, "frost")
    assert not needs_photographs(large, "fog")
