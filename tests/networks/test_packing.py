"""A finished run becomes a network that ships, and its card tells the truth."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ttapca.cli.app import run
from ttapca.datasets import load as load_images
from ttapca.datasets import read_digits
from ttapca.errors import TrainingError
from ttapca.networks import evaluate, load, load_rotation, packaged
from ttapca.networks.packing import pack
from ttapca.networks.runs import STATE, read_history
from ttapca.networks.weight_files import read_weights

TRAIN = "train digits small-cnn --epochs 3 --peak 0.1 --batch-size 64 --rotation-head conv2"

OF_CIFAR = ("cifar10-resnet20", "cifar10-wrn10-rotation")
OF_DIGITS = ("digits-small-cnn", "digits-small-cnn-rotation")
PACKAGED = (*OF_CIFAR, *OF_DIGITS)


def test_a_run_is_packed_and_its_command_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*TRAIN.split(), "--to", str(tmp_path / "run")]) == 0
    test = read_digits("test")
    packed = pack(tmp_path / "run", "mine", tmp_path / "weights", test)
    assert packed.weights.stat().st_size < (tmp_path / "run" / STATE).stat().st_size / 2
    facts = json.loads(packed.facts.read_text())
    assert evaluate(load(packed.weights), test).accuracy == pytest.approx(
        facts["accuracy"], abs=0.01
    )
    assert load_rotation(packed.weights).split == "conv2"
    card = packed.card.read_text()
    for words in (facts["command"], "seed", "Intended use", "calibration", "epoch,learning_rate"):
        assert words in card
    words = shlex.split(facts["command"].replace("DIR", str(tmp_path / "again")))
    assert run(words[1:]) == 0
    capsys.readouterr()
    again = read_weights(tmp_path / "again" / "weights.safetensors").tensors
    first = read_weights(tmp_path / "run" / "weights.safetensors").tensors
    assert all(again[name].equal(first[name]) for name in first)


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"has done 0 epochs of none\. Run the same"):
        pack(tmp_path, "mine", tmp_path, read_digits("test"))
    assert read_history(tmp_path) == []


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_network_has_its_card(name: str) -> None:
    path = packaged()[name]
    facts = json.loads(path.with_suffix(".json").read_text())
    assert path.stat().st_size <= 3_000_000
    assert facts["accuracy"] >= (80 if "rotation" in name else 90)
    assert facts["command"] in path.with_suffix(".md").read_text()
    network = load(name)
    assert network.input_shape == tuple(facts["input_shape"])
    assert network.conv1.weight.shape == (16, facts["input_shape"][0], 3, 3)


@pytest.mark.parametrize("name", OF_DIGITS)
def test_a_network_of_the_digits_reaches_its_cards_number(name: str) -> None:
    facts = json.loads(packaged()[name].with_suffix(".json").read_text())
    found = evaluate(load(name), read_digits("test")).accuracy
    assert found == pytest.approx(facts["accuracy"], abs=0.2)  # one image of 596: rounding


@pytest.mark.parametrize("name", OF_CIFAR)
def test_a_packaged_network_reaches_its_cards_number(name: str) -> None:
    """On the first 1,000 images, within what a sample of them allows; the card is for all."""
    from ttapca.cli.arguments import cache_root

    if not (cache_root() / "cifar-10-batches-bin").is_dir():
        pytest.skip("CIFAR-10 is not in the cache; get it with: ttapca data get cifar10")
    facts = json.loads(packaged()[name].with_suffix(".json").read_text())
    images = load_images("cifar10", root=cache_root())[:1000]
    assert evaluate(load(name), images).accuracy == pytest.approx(facts["accuracy"], abs=3)
