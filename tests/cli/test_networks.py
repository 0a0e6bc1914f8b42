"""`ttapca layers`, `train`, `fit` and `eval` as a user meets them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from scripts.pack_checkpoint import command_of
from torch import nn

import ttapca
from cli.conftest import cifar_c
from ttapca import networks
from ttapca.benchmark import Results
from ttapca.benchmark.network_source import NetworkSource
from ttapca.errors import UntrainedWarning
from ttapca.networks import build, runs
from ttapca.networks.factories import NormalisedNetwork
from ttapca.networks.runs import WEIGHTS
from ttapca.networks.weight_files import read_weights

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")


def test_layers(digits: Path, command) -> None:
    text = command("layers resnet20").out
    row = next(line for line in text.splitlines() if line.startswith("conv1 "))
    costs = ["conv1", "Conv2d", "16x32x32", "16,384", "yes", "3,072", "0.0", "1.0"]
    assert row.split()[:9] == [*costs, "dct"]
    text = command("layers resnet20 --route pca").out
    row = next(line for line in text.splitlines() if line.startswith("conv1 "))
    assert row.split()[5:9] == ["2,000", "49.2", "30.1", "folded"]
    assert "Route and memory are those of a fit of 10,000 images" in text
    assert "272,474 parameters, 40.8 million multiply-adds for an image of 3x32x32" in text
    assert text.endswith("Recommended: conv1\n")
    facts = json.loads(command(f"layers {digits} --components 10 --json").out)
    assert facts["recommended"] == "conv1"
    assert [layer["name"] for layer in facts["layers"]][:3] == ["normalise", "conv1", "bn1"]
    assert facts["layers"][1]["components"] == 10
    fits = {layer["name"]: layer["fit"] for layer in facts["layers"]}
    assert (fits["conv1"]["route"], fits["bn1"]["route"]) == ("folded", "exact")
    assert fits["conv1"]["memory_bytes"] > 0
    cosines = json.loads(command(f"layers {digits} --route dct --json").out)
    assert cosines["layers"][1]["fit"]["route"] == "dct"
    assert cosines["layers"][-1]["fit"] is None  # no images there
    assert (
        "`route` must be one of auto, pca, folded" in command(f"layers {digits} --route x", 2).err
    )
    for words in ("own:flat", "--model own:flat"):
        said = command(f"layers {words} --input 1x8x8")
        assert said.out.endswith("Recommended: 1\n")
        assert said.err == ""  # weights do not matter here
    assert "none can carry a filter" in command("layers torch.nn:Identity --input 4").out


def test_from_a_fit_to_a_filtered_prediction(digits: Path, command) -> None:
    told = command(f"fit {digits} --data digits --components 40 --to f").out  # at the best layer
    assert "`conv1`, folded: 40 components of 1,024 outputs hold" in told
    assert "exact up to rounding" in told
    assert "of 1,201 images" in told
    assert ttapca.load("f").n_components_ == 40
    words = f"eval {digits} --data digits"
    plain = json.loads(command(f"{words} --json").out)
    assert (plain["parameters_adapted"], plain["images"]) == (0, 596)
    facts = json.loads(digits.with_suffix(".json").read_text())
    assert plain["accuracy"] == pytest.approx(facts["accuracy"], abs=0.2)
    filtered = f"{words} --json --method ttapca-relu --filter f"
    found = {
        given: json.loads(command(f"{filtered} {given}").out)
        for given in ("", "--episodic", "--online", "--forgetting online", "--forgetting continual")
    }
    settings = " ".join(facts["setting"] for facts in found.values())
    assert settings == "episodic episodic online online continual"
    assert found["--online"]["parameters_adapted"] == 40
    assert found["--online"]["entropy"] == found["--forgetting online"]["entropy"]
    assert found["--online"]["entropy"] != found[""]["entropy"]
    text = command(f"{words} --limit 100").out
    assert text.startswith(f"{digits} on 100 images of digits (source)\n  error ")
    for part in ("calibration error", "images/s", "parameters adapted"):
        assert part in text


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
    assert "2 images of c, fog 3 (source)" in command(words).out


def test_eval_takes_the_filter_that_ships(command) -> None:
    words = "eval cifar10-resnet20 --data cifar10-500 --limit 10 --method"
    assert "10 images of cifar10-500 (wiener, episodic" in command(f"{words} wiener").out
    assert "10 images of cifar10-500 (bn, episodic" in command(f"{words} bn").out  # takes none


def test_eval_explains_a_closed_form_filter(command) -> None:
    command("fit digits --data digits --layer conv1 --components 30 --to f")
    words = "eval digits --data digits --limit 100 --method wiener --filter f --explain"
    table = command(words).out
    assert "Filter at `conv1`, by 100 images: p = " in table
    assert "16-30" in table
    (report,) = json.loads(command(f"{words} --json").out)["explanations"]
    assert [band["last"] for band in report["bands"]] == [1, 3, 7, 15, 30]


def test_eval_mixes_the_classes_of_a_folder(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = "eval own:mean --data images --batch-size 20 --json"
    found = {
        given: json.loads(command(f"{words} {given}").out)
        for given in ("", "--order sorted", "--limit 20", "--limit 20 --seed 3")
    }
    assert [facts["chosen"] for facts in found.values()] == [
        "all 80 images, shuffled with seed 0",
        "all 80 images, class by class",
        "20 of 80 images, 10 of each class, shuffled with seed 0",
        "20 of 80 images, 10 of each class, shuffled with seed 3",
    ]
    # The class `bright` comes first in the alphabet, and the network says 1 for bright.
    assert found[""]["error"] == 100
    assert 30 < found["--order sorted"]["error"] < 70
    assert found["--limit 20"]["images"] == 20
    assert "found 'sortd'. Did you mean `sorted`" in command(f"{words} --order sortd", 2).err


def test_fit_sees_every_class(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = "fit own:mean --data images --layer stem --components 5 --limit 40 --to f"
    said = "images: 40 of 80 images, 20 of each class, shuffled with seed 0"
    assert said in command(words).out
    facts = json.loads(command(f"{words} --force --json").out)
    assert (facts["layer"], facts["components"], facts["images"]) == ("stem", 5, 40)
    mean = float(ttapca.load("f").center_.mean())
    assert mean == pytest.approx((50 + 75) / 255, abs=0.02)  # of 50 and of 200


def test_untrained_weights_are_warned_of(weights: Path, place: Path, pictures, command) -> None:
    words = "fit own:flat --data digits --components 8"
    told = command(f"{words} --to f1").err
    assert "warning: the weights of `own:flat` look UNTRAINED" in told
    assert "Give trained ones with --weights FILE." in told
    assert "UNTRAINED" not in command(f"{words} --to f2 --weights {weights}").err
    torch.save(build("wrn-10-1").state_dict(), "new.pth")
    with pytest.warns(UntrainedWarning, match="those of random weights. Name a file of others."):
        NetworkSource("new.pth", normalisation="none").load()
    pictures(place / "images")
    assert "warning: no weights were given" in command("eval own:mean --data images").err


def test_fit_finds_out_at_once_that_nobody_may_write_there(
    monkeypatch: pytest.MonkeyPatch, command
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    told = command("fit digits --data digits --to new/f", 1).err
    assert told == (
        "error: Cannot write to new/f: Permission denied. You may not write there; choose another "
        "place with `--to DIR`.\n"
    )


def test_a_filter_is_replaced_by_force_only(weights: Path, command) -> None:
    words = f"fit own:flat --weights {weights} --data digits --to f --components"
    command(f"{words} 8")
    kept = Path("f/config.json").read_bytes()
    told = command(f"{words} 5", 2).err
    assert "`f` holds a saved filter already" in told
    assert "replace it with --force." in told
    assert Path("f/config.json").read_bytes() == kept
    command(f"{words} 5 --force")
    assert ttapca.load("f").n_components_ == 5


@pytest.mark.filterwarnings("always::ttapca.errors.TruncationWarning")
def test_what_truncation_does_is_said_at_fit_and_at_eval(weights: Path, command) -> None:
    network = f"own:flat --weights {weights} --data digits"
    told = command(f"fit {network} --components 2 --to f")
    said = r"drops \d\d\.\d\d % of the source variance and changes \d+\.\d % of the source predict"
    assert re.search(f"with learned gains it {said}", told.out)
    assert re.search(f"warning: with learned gains, .* {said}", told.err)
    told = command(f"eval {network} --method ttapca-relu --filter f").err
    assert re.match(f"warning: The filter of 2 components at `1` {said}", told)
    assert command(f"eval {network} --method wiener --filter f").err == ""


# The factory draws new weights whenever it is called.
@pytest.mark.filterwarnings("ignore::ttapca.errors.OtherWeightsWarning")
@pytest.mark.filterwarnings("always::ttapca.errors.BasisWarning")
def test_images_get_cosines_and_the_methods_of_the_paper_say_so(
    monkeypatch: pytest.MonkeyPatch, place: Path, pictures, command
) -> None:
    monkeypatch.setattr("ttapca.fitting.plan.SAMPLES_A_COMPONENT", 0)  # none are too few
    pictures(place / "images", side=20)
    words = "fit own:mean --data images --layer stem"
    said = "for the paper's methods, such as ttapca-relu, fit with --route pca"
    assert said in command(f"{words} --to cosines").out
    for name, asked in (("all", "--route pca"), ("five", "--components 5")):
        assert said not in command(f"{words} --to {name} {asked}").out
    routes = [ttapca.load(name).route for name in ("cosines", "all", "five")]
    assert routes[0] == "dct"
    assert "dct" not in routes[1:]
    words = "eval own:mean --data images --method ttapca-relu --filter"
    told = command(f"{words} cosines", 1).err  # it has no gradients
    assert "found a filter of cosines at `stem`" in told
    assert "Fit it with --route pca, or choose" in told
    assert "cosines" not in command(f"{words} all", 1).err


def test_what_the_outputs_mean(place: Path, pictures, command) -> None:
    pictures(place / "images")
    fit = "fit own:one --data images --components 5 --to"
    command(f"{fit} plain")
    command(f"{fit} said --outputs binary")
    assert ttapca.load("plain").classes_ is None  # it may be a regression
    assert len(ttapca.load("said").classes_.shares) == 2
    command("fit own:classes --data images --components 5 --to none --outputs regression")
    assert ttapca.load("none").classes_ is None
    words = "eval own:one --data images --method wiener --json --filter"
    facts = json.loads(command(f"{words} said --outputs binary").out)
    assert (facts["outputs"], facts["images"]) == ("binary", 80)
    assert 0 < facts["entropy"] <= np.log(2)
    assert json.loads(command(f"{words} plain").out)["outputs"] is None
    labels = "eval own:classes --data images --json --outputs"
    assert json.loads(command(f"{labels} multilabel").out)["images"] == 80


def test_without_a_number_there_are_as_many_components_as_there_can_be(digits, command) -> None:
    told = command(f"fit {digits} --data digits --to f")
    assert "`conv1`, folded: 60 components of 1,024 outputs" in told.out  # four pixels hardly vary
    assert told.err.count("fitting conv1: ") == 1
    told = command(f"fit {digits} --data digits --route dct --to cosines").out
    assert "`conv1`, dct: 64 components of 64 inputs" in told


def test_the_filter_of_a_transformer_is_at_its_images(place: Path, pictures, command) -> None:
    pictures(place / "images", side=20)
    told = command("fit own:patches --data images --to f")
    assert "`embed`, dct: 1,200 components of 1,200 inputs" in told.out
    assert "Identity" not in told.err
    assert ttapca.load("f").outliers_ is not None
    facts = json.loads(command("layers own:patches --input 3x20x20 --json").out)
    assert (facts["recommended"], facts["advice"]) == ("embed", "")
    words = "layers own:tokens --input 3x20x20"
    assert "through an `nn.Identity` first" in " ".join(command(words).out.split())
    told = command("fit own:tokens --data images --to g")
    assert "filter at `longer`. No affine layer of this network takes the images" in told.err


def test_numbers_for_the_normalisation(command) -> None:
    torch.save(build("small-cnn", input_shape=(1, 32, 32)).state_dict(), "a.pth")
    names = np.array(list("abcdefghij"))
    images = np.zeros((4, 32, 32, 1), np.uint8)
    np.savez("a.npz", images=images, labels=np.arange(4), class_names=names)
    words = "eval a.pth --data a.npz --mean 0.5 --std 0.25 --json"
    assert json.loads(command(words).out)["images"] == 4


def test_events_are_written_where_tensorboard_is_there(
    monkeypatch: pytest.MonkeyPatch, command
) -> None:
    """With a stand-in for the writer: tensorboard itself is not installed for the tests."""
    writer = MagicMock()
    stand_in = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    words = "train digits small-cnn --epochs 1 --tensorboard --to run --json"
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
