"""Files of weights: every wrapping is read, nothing is run, damage is told."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ttapca.errors import CheckpointError
from ttapca.models.weight_files import read_weights, write_weights

WEIGHTS = {"conv1.weight": torch.arange(4.0).reshape(2, 2), "fc.bias": torch.tensor([1.0, 2.0])}


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[k], WEIGHTS[k]) for k in found)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pth.tar"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model."])
def test_every_wrapping(suffix: str, wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"{prefix}{name}": value for name, value in WEIGHTS.items()}
    content = {wrapper: tensors, "epoch": 3, "best": 0.9} if wrapper else tensors
    torch.save(content, tmp_path / f"a{suffix}")
    assert same(read_weights(tmp_path / f"a{suffix}").tensors)


def test_the_format_before_zip(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same(read_weights(tmp_path / "old.pth").tensors)


def test_safetensors_of_others(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {f"module.{k}": v for k, v in WEIGHTS.items()}, tmp_path / "a.safetensors"
    )
    found = read_weights(tmp_path / "a.safetensors")
    assert same(found.tensors)
    assert found.description == {}


def test_our_own_files_describe_themselves(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.safetensors"
    write_weights(path, WEIGHTS, {"architecture": "resnet20", "mean": [0.5]})
    found = read_weights(path)
    assert same(found.tensors)
    assert found.description == {"architecture": "resnet20", "mean": [0.5]}
    assert [entry.name for entry in path.parent.iterdir()] == ["a.safetensors"]


class Hostile:
    """What a pickle could do: run a command when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_runs_nothing(zipped: bool, tmp_path: Path) -> None:
    path, mark = tmp_path / "a.pth", tmp_path / "mark"
    content = {"state_dict": WEIGHTS, "extra": Hostile(mark)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"asks for `posix.system`.*run code.*refused"):
        read_weights(path)
    assert not mark.exists()


def test_the_conversion_that_is_offered_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {
        "options": {"net": WEIGHTS, "options": argparse.Namespace(epochs=3)},
        "a whole module": nn.Linear(2, 3),
    }
    monkeypatch.chdir(tmp_path)
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pth")
        with pytest.raises(CheckpointError, match=r"convert it once:\n") as caught:
            read_weights(tmp_path / f"{name}.pth")
        command = str(caught.value).partition("convert it once:\n")[2]
        words = [sys.executable, *shlex.split(command)[1:]]
        subprocess.run(words, check=True, capture_output=True)
        found = read_weights(tmp_path / "weights.pth").tensors
        assert same(found) if name == "options" else found["weight"].shape == (3, 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "content",
    [b"hello world", b"<html><body>404 not found</body></html>", bytes(range(256)) * 4],
    ids=["text", "page", "bytes"],
)
def test_a_file_of_another_kind(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cut short or is of another kind"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("kept", [0.99, 0.6, 0.1, 0.0])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_file_cut_short(kind: str, kept: float, tmp_path: Path) -> None:
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pth")
    tensors = {"fc.weight": torch.rand(1000)}
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"not a whole .*cut short .*Copy or download"):
        read_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "A checkpoint is a state dict.*holds no dict"),
        ({"epoch": 3}, r"holds the keys \['epoch'\].*model.state_dict"),
        ({"state_dict": {}}, "holds the keys"),
    ],
)
def test_no_weights_in_it(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=message):
        read_weights(tmp_path / "a.pth")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is none at"):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"format": "ttapca.weights"}, "says that ttapca wrote it, but not what"),
        ({"format": "ttapca.weights", "description": "{"}, "but not what"),
        ({"format": "ttapca.weights", "description": "[]"}, "must be an object"),
    ],
)
def test_a_description_that_was_altered(
    words: dict[str, str], message: str, tmp_path: Path
) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "a.safetensors", words)
    with pytest.raises(CheckpointError, match=message):
        read_weights(tmp_path / "a.safetensors")
