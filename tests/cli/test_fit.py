"""`ttapca fit` as a user meets it: on data sets, on shards, on images of other sizes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ttapca
from fitting.parted import ShuffledEngine, assert_same
from ttapca.benchmark import Results
from ttapca.datasets import load
from ttapca.errors import UntrainedWarning
from ttapca.networks import build
from ttapca.networks.source import NetworkSource

pytestmark = pytest.mark.filterwarnings("always::ttapca.errors.UntrainedWarning")
FIT = "fit digits --layer conv1 --components 30 --to"


def test_fit_sees_every_class(place: Path, pictures, command) -> None:
    pictures(place / "images")
    words = "fit own:mean --data images --layer stem --components 5 --limit 40 --to f"
    said = "samples: 40 of 80 samples, 20 of each class, shuffled with seed 0"
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
    assert "methods that learn gains, such as ttapca-relu, fit more --components" in told.out
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


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits of the training set in this folder, as three arrays."""
    monkeypatch.chdir(tmp_path)
    pixels = load("digits", "train").images
    for number, some in enumerate(np.array_split(pixels, 3)):
        np.save(f"part-{number}.npy", some)


def test_shards_give_the_filter_of_the_data_set(
    shards: None, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(f"{FIT} whole --data digits --order stored --dtype float64")
    facts = json.loads(command(f"{FIT} f --data part-*.npy --dtype float64 --json").out)
    assert facts["chosen"] == "all 1,201 samples of 3 shards, in stored order"
    engine = ShuffledEngine(workers=2)
    monkeypatch.setattr("ttapca.cli.arguments.engine_of", lambda words: engine)
    said = command(f"{FIT} g --data 'part-*.npy' --dtype float64 --jobs 2")
    assert "1,201 samples in 3 parts, read by 2 workers" in said.err
    assert engine.done == 3
    for name in ("f", "g"):
        assert_same(ttapca.load(name), ttapca.load("whole"), 1e-6)  # the network has float32


@pytest.fixture
def words(place: Path, pictures) -> str:
    """A network that is known for 32 x 32 pixels, and pictures of 16."""
    network = build("resnet20", classes=2)
    network.bn1.running_mean += 0.1  # as if it were trained
    torch.save(network.state_dict(), place / "net.pth")
    for split in ("train", "test"):
        pictures(place / "both" / split, each=20, side=16)
    return "net.pth --normalise none --data both"


def test_cosines_take_every_size(words: str, command) -> None:
    told = command(f"fit {words} --size 12 --layer conv1 --route dct --to f", 1).err
    assert "3x32x32; found 3x12x12. Resize the images (pictures: --size N), say --any-size" in told
    words += " --any-size"
    command(f"fit {words} --size 12 --layer conv1 --route dct --to f")
    for size, method in ((12, "wiener"), (16, "wiener"), (10, "ttapca-relu")):
        given = f"eval {words} --size {size} --method {method} --filter f --batch-size 20 --json"
        assert json.loads(command(given).out)["images"] == 40
    compared = "--methods wiener --corruptions fog --settings online --batch-sizes 20 --filter f"
    for size in (10, 16):
        command(f"bench {words} --size {size} {compared} --to r.sqlite")
    with Results(Path("r.sqlite"), readonly=True) as results:
        rows, seen = results.rows(), results.observations()
    assert [(row.cell.data, row.outcome.status) for row in rows] == [
        ("both 10", "done"), ("both 16", "done")
    ]  # fmt: skip
    assert all("--any-size" in row.outcome.command for row in rows)
    assert [len(each.after) for each in seen] == [6, 6]  # pictures after the filter


def test_principal_components_are_refused_before_the_work_begins(words: str, command) -> None:
    words += " --any-size"
    command(f"fit {words} --size 8 --layer conv1 --route folded --components 9 --to f")
    found = r"(3, 8, 8); found (3, 12, 12). Resize the input, or fit a filter for this shape, or "
    found += "fit it with --route dct, whose cosines take images of any size."
    words += " --size 12"
    assert found in command(f"eval {words} --method wiener --filter f", 1).err
    compared = "--methods wiener,bn --corruptions fog --settings online --filter f --to r.sqlite"
    assert found in command(f"bench {words} {compared}", 1).err
    assert list(Path().glob("r.sqlite*")) == []


def test_what_has_no_other_size(place: Path, words: str, command) -> None:
    told = command("eval own:mean --data both --any-size", 2).err
    assert "--any-size has no meaning for `own:mean`. Leave it out." in told
    torch.save(build("cct-2", classes=2).state_dict(), place / "cct.pth")
    told = command("eval cct.pth --normalise none --data both --any-size", 2).err
    assert "CompactTransformer takes images of 3x32x32 only: it does not average" in told


def test_held_out_samples_say_how_sure_the_network_may_be(command) -> None:
    told = command(f"{FIT} f --data digits --held-out 200").out
    temperature = ttapca.load("f").temperature_
    assert temperature is not None
    assert f"temperature of the network's probabilities: {temperature:.2f}" in told
    assert 0.3 < temperature < 3
    facts = json.loads(command(f"{FIT} f --data digits --held-out 200 --force --json").out)
    assert facts["temperature"] == temperature
    told = command(f"{FIT} g --data digits --held-out 100000", 2).err
    assert "--held-out takes samples of the test part, which has" in told
