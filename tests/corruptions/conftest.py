"""Synthetic images and photographs, so that no test needs a download; and the reference, if any."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


def _wave(height: int, width: int, phase: float) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    waves = [
        np.sin(0.31 * x + 0.17 * y + phase),
        np.cos(0.11 * x - 0.23 * y + 2 * phase),
        np.sin(0.05 * x * (1 + phase) + 0.4 * y),
    ]
    return np.stack(waves, axis=-1)


def _images(count: int, height: int = 32, width: int = 32) -> np.ndarray:
    """Smooth colour waves that reach from black to white."""
    waves = np.stack([_wave(height, width, 0.37 * number) for number in range(count)])
    return np.clip(np.round(127.5 + 140.0 * waves), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def make_images() -> Callable[..., np.ndarray]:
    """A function of count, height and width."""
    return _images


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    return _images(12)


@pytest.fixture(scope="session")
def textures() -> tuple[np.ndarray, ...]:
    """Photographs that are none: as small as frost can be asked to use at a fifth of its size."""
    return tuple(_images(1, 200 + 10 * number, 260)[0] // (1 + number % 3) for number in range(6))


@pytest.fixture(scope="session")
def reference() -> dict[str, np.ndarray]:
    """The published generator's output for 200 images, by `<corruption>_<severity>`."""
    shared = Path(os.environ.get("TTAPCA_SHARED", Path(__file__).parents[2].parent / "shared"))
    path = shared / "data" / "cifar10c_reference" / "first200.npz"
    if not path.is_file():
        pytest.skip(f"reference material not found at {path}")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
