"""Training runs in a folder: what they deliver, kills, damage, and folders of another run."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttapca.datasets import read_digits
from ttapca.errors import CheckpointError, OptionError, StorageError, TrainingError
from ttapca.networks import (
    TrainingOptions,
    add_rotation_head,
    build,
    evaluate,
    load,
    load_rotation,
    train,
)
from ttapca.networks.runs import LOG, STATE, WEIGHTS, read_history
from ttapca.networks.weight_files import read_safetensors, read_weights, write_safetensors
from ttapca.support.disk import locked

OPTIONS = TrainingOptions(epochs=3, batch_size=64, peak=0.1, padding=1, flip=False, average=0.9)
DESCRIPTION = {
    "architecture": "small-cnn",
    "input_shape": [1, 8, 8],
    "normalisation": {"mean": [0.0], "std": [1.0]},
}
DIGITS, TEST = read_digits("train"), read_digits("test")


def network() -> nn.Module:
    return build("small-cnn", input_shape=(1, 8, 8))


def run(folder: Path, options: TrainingOptions = OPTIONS, **changes: Any) -> None:
    told = {"network": network(), "description": DESCRIPTION, **changes}
    train(told.pop("network"), DIGITS, TEST, options, folder, **told)


def log(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / LOG).read_text().splitlines()))


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_delivers_what_it_measured(tmp_path: Path) -> None:
    twofold = add_rotation_head(network(), "conv2", torch.Generator().manual_seed(0), (1, 8, 8))
    described = {**DESCRIPTION, "rotation_split": "conv2"}
    run(tmp_path, network=twofold, description=described)
    rows = log(tmp_path)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert 0 < float(rows[-1]["rotation_accuracy"]) <= 100
    delivered = evaluate(load(tmp_path / WEIGHTS), TEST)
    assert delivered.accuracy == pytest.approx(float(rows[-1]["test_accuracy"]), abs=1e-3)
    description = read_weights(tmp_path / WEIGHTS).description
    assert description["training"]["finished_epochs"] == 3
    assert description["test_accuracy"] == pytest.approx(delivered.accuracy)
    assert load_rotation(tmp_path / WEIGHTS).split == "conv2"


# Kills itself before a step of that number, if it is not 0.
PROGRAM = """
import os, signal, sys
from ttapca.cli import main
from ttapca.networks import training
last, augment, steps = int(sys.argv.pop(1)), training.augment, []
def step(*given):
    steps.append(given)
    if len(steps) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(*given)
training.augment = step
main()
"""


def run_program(folder: Path, last: int = 0) -> subprocess.CompletedProcess[str]:
    """Train with a hundred steps in each epoch."""
    words = f"train digits small-cnn --epochs 4 --batch-size 12 --average 0.99 --to {folder}"
    command = [sys.executable, "-c", PROGRAM, str(last), *words.split()]
    command += ["--rotation-head", "conv2", "--cutout", "2"]
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_program(whole).returncode == 0
    for done in (1, 2):  # twice: a resumed run can be killed as well
        process = run_program(killed, last=150)
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert len(read_history(killed)) == done
    (killed / f".{STATE}.ttapca-unfinished-").write_bytes(b"what a kill while writing leaves")
    assert f"going on after epoch {done} of 4" in run_program(killed).stderr
    assert equal(*(read_safetensors(folder / WEIGHTS)[0] for folder in (whole, killed)))
    assert equal(*(read_safetensors(folder / STATE)[0] for folder in (whole, killed)))
    for one, two in zip(log(whole), log(killed), strict=True):
        assert {**one, "seconds": ""} == {**two, "seconds": ""}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / STATE).stat().st_mtime_ns
    (tmp_path / LOG).unlink()  # as if killed between the state and the rest
    (tmp_path / WEIGHTS).unlink()
    run(tmp_path)
    assert (tmp_path / STATE).stat().st_mtime_ns == before
    assert (tmp_path / LOG).exists()
    assert load(tmp_path / WEIGHTS).classes == 10


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first epoch."""

    def stop(record: object) -> None:
        raise KeyboardInterrupt("enough")

    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(KeyboardInterrupt, match="enough"):
        run(folder, on_epoch=stop)
    return folder


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"description": None}, OptionError, "a run with architecture='small-cnn'; found None"),
        ({"description": {"input_shape": [8, 8]}}, OptionError, "`input_shape` must be a list"),
        ({"network": build("wrn-10-1", input_shape=(1, 8, 8))}, TrainingError, "not of this net"),
        (
            {"options": dataclasses.replace(OPTIONS, epochs=5)},
            OptionError,
            "holds a run with epochs=3; found 5. Give the same",
        ),
    ],
)
def test_a_folder_with_another_run(
    half_done: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = (half_done / STATE).read_bytes()
    with pytest.raises(error, match=message):
        run(half_done, **changes)
    assert (half_done / STATE).read_bytes() == before


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StorageError, match=r"One process at a time"):
        run(tmp_path)


def test_a_damaged_state(half_done: Path, tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes((half_done / STATE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut short"):
        run(tmp_path)
    write_safetensors(tmp_path / STATE, {"a": torch.zeros(1)})
    with pytest.raises(TrainingError, match=r"not the state of a training run"):
        run(tmp_path)


def filled(value: float) -> Any:
    return lambda tensor: torch.full_like(tensor, value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("network/bn1.running_var", filled(torch.inf), "not finite"),
        ("momentum/fc.weight", filled(torch.nan), "not finite"),
        ("network/fc.weight", lambda t: t.half(), "another shape or type"),
        ("torch_generator", lambda t: t[:5], "another shape or type"),
        ("average/fc.weight", lambda t: None, "is missing"),
        ("momentum/unknown", lambda t: torch.zeros(3), "unknown"),
        ("generator", filled(255), "`generator` is no state"),
    ],
)
def test_a_state_that_does_not_fit(
    half_done: Path, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    changed = change(tensors.pop(name, None))
    tensors |= {} if changed is None else {name: changed}
    write_safetensors(tmp_path / STATE, tensors, words)
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match=f"state.safetensors: .*{message}"):
        run(tmp_path, network=model)
    assert equal(before, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("change", "record", "message"),
    [
        ({"history": []}, {}, "`history` must be a list of 1"),
        ({"more": 1}, {}, "no names but options, description, history"),
        ({}, {"epoch": 7}, "the epochs from 1 on"),
        ({}, {"loss": float("nan")}, "not finite"),
    ],
)
def test_a_log_that_makes_no_sense(
    half_done: Path, tmp_path: Path, change: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    facts = json.loads(words["facts"])
    facts["history"][0] |= record
    words["facts"] = json.dumps({**facts, **change})
    write_safetensors(tmp_path / STATE, tensors, words)
    with pytest.raises(CheckpointError, match=f"state.safetensors.*{message}"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match=f"state.safetensors.*{message}"):
        read_history(tmp_path)
