"""`ttapca train` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from scripts.pack_checkpoint import command_of

from ttapca.networks import build, runs
from ttapca.networks.runs import WEIGHTS
from ttapca.networks.weight_files import read_weights

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")


def test_ones_own_network_in_every_command(command) -> None:
    words = "train digits --model own:flat --epochs 2 --peak 0.05 --no-flip --json --to run"
    accuracy = json.loads(command(words).out)["test_accuracy"]
    own, weights = "own:flat", f"run/{WEIGHTS}"
    facts = json.loads(command(f"eval {own} --weights {weights} --data digits --json").out)
    assert facts["accuracy"] == pytest.approx(accuracy)
    told = command(f"fit --model {own} --weights {weights} --data digits --components 8 --to f").out
    assert "`1`, folded: 8 components" in told
    told = command(f"eval {weights} --data digits", 1).err
    assert f"Name the network's factory: --model {own} --weights" in told


def test_events_are_written_where_tensorboard_is_there(
    monkeypatch: pytest.MonkeyPatch, command
) -> None:
    """With a stand-in for the writer: tensorboard itself is not installed for the tests."""
    writer = MagicMock()
    stand_in = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    words = "train digits small-cnn --epochs 1 --to run --json"
    accuracy = json.loads(command(words).out)["test_accuracy"]
    writer.assert_called_once_with("run/tensorboard")
    written = [call.args for call in writer.return_value.__enter__().add_scalar.call_args_list]
    assert ("test_accuracy", accuracy, 1) in written
    assert "rotation_accuracy" not in {name for name, *_ in written}
    writer.return_value.__exit__.assert_called_once()


def test_a_training_may_begin_with_other_weights(digits: Path, command) -> None:
    """Steps of almost nothing leave the weights where they began, and the normalisation too."""
    words = "train digits small-cnn --epochs 1 --peak 1e-9 --no-flip --start"
    command(f"{words} {digits} --to run")
    before, after = (read_weights(path) for path in (digits, Path("run") / WEIGHTS))
    assert after.description["start"] == str(digits)
    assert after.description["normalisation"] == before.description["normalisation"]
    for name, value in build("small-cnn", input_shape=(1, 8, 8)).named_parameters():
        torch.testing.assert_close(after.tensors[name], before.tensors[name].float())
        assert not torch.equal(after.tensors[name], value)
    assert command_of(after.description).endswith(f"--normalise none --start {digits} --to DIR")
    assert "start=" in command(f"{words} digits-small-cnn-rotation --to run", 2).err


def test_ctrl_c_says_how_to_continue(monkeypatch: pytest.MonkeyPatch, command) -> None:
    monkeypatch.setattr(runs, "train", MagicMock(side_effect=KeyboardInterrupt))
    error = command("train digits small-cnn --to run", 130).err
    assert "train: stopped; the same command goes on after the last whole epoch\n" in error
    assert error.endswith("interrupted\n")


def test_folders_of_pictures(place: Path, pictures, command) -> None:
    for split in ("train", "test"):
        pictures(place / "both" / split, each=20, side=12)
    words = "train both/train wrn-10-1 --size 8 --batch-size 10 --epochs 2 --to run"
    assert "no test split, so accuracy is that of the training" in command(words).err
    weights = f"run/{WEIGHTS}"
    facts = json.loads(command(f"eval {weights} --data both --size 8 --json").out)
    assert facts["images"] == 2 * 20
    told = command(f"eval {weights} --data both", 1).err
    assert "images of shape 3x8x8; found 3x12x12. Resize" in told
    pictures(place / "one" / "test", each=20, side=12)
    told = command(f"fit {weights} --data one --size 8 --to f", 2).err
    assert "The train split must be in" in told
