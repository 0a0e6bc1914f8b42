"""The networks that ship, and the script that makes one of a finished run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from scripts.pack_checkpoint import pack

from ttapca.cli.app import run
from ttapca.cli.arguments import cache_root
from ttapca.datasets import load as load_images
from ttapca.datasets import read_digits
from ttapca.errors import TrainingError
from ttapca.networks import evaluate, load, load_rotation, packaged
from ttapca.networks.runs import STATE, WEIGHTS
from ttapca.networks.weight_files import read_weights

CIFAR = cache_root() / "cifar-10-batches-bin"
TRAIN = "train digits small-cnn --epochs 2 --peak 0.1 --batch-size 64 --rotation-head conv2"


def test_a_run_is_packed_and_its_command_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*TRAIN.split(), "--to", str(tmp_path / "run")]) == 0
    test, packed = read_digits("test"), tmp_path / "weights" / "mine.safetensors"
    pack(tmp_path / "run", "mine", tmp_path / "weights", test)
    assert packed.stat().st_size < (tmp_path / "run" / STATE).stat().st_size / 2
    facts = json.loads(packed.with_suffix(".json").read_text())
    found = evaluate(load(packed), test).accuracy
    assert found == pytest.approx(facts["accuracy"], abs=0.01)
    assert load_rotation(packed).split == "conv2"
    card = packed.with_suffix(".md").read_text()
    for words in (facts["command"], "Intended use", "calibration", "epoch,learning_rate"):
        assert words in card
    words = shlex.split(facts["command"].replace("DIR", str(tmp_path / "again")))
    assert run(words[1:]) == 0
    capsys.readouterr()
    again, first = (read_weights(tmp_path / name / WEIGHTS).tensors for name in ("again", "run"))
    assert all(again[name].equal(first[name]) for name in first)


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"has done 0 epochs of none\. Run the same"):
        pack(tmp_path, "mine", tmp_path, read_digits("test"))


@pytest.mark.parametrize("name", list(packaged()))
def test_a_packaged_network_has_its_card_and_reaches_its_number(name: str) -> None:
    path = packaged()[name]
    facts = json.loads(path.with_suffix(".json").read_text())
    assert path.stat().st_size <= 3_000_000
    assert facts["command"] in path.with_suffix(".md").read_text()
    network = load(name)
    assert network.input_shape == tuple(facts["input_shape"])
    assert network.conv1.weight.shape[1:] == (facts["input_shape"][0], 3, 3)
    if facts["data"]["name"] == "digits":
        found = evaluate(network, read_digits("test")).accuracy
        assert found == pytest.approx(facts["accuracy"], abs=0.2)  # one image of 596: rounding


@pytest.mark.skipif(
    not CIFAR.is_dir(), reason="CIFAR-10 is not in the cache: ttapca data get cifar10"
)
@pytest.mark.parametrize("name", [name for name in packaged() if name.startswith("cifar10")])
def test_a_network_of_cifar_reaches_its_number(name: str) -> None:
    """On the first 1,000 images, within what a sample of them allows; the card is for all."""
    facts = json.loads(packaged()[name].with_suffix(".json").read_text())
    images = load_images("cifar10", root=cache_root())[:1000]
    assert evaluate(load(name), images).accuracy == pytest.approx(facts["accuracy"], abs=3)
