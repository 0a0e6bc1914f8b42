"""Files of weights: every wrapping is read, nothing is run, damage is told."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ttapca.errors import CheckpointError, OptionError
from ttapca.networks.weight_files import read_weights, write_weights

WEIGHTS = {"conv1.weight": torch.arange(4.0).reshape(2, 2), "fc.bias": torch.tensor([1.0, 2.0])}


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[k], WEIGHTS[k]) for k in found)


@pytest.mark.parametrize("suffix", [".pt", ".pth.tar"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model."])
def test_every_wrapping(suffix: str, wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"{prefix}{name}": value for name, value in WEIGHTS.items()}
    content = {wrapper: tensors, "epoch": 3, "best": 0.9} if wrapper else tensors
    for zipped in (True, False):
        torch.save(content, tmp_path / f"a{suffix}", _use_new_zipfile_serialization=zipped)
        assert same(read_weights(tmp_path / f"a{suffix}").tensors)
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
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
    with pytest.raises(OptionError, match="`classes` must be a whole number from 1"):
        write_weights(tmp_path / "b.safetensors", WEIGHTS, {"classes": 0})
    assert not (tmp_path / "b.safetensors").exists()


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


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_file_cut_short_or_of_another_kind(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pth")
    tensors = {"fc.weight": torch.rand(1000)}
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
    content = path.read_bytes()
    parts = [content[: int(kept * len(content))] for kept in (0.99, 0.6, 0.1, 0.0)]
    for damaged in (*parts, b"hello world", b"<html>404</html>", bytes(range(256)) * 4):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"not a whole .*cut short .*Copy or download"):
            read_weights(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "A checkpoint is a state dict.*holds no dict"),
        ({"epoch": 3}, r"holds the keys \['epoch'\].*model.state_dict"),
        ({"state_dict": {}}, "holds the keys"),
        (None, "there is none at"),
    ],
)
def test_no_weights_in_it(content: Any, message: str, tmp_path: Path) -> None:
    if content is not None:
        torch.save(content, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=message):
        read_weights(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "is missing, although ttapca wrote"),
        ({"description": "{"}, "is not JSON"),
        ({"description": '{"classes": "ten"}'}, "`classes` must be a whole number"),
        ({"description": '{"input_shape": [1, 1000000, 8]}'}, r"`input_shape\[1\]` must be"),
        ({"description": '{"input_shape": [3, 16000, 16000]}'}, "at most 16,777,216 numbers"),
        ({"description": '{"normalisation": {"mean": [0], "std": [0]}}'}, r"`normalisation.std\[0"),
        ({"description": '{"own": ' + "[" * 20 + "]" * 20 + "}"}, "not nested too deep"),
    ],
)
def test_a_description_that_was_altered(
    words: dict[str, str], message: str, tmp_path: Path
) -> None:
    words = {"format": "ttapca.weights", **words}
    safetensors.torch.save_file(WEIGHTS, tmp_path / "a.safetensors", words)
    with pytest.raises(CheckpointError, match=f"(?s)a.safetensors.*{message}"):
        read_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([0.0, torch.nan]), "finite numbers; `fc.bias`"),
        (torch.tensor([complex(0, torch.inf)]), "finite numbers; `fc.bias`"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "dense tensors of common types"),
    ],
)
def test_tensors_that_are_no_weights(
    suffix: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".pth":
        torch.save({"fc.bias": tensor}, path)
    else:
        safetensors.torch.save_file({"fc.bias": tensor}, path)
    with pytest.raises(CheckpointError, match=message):
        read_weights(path)


def rewrite(path: Path, old: bytes, new: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Change what a zip's pickle says; the archive itself is right."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            assert not name.endswith("data.pkl") or old in content
            archive.writestr(name, content.replace(old, new) if name[-3:] == "pkl" else content)


HUGE = b"\x8a\x05" + (2**33).to_bytes(5, "little")  # LONG1
LIES = {
    "a storage larger than its record": (b"K\x07t", HUGE + b"t"),
    "a storage of negative size": (b"K\x07t", b"J\xff\xff\xff\xfft"),
    "a tensor larger than its storage": (b"K\x07\x85", HUGE + b"\x85"),
    "a stride that leads outside": (b"K\x01\x85", b"K\x09\x85"),
    "a repetition of one number": (b"K\x07\x85q\x08K\x01", HUGE + b"\x85q\x08K\x00"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_checkpoint_that_lies_about_sizes(lie: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.arange(7.0)}, path)
    assert read_weights(path).tensors["a"].tolist() == list(range(7))
    rewrite(path, *LIES[lie])
    with pytest.raises(CheckpointError, match=r"a\.pth (is not a whole|holds more than tensors)"):
        read_weights(path)


def test_other_files_that_lie_about_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.arange(7.0)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    assert b"K\x07N" in content
    path.write_bytes(content.replace(b"K\x07N", HUGE + b"N"))
    with pytest.raises(CheckpointError, match=r"a\.pth is not a whole"):
        read_weights(path)
    torch.save({"a": torch.zeros(100_000)}, path)
    rewrite(path, b"", b"", zipfile.ZIP_DEFLATED)  # it unpacks to more
    with pytest.raises(CheckpointError, match=r"a\.pth is not a whole"):
        read_weights(path)


def test_tensors_that_share_a_storage_are_read(tmp_path: Path) -> None:
    tied = torch.arange(12.0).reshape(3, 4)
    state = {"a": tied, "b": tied, "c": tied.T, "d": tied[1:, ::2], "e": nn.Parameter(tied)}
    for zipped in (True, False):
        torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        found = read_weights(tmp_path / "a.pth").tensors
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_what_a_training_checkpoint_holds_beside_weights(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.9, 0.99))
    network(torch.zeros(3, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    content = {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "args": {"size": torch.Size([3, 4]), "dtype": torch.float16, "seed": 2**63, "big": 10**30},
        "device": torch.device("cpu"),
        "history": [(1, 0.5, None), (2, 0.25, True)],
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        found = read_weights(tmp_path / "a.pth").tensors
        assert {name: tuple(t.shape) for name, t in found.items()} == {
            name: tuple(t.shape) for name, t in network.state_dict().items()
        }
