"""Options that would change nothing are refused, and so are those that are given twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import read_digits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench digits --methods bn --components 5", "--components would .* methods has a filter"),
        ("bench digits --methods bn --steps 5", "--steps would have no effect: no method learns"),
        ("bench digits --methods bn --lr 5", "--lr would have no effect: no method learns"),
        ("bench digits --methods tent --lr 5 --option tent.lr=1", "--lr would .* its own, tent.lr"),
        ("bench digits --corrupted c --corruption-seed 5", "--corruption-seed would .* from c\\."),
        ("bench digits --dry-run --json", "--json would have no effect: a dry run measures nothi"),
        ("tune digits bn --option prior=0,16 --components 5", "--components would have no effect"),
        ("train digits small-cnn --to f --warmup 3", "--warmup would .* for --schedule cosine"),
        ("train digits small-cnn --to f --rotation 5", "--rotation would .* --rotation-head LAYER"),
        ("figure r.sqlite --to x.svg", "--to FILE is for one figure; found no NAME"),
    ],
)
def test_an_option_without_effect_is_refused(words: str, said: str, place: Path, command) -> None:
    before = sorted(place.iterdir())
    told = command(words, 2)
    assert re.search(said, told.err), told.err
    assert told.out == ""
    assert sorted(place.iterdir()) == before


def test_a_plan_may_say_more_than_the_methods_that_are_left_of_it_take(command) -> None:
    Path("plan.toml").write_text(
        'model = "digits"\nmethods = ["source", "tent", "wiener"]\ncomponents = [20]\n'
        'steps = [2]\nlr = 0.01\ncorruptions = ["fog"]\nsettings = ["online"]\n'
        'corrupted = "folder"\ncorruption_seed = 5\n'
    )
    words = "bench --plan plan.toml --dry-run --methods"
    assert command(f"{words} source").out == "fog 5  online  source\n"
    assert command(f"{words} source,tent --lr 0.1").err == "2 measurements, 1,192 images\n"
    assert "--components would have no effect" in command(f"{words} source --components 9", 2).err


def test_the_command_of_a_row_is_not_refused_for_what_its_plan_said_too_much(command) -> None:
    digits = read_digits()
    Path("folder").mkdir()
    np.save("folder/fog.npy", np.tile(corrupt_any_size(digits.images, "fog", 5), (5, 1, 1, 1)))
    np.save("folder/labels.npy", np.tile(digits.labels, 5))
    Path("plan.toml").write_text(
        'model = "digits"\nmethods = ["bn"]\ncorruptions = ["fog"]\nsettings = ["online"]\n'
        'corrupted = "folder"\ncorruption_seed = 5\n'
    )
    [row] = json.loads(command("bench --plan plan.toml --json").out)
    again = row["command"].removeprefix("ttapca ").replace("results.sqlite", "again.sqlite")
    [repeated] = json.loads(command(f"{again} --json").out)
    assert repeated["entropy_stream"] == row["entropy_stream"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("bench digits --option tent.lr=1 --option tent.lr=2", "tent.lr"),
        ("tune digits tent --option lr=1,2 --option steps=1 --option lr=3", "lr"),
        ("eval digits --data digits --method tent --option lr=1 --option lr=2", "lr"),
        ("eval digits --data digits --method tent --lr 1 --option lr=2", "lr"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(words: str, name: str, command) -> None:
    assert f"`{name}` is given twice; the first of the two would be lost." in command(words, 2).err
    assert list(Path().glob("*.sqlite*")) == []
