"""The bytes of today, so that a change tomorrow is noticed.

`frozen.json` holds, for each corruption and severity, the means over blocks of 8 by 8 pixels of two
synthetic images with index 0 and 1 and seed 0. Means rather than a checksum of all bytes: another
processor or library version may round a value up where this one rounds down, which moves a mean by
hundredths, while any real change (another parameter, another order of draws) moves it by whole grey
levels.

To write the table anew after a change that is meant:
`TTAPCA_FREEZE=1 python -m pytest tests/corruptions/test_frozen.py`
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ttapca.corruptions import CORRUPTIONS, SEVERITIES, corrupt

TABLE = Path(__file__).with_name("frozen.json")


def block_means(images: np.ndarray) -> np.ndarray:
    blocks = images.reshape(2, 4, 8, 4, 8, 3).astype(float)
    return blocks.mean(axis=(2, 4))


def rounded(means: np.ndarray) -> list[float]:
    return np.round(means, 2).ravel().tolist()


@pytest.fixture(scope="module")
def frozen(images, textures) -> dict[str, list[float]]:
    if os.environ.get("TTAPCA_FREEZE"):
        table = {
            f"{name}_{severity}": rounded(
                block_means(corrupt(images[:2], name, severity, textures=textures))
            )
            for name in CORRUPTIONS
            for severity in SEVERITIES
        }
        lines = ",\n".join(f'"{name}": {values}' for name, values in table.items())
        TABLE.write_text(f"{{\n{lines}\n}}\n")
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_bytes_are_those_of_the_frozen_table(name, severity, images, textures, frozen):
    expected = np.array(frozen[f"{name}_{severity}"]).reshape(2, 4, 4, 3)
    before = images[:2].copy()
    corrupted = corrupt(images[:2], name, severity, textures=textures)
    assert (images[:2] == before).all()
    assert (corrupted != before).any()
    found = block_means(corrupted)
    assert np.abs(found - expected).max() < 0.5
    assert np.abs(found - expected).mean() < 0.05
