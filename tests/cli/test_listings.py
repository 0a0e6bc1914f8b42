"""`ttapca layers` and `ttapca methods` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ttapca

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")


def test_layers(digits: Path, command) -> None:
    text = command("layers resnet20").out
    row = next(line for line in text.splitlines() if line.startswith("conv1 "))
    costs = ["conv1", "Conv2d", "16x32x32", "16,384", "yes", "3,072", "0.0", "1.0"]
    assert row.split() == costs
    text = command("layers resnet20 --components 2000").out
    row = next(line for line in text.splitlines() if line.startswith("conv1 "))
    assert row.split()[5:] == ["2,000", "49.2", "30.1"]
    assert "272,474 parameters, 40.8 million multiply-adds for an image of 3x32x32" in text
    assert text.endswith("Recommended: conv1\n")
    facts = json.loads(command(f"layers {digits} --components 10 --json").out)
    assert facts["recommended"] == "conv1"
    assert [layer["name"] for layer in facts["layers"]][:3] == ["normalise", "conv1", "bn1"]
    assert facts["layers"][1]["components"] == 10
    for words in ("own:flat", "--model own:flat"):
        said = command(f"layers {words} --input 1x8x8")
        assert said.out.endswith("Recommended: 1\n")
        assert said.err == ""  # weights do not matter here
    assert "none can carry a filter" in command("layers torch.nn:Identity --input 4").out


def test_methods(monkeypatch: pytest.MonkeyPatch, command) -> None:
    rows = {row["name"]: row for row in json.loads(command("methods --json").out)}
    assert list(rows) == list(ttapca.METHODS)
    assert {"alpha", "prior"} <= rows["bn"]["options"].keys()
    assert rows["ttapca-relu"]["needs"] == "source data, unlabelled"
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("methods").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith(" ")] == list(ttapca.METHODS)
