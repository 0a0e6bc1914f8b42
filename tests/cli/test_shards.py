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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data part-*.npy --limit 10", "--limit is for data that are read as a whole"),
        ("--data part-*.npy --order sorted", "--order is for data that are read as a whole"),
        ("--data part-*.npy --seed 1", "--seed is for data that are read as a whole"),
        ("--data part-*.npy --in .", "--in is for data that are read as a whole"),
        ("--data part-*.npy --size 8", "--size N is for pictures in folders and tar files"),
        ("--data part-{0..5}.npy", "Shards must exist; there is no part-3.npy"),
        ("--data digits --jobs 2", "--jobs and --engine read shards, such as --data"),
        ("--data digits --jobs 2 --engine joblib:2", "--jobs N, for processes of this machine, or"),
        (
            "--data part-*.npy --jobs 2 --route gram",
            "Leave out --jobs and --engine, fit at a layer",
        ),
    ],
)
def test_what_makes_no_sense(shards: None, words: str, message: str, command: Any) -> None:
    assert message in command(f"{FIT} f {words}", 2).err
