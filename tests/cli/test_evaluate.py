"""`ttapca eval` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import ttapca
from cli.conftest import cifar_c
from ttapca import networks
from ttapca.benchmark import Results
from ttapca.networks import build
from ttapca.networks.network import NormalisedNetwork

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")


def test_from_a_fit_to_a_filtered_prediction(digits: Path, command) -> None:
    told = command(f"fit {digits} --data digits --components 40 --to f").out  # at the best layer
    assert "`conv1`, folded: 40 components of 1,024 outputs hold" in told
    assert "exact up to rounding" in told
    assert "of 1,201 samples" in told
    assert ttapca.load("f").n_components_ == 40
    words = f"eval {digits} --data digits"
    plain = json.loads(command(f"{words} --json").out)
    assert (plain["parameters_adapted"], plain["images"]) == (0, 596)
    facts = json.loads(digits.with_suffix(".json").read_text())
    assert plain["accuracy"] == pytest.approx(facts["accuracy"], abs=0.2)
    filtered = f"{words} --json --method ttapca-relu --filter f"
    found = {
        given: json.loads(command(f"{filtered} {given}").out)
        for given in ("", "--forgetting online", "--forgetting continual")
    }
    settings = " ".join(facts["setting"] for facts in found.values())
    assert settings == "episodic online continual"
    assert found["--forgetting online"]["parameters_adapted"] == 40
    assert found["--forgetting online"]["entropy"] != found[""]["entropy"]
    text = command(f"{words} --limit 100").out
    assert text.startswith(f"{digits} on 100 samples of digits (source)\n  error ")
    for part in ("calibration error", "samples/s", "parameters adapted"):
        assert part in text


def test_ones_own_network_that_takes_normalised_images(place: Path, command) -> None:
    (place / "bare.py").write_text(
        "from torch import nn\n"
        "from ttapca import networks\n"
        "class Undo(nn.Module):\n"
        "    def forward(self, normalised):\n"
        "        return normalised * 0.25 + 0.5\n"
        "def network(first=nn.Identity):\n"
        "    made = networks.load('digits-small-cnn')\n"
        "    made.normalise = first()\n"
        "    return made\n"
        "def undoing():\n"
        "    return network(Undo)\n"
    )
    bare, numbers = "bare:network --data digits", "--mean 0.5 --std 0.25"
    entropies = [
        json.loads(command(f"eval {words} --data digits --json").out)["entropy"]
        for words in ("digits", f"bare:undoing {numbers}", "bare:undoing")
    ]
    assert entropies[1] == pytest.approx(entropies[0], rel=1e-3)
    assert entropies[2] != pytest.approx(entropies[0], rel=0.1)
    command(f"fit {bare} {numbers} --components 40 --to f")
    fitted = ttapca.load("f")
    assert fitted.layer == "conv1"
    assert fitted.outliers_ is not None  # its input is known for the images
    # Python's network is the same without the normalisation that the command put in front of it.
    own = networks.load("digits-small-cnn")
    own.normalise = nn.Identity()
    images = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with ttapca.adapt(own, "wiener", filter=fitted) as adapted:
        expected = adapted((images - 0.5) / 0.25)
    wrapped = NormalisedNetwork(own, networks.Normalisation((0.5,), (0.25,)))
    with ttapca.adapt(wrapped, "wiener", filter=fitted) as adapted:
        torch.testing.assert_close(adapted(images), expected)
    words = f"bench {bare} {numbers} --filter f --methods wiener --corruptions fog --images 20"
    command(f"{words} --settings online --to r.sqlite")
    with Results("r.sqlite", readonly=True) as results:
        (seen,) = results.observations()
        assert numbers in results.rows()[0].outcome.command
    assert len(seen.before) == len(seen.after) > 0  # pictures, whose normalisation is undone
    three = command(f"eval {bare} --normalise cifar10", 2).err
    assert "The mean needs one number, or one for each of the 1 channels; found 3" in three


def test_a_corruption(place: Path, command) -> None:
    folder = cifar_c(place / "c")
    words = "eval digits --data c --corruption fog --severity 3"
    # two images have two classes at most, the network ten
    assert "one logit for each of the" in command(words, 2).err
    (folder / "corruptions.json").write_text(json.dumps({"class_names": list("0123456789")}))
    assert "2 samples of c, fog 3 (source)" in command(words).out


def test_eval_takes_the_filter_that_ships(command) -> None:
    words = "eval cifar10-resnet20 --data cifar10-500 --limit 10 --method"
    assert "10 samples of cifar10-500 (wiener, episodic" in command(f"{words} wiener").out
    assert "10 samples of cifar10-500 (bn, episodic" in command(f"{words} bn").out  # takes none


def test_eval_mixes_the_classes_of_a_folder(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = "eval own:mean --data images --batch-size 20 --json"
    found = {
        given: json.loads(command(f"{words} {given}").out)
        for given in ("", "--order sorted", "--limit 20", "--limit 20 --seed 3")
    }
    assert [facts["chosen"] for facts in found.values()] == [
        "all 80 samples, shuffled with seed 0",
        "all 80 samples, class by class",
        "20 of 80 samples, 10 of each class, shuffled with seed 0",
        "20 of 80 samples, 10 of each class, shuffled with seed 3",
    ]
    # The class `bright` comes first in the alphabet, and the network says 1 for bright.
    assert found[""]["error"] == 100
    assert 30 < found["--order sorted"]["error"] < 70
    assert found["--limit 20"]["images"] == 20
    assert "found 'sortd'. Did you mean `sorted`" in command(f"{words} --order sortd", 2).err


def test_numbers_for_the_normalisation(command) -> None:
    torch.save(build("small-cnn", input_shape=(1, 32, 32)).state_dict(), "a.pth")
    names = np.array(list("abcdefghij"))
    images = np.zeros((4, 32, 32, 1), np.uint8)
    np.savez("a.npz", images=images, labels=np.arange(4), class_names=names)
    words = "eval a.pth --data a.npz --mean 0.5 --std 0.25 --json"
    assert json.loads(command(words).out)["images"] == 4


def test_photographs_by_the_number_in_their_name(command, tmp_path: Path) -> None:
    random, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for number in range(4):
        pixels = random.integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number % 2:04d}_{number}.png")
    path = tmp_path / "mobile.pth"
    network = build("mobilenet-v2", classes=2)
    torch.save(network.state_dict(), path)
    words = f"eval {path} --normalise imagenet --eps 1e-3 --data {folder} --size 224"
    assert json.loads(command(f"{words} --shorter-side 256 --json").out)["images"] == 4
    said = command(f"{words} --shorter-side 200", code=2).err
    assert "--shorter-side N says how large a picture is made" in said
    said = command(f"{words.removesuffix('224')} 32", code=1).err
    assert "3x224x224; found 3x32x32. Resize the images (pictures: --size N)" in said
