"""`ttapca fit` on images in many files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ttapca
from fitting.parted import ShuffledEngine, assert_same
from ttapca.datasets import load

FIT = "fit digits --layer conv1 --components 30 --to"


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits of the training set in this folder, as three arrays."""
    monkeypatch.chdir(tmp_path)
    pixels = load("digits", "train").images
    for number, some in enumerate(np.array_split(pixels, 3)):
        np.save(f"part-{number}.npy", some)


def test_shards_give_the_filter_of_the_data_set(
    shards: None, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(f"{FIT} whole --data digits --order stored --dtype float64")
    facts = json.loads(command(f"{FIT} f --data part-*.npy --dtype float64 --json").out)
    assert facts["chosen"] == "all 1,201 images of 3 shards, in stored order"
    engine = ShuffledEngine(workers=2)
    monkeypatch.setattr("ttapca.engines.engine_of", lambda words: engine)
    said = command(f"{FIT} g --data part-{{0..2}}.npy --dtype float64 --jobs 2")
    assert "1,201 samples in 3 parts, read by 2 workers" in said.err
    assert engine.done == 3
    for name in ("f", "g"):
        assert_same(ttapca.load(name), ttapca.load("whole"), 1e-6)  # the network has float32
