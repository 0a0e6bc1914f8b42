"""Options that would change nothing are refused, and so are those that are given twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ttapca.corruptions.small_images import corrupt_any_size
from ttapca.datasets import read_digits


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
