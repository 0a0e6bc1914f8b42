"""scripts/sound.py: its spectrograms, the weights that ship, and their clean error."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import signal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "sound.py"))


def test_mel_powers_are_triangles_over_a_periodogram(script):
    windows = np.random.default_rng(0).normal(size=(3, script["window"](5)))
    found = script["mel_power"](windows)
    assert found.shape == (3, 40, 5)
    hann = signal.get_window("hann", 256)
    _, _, power = signal.spectrogram(
        windows, 8000, hann, nperseg=256, noverlap=128, nfft=512, detrend=False, mode="complex"
    )
    density = 8000 * np.abs(power) ** 2  # scipy gives a density in 1 / Hz
    np.testing.assert_allclose(found, script["mel_filters"]() @ density, rtol=1e-9)


def test_white_noise_has_its_variance_in_every_band(script):
    noise = 0.1 * np.random.default_rng(0).normal(size=(40, script["window"]()))
    power = script["mel_power"](noise).mean((0, 2))
    assert power == pytest.approx(np.full(40, 0.01), rel=0.1)


@pytest.mark.parametrize("frames", [40, 64, 100])
@pytest.mark.parametrize("name", ["fixed", "own", "fixed-without", "own-without"])
def test_weights_ship_and_take_any_number_of_frames(script, name, frames):
    path = script["WEIGHTS"] / f"spoken-digits-{name}.safetensors"
    assert path.stat().st_size < 1_000_000
    model, scale = script["load"](path)
    noise = np.random.default_rng(0).normal(size=(2, script["window"](frames)))
    images = script["log_mel"](noise, name.split("-")[0], scale)
    assert images.shape == (2, 1, 40, frames)
    with torch.inference_mode():
        assert model(images).shape == (2, 10)


@pytest.mark.parametrize("name", ["fixed", "own"])
def test_clean_test_recordings_are_understood(script, name):
    shared = Path(os.environ.get("TTAPCA_SHARED", ROOT.parent / "shared"))
    path = shared / "data" / "audio" / "spoken_digits.npz"
    if not path.is_file():
        pytest.skip(f"recordings not found at {path}")
    training, test = script["read"](path)
    assert (len(training), len(test)) == (2700, 300)
    model, scale = script["load"](script["WEIGHTS"] / f"spoken-digits-{name}.safetensors")
    images = script["log_mel"](test.windows, name, scale)
    assert script["error_of"](model, images, test.labels) <= 1.0
