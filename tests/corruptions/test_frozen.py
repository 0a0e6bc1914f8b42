"""The bytes of today, so that a change tomorrow is noticed.

`frozen.json` holds, for each corruption and severity, the means over blocks of 8 by 8 pixels of two
synthetic images with index 0 and 1 and seed 0; `frozen_imagenet_c.json` those over blocks of 25 by
25 pixels of one larger image, with the severities of ImageNet-C. Means rather than a checksum of
all bytes: another processor or library version may round a value up where this one rounds down,
which moves a mean by hundredths, while any real change (another parameter, another order of draws)
moves it by whole grey levels.

To write the tables anew after a change that is meant:
`TTAPCA_FREEZE=1 python -m pytest tests/corruptions/test_frozen.py`
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ttapca.corruptions import CIFAR_C, CORRUPTIONS, IMAGENET_C, SEVERITIES, corrupt

HERE = Path(__file__).parent
BLOCKS = 4  # down and across


def block_means(images: np.ndarray) -> np.ndarray:
    count, height, width, _ = images.shape
    shape = (count, BLOCKS, height // BLOCKS, BLOCKS, width // BLOCKS, 3)
    return images.reshape(shape).astype(float).mean(axis=(2, 4))


def rounded(means: np.ndarray) -> list[float]:
    return np.round(means, 2).ravel().tolist()


def frozen(path: Path, images: np.ndarray, textures: tuple[np.ndarray, ...]) -> dict:
    if os.environ.get("TTAPCA_FREEZE"):
        table = {
            f"{name}_{severity}": rounded(
                block_means(corrupt(images, name, severity, textures=textures))
            )
            for name in CORRUPTIONS
            for severity in SEVERITIES
        }
        lines = ",\n".join(f'"{name}": {values}' for name, values in table.items())
        path.write_text(f"{{\n{lines}\n}}\n")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def cases(images, make_images, textures) -> dict[str, tuple[np.ndarray, dict]]:
    """By the name of a table: images that get it by default, and what becomes of them."""
    small, large = images[:2], make_images(1, 100, 100)
    return {
        CIFAR_C: (small, frozen(HERE / "frozen.json", small, textures)),
        IMAGENET_C: (large, frozen(HERE / "frozen_imagenet_c.json", large, textures)),
    }


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("table", [CIFAR_C, IMAGENET_C])
def test_bytes_are_those_of_the_frozen_table(table, name, severity, cases, textures):
    images, expected_means = cases[table]
    expected = np.array(expected_means[f"{name}_{severity}"]).reshape(-1, BLOCKS, BLOCKS, 3)
    before = images.copy()
    corrupted = corrupt(images, name, severity, textures=textures)
    assert (images == before).all()
    assert (corrupted != before).any()
    found = block_means(corrupted)
    assert np.abs(found - expected).max() < 0.5
    assert np.abs(found - expected).mean() < 0.05
