"""Against the published generator's own output for the first 200 images of CIFAR-10.

Where chance plays no part, pixels are compared. Where it does, the reference is one draw of many:
its statistics must lie among those of ours. The rule is 5 %, widened to what one draw of 200 images
can miss by chance: four times the deviation between our own draws. A mean near 0 has no meaningful
percentage: a tenth of a grey level is always allowed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ttapca.corruptions import CORRUPTIONS, corrupt, load_table
from ttapca.corruptions.blur import blur_along
from ttapca.datasets import fetch_frost
from ttapca.errors import TtapcaError

WITHOUT_CHANCE = (
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "saturate"),
    *("pixelate", "jpeg_compression"),
)
WITH_CHANCE = sorted(set(CORRUPTIONS) - set(WITHOUT_CHANCE))
BANDS = ((0.5, 4.0), (4.0, 8.0), (8.0, 12.0), (12.0, 32.0))  # cycles an image
SEEDS = range(10)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """The real photographs, which need pip's network."""
    try:
        return fetch_frost(tmp_path_factory.mktemp("data"))
    except TtapcaError as error:
        pytest.skip(f"frost's photographs are out of reach: {error}")


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", WITHOUT_CHANCE)
def test_pixels_are_the_references(name, severity, reference):
    found = corrupt(reference["clean"], name, severity).astype(int)
    difference = np.abs(found - reference[f"{name}_{severity}"])
    assert (difference <= 1).mean() >= 0.995


@pytest.mark.parametrize("severity", [1, 5])
def test_motion_blur_is_the_references_at_some_angle(severity, reference):
    """The reference's angles are unknown; among many there must be one that fits each image."""
    parameters = load_table().parameters("motion_blur", severity)
    clean, expected = reference["clean"][:40], reference[f"motion_blur_{severity}"][:40].astype(int)
    best = np.zeros(len(clean))
    for angle in np.arange(-45.0, 45.0, 0.25):
        found = blur_along(
            clean,
            np.full(len(clean), angle),
            radius=parameters["radius"],
            deviation=parameters["deviation"],
        )
        near = (np.abs(found.astype(int) - expected) <= 1).mean(axis=(1, 2, 3))
        best = np.maximum(best, near)
    assert best.min() >= 0.995


def statistics(spoilt: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """Mean and deviation of what was added, and its root mean square in each frequency band."""
    added = spoilt.astype(float) - clean
    power = (np.abs(np.fft.fft2(added, axes=(1, 2))) ** 2).mean(axis=(0, 3)) / added[0, ..., 0].size
    frequencies = np.fft.fftfreq(32) * 32
    radius = np.hypot(frequencies[:, None], frequencies[None, :])
    bands = [np.sqrt(power[(low <= radius) & (radius < high)].mean()) for low, high in BANDS]
    return np.array([added.mean(), added.std(), *bands])


def assert_among(found: list[np.ndarray], expected: np.ndarray) -> None:
    centre, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
    allowed = np.maximum(0.05 * np.abs(expected), 4.0 * spread)
    allowed[0] = max(allowed[0], 0.1)
    assert (np.abs(centre - expected) <= allowed).all(), (centre, expected, spread)
    # The deviation over all pixels is what 200 images determine well: no widening there.
    assert np.abs(centre[1] / expected[1] - 1) <= 0.05


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", WITH_CHANCE)
def test_statistics_are_the_references(name, severity, reference, request):
    clean = reference["clean"]
    textures = request.getfixturevalue("photographs") if name == "frost" else None
    found = [
        statistics(corrupt(clean, name, severity, seed, textures=textures), clean) for seed in SEEDS
    ]
    assert_among(found, statistics(reference[f"{name}_{severity}"], clean))
