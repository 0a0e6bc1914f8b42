"""`ttapca layers`, `train`, `fit` and `eval` as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ttapca
from ttapca.cli.app import run
from ttapca.datasets import Images, write_cifar_binary
from ttapca.datasets.cifar import CIFAR10_BINARY
from ttapca.networks import build, packaged, runs
from ttapca.networks.runs import WEIGHTS


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("TTAPCA_HOME", str(root))
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = "train digits small-cnn --epochs 6 --batch-size 64 --peak 0.1 --to"
    assert run([*words.split(), str(folder)]) == 0
    return folder / WEIGHTS


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, as a user has it."""
    (tmp_path / "my_networks_cli.py").write_text(
        "from torch import nn\n"
        "def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), "
        "nn.Linear(100, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "my_networks_cli:flat"


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


def test_layers_of_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layers", "resnet20"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("conv1 "))
    assert row.split() == ["conv1", "Conv2d", "16x32x32", "16,384", "yes", "2,000", "49.2", "30.1"]
    assert "272,474 parameters, 40.8 million multiply-adds for an image of 3x32x32" in text
    assert text.endswith("Recommended: conv1\n")


def test_layers_as_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layers", str(trained), "--components", "10", "--json"]) == 0
    facts = printed(capsys)
    assert facts["recommended"] == "conv1"
    layers: list[dict[str, object]] = facts["layers"]  # type: ignore[assignment]
    assert [layer["name"] for layer in layers][:3] == ["normalise", "conv1", "bn1"]
    assert layers[1]["components"] == 10


def test_layers_of_ones_own(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["layers", own, "--input", "1x8x8"]) == 0
    assert "Recommended: 1\n" in capsys.readouterr().out
    assert run(["layers", "--model", own, "--input", "1x8x8"]) == 0
    assert "Recommended: 1\n" in capsys.readouterr().out
    assert run(["layers", "torch.nn:Identity", "--input", "4"]) == 0
    assert "none can carry a filter" in capsys.readouterr().out


def test_from_training_to_a_filtered_prediction(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    to = tmp_path / "filter"
    assert run(f"fit {trained} --layer conv1 --data digits --components 40 --to {to}".split()) == 0
    told = capsys.readouterr().out
    assert "`conv1`, folded: 40 components of 1,024 outputs hold" in told
    assert "exact up to rounding" in told
    assert "of 1,201 images" in told
    assert ttapca.load(to).n_components_ == 40
    command = f"eval {trained} --data digits --json".split()
    assert run(command) == 0
    plain = printed(capsys)
    assert plain["parameters_adapted"] == 0
    assert plain["images"] == 596
    assert float(plain["error"]) < 20  # type: ignore[arg-type]
    filtered = [*command, "--method", "ttapca-relu", "--filter", str(to), "--online"]
    assert run(filtered) == 0
    adapted = printed(capsys)
    assert adapted["parameters_adapted"] == 40
    assert adapted["setting"] == "online"
    assert adapted["error"] == pytest.approx(plain["error"], abs=15)  # type: ignore[arg-type]
    assert run(f"eval {trained} --data digits --limit 100".split()) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{trained} on 100 images of digits (source)\n  error ")
    for words in ("calibration error", "images/s", "parameters adapted"):
        assert words in text


def test_the_recommended_layer_is_the_default(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"fit {trained} --data digits --components 5 --limit 50 --json --to {tmp_path / 'f'}"
    assert run(words.split()) == 0
    facts = printed(capsys)
    assert (facts["layer"], facts["components"], facts["images"]) == ("conv1", 5, 50)


def test_ones_own_network_in_every_command(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "run"
    words = f"train digits --model {own} --epochs 5 --peak 0.05 --no-flip --json --to {to}"
    assert run(words.split()) == 0
    accuracy = printed(capsys)["test_accuracy"]
    weights = to / WEIGHTS
    assert run(f"eval {own} --weights {weights} --data digits --json".split()) == 0
    assert printed(capsys)["accuracy"] == pytest.approx(accuracy)
    words = f"fit --model {own} --weights {weights} --data digits --components 8 --to {to}/filter"
    assert run(words.split()) == 0
    assert "`1`, folded: 8 components" in capsys.readouterr().out
    assert run(["eval", str(weights), "--data", "digits"]) == 1
    assert f"Name the network's factory: --model {own} --weights" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "digits-small-cnn"])
def test_the_digits_network_is_packaged(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", name, "--data", "digits", "--json"]) == 0
    facts = json.loads(packaged()["digits-small-cnn"].with_suffix(".json").read_text())
    assert printed(capsys)["accuracy"] == pytest.approx(facts["accuracy"], abs=0.2)


def cifar_c(folder: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
    folder.mkdir()
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", np.arange(10) % 10)
    return folder


def test_a_corruption(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cifar_c(tmp_path / "c")
    words = f"eval {trained} --data {folder} --corruption fog --severity 3".split()
    assert run(words) == 2  # two images have two classes at most, the network ten
    assert "one logit for each of the" in capsys.readouterr().err
    (folder / "corruptions.json").write_text(json.dumps({"class_names": list("0123456789")}))
    assert run(words) == 0
    assert "2 images of" in (text := capsys.readouterr().out)
    assert ", fog 3 (source)" in text


def test_eval_explains_a_closed_form_filter(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "filter"
    assert run(f"fit {trained} --data digits --layer conv1 --components 30 --to {to}".split()) == 0
    words = f"eval {trained} --data digits --limit 100 --method wiener --filter {to} --explain"
    capsys.readouterr()
    assert run(words.split()) == 0
    table = capsys.readouterr().out
    assert "Filter at `conv1`, by 100 images: p = " in table
    assert "16-30" in table
    assert run([*words.split(), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["explanations"]
    assert [band["last"] for band in report["bands"]] == [1, 3, 7, 15, 30]


@pytest.fixture
def small_cifar(home: Path) -> None:
    """Random images in CIFAR-10's place, as the readers find it."""
    random = np.random.default_rng(0)
    names = tuple(str(number) for number in range(10))

    def some(n: int) -> Images:
        pixels = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
        return Images(pixels, np.arange(n) % 10, names)

    folder = home / "cifar-10-batches-bin"
    folder.mkdir()
    write_cifar_binary(folder, CIFAR10_BINARY, {"train": some(50), "test": some(20)})


@pytest.fixture
def resnet(tmp_path: Path) -> Path:
    torch.save({"state_dict": build("wrn-10-1").state_dict()}, tmp_path / "wrn.pth")
    return tmp_path / "wrn.pth"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("eval {resnet} --data digits --normalise none", 1, "of shape 3x32x32; found 1x8x8"),
        ("eval {resnet} --data digits", 2, r"State it: --normalise NAME \(none, half"),
        ("eval {resnet} --data digits --mean 0.5", 2, "or both --mean and --std"),
        ("eval {resnet} --data digits --mean a --std 1", 2, "takes numbers with commas"),
        ("eval {resnet} --data digits --normalise hal", 2, "Did you mean `half`"),
        ("eval {resnet} --data digits --architecture resnet20 --normalise none", 1, "`wrn-10-1`"),
        ("eval {resnet} --data digit --normalise none", 2, "Did you mean `digits`"),
        ("eval {resnet} --data digits --weights {resnet}", 2, "--weights has no meaning for"),
        ("eval --data digits", 2, "Name one network, as MODEL or with --model; found neither"),
        ("eval {resnet} --model a:b --data digits", 2, "found both"),
        ("eval resnet20 --data digits", 2, "is an architecture, which has no weights"),
        ("eval nothing.pth --data digits", 2, "neither a packaged network nor a file"),
        ("eval {trained} --data digits --method tnt", 2, "There is no method `tnt`"),
        ("eval {trained} --data digits --limit 20 --explain", 2, "this adapter has none"),
        ("eval {trained} --data digits --method ttapca-relu", 2, "needs a fitted filter"),
        ("eval {trained} --data digits --filter nowhere", 2, "(?s)--filter.*does not.*exist"),
        ("eval torch.nn:Identity --data digits", 2, "one logit for each of the 10 classes"),
        ("eval torch.nn:Identity --data digits --normalise none", 2, "--normalise has no meaning"),
        ("fit {trained} --data cifar10 --to x", 2, "ttapca data get cifar10"),
        ("fit {trained} --data {corrupted} --to x", 2, "CIFAR-C has a test split only"),
        ("fit {trained} --data digits --layer conv9 --to x", 2, "no layer `conv9`. Did you"),
        ("fit torch.nn:Identity --data digits --to x", 2, "name one with --layer"),
        ("layers resnet20 --input 3y32", 2, "a shape such as 3x32x32; found `3y32`"),
        ("layers nothing_here:make", 2, "no module `nothing_here`"),
        ("train digits --to x", 2, "one network: .* found neither"),
        ("train digits small-cnn --model a:b --to x", 2, "found both"),
        ("train digits small-cn --to x", 2, "Did you mean `small-cnn`"),
        ("train digits small-cnn --schedule linear --to x", 2, "one of cosine, one-cycle; found"),
        ("train digits small-cnn --epochs 0 --to x", 2, "`epochs` must be a whole number from 1"),
        ("train digits small-cnn --batch-size 5000 --to x", 1, "one batch of 5000 images"),
        ("train digits small-cnn --rotation-head conv9 --to x", 2, "no layer `conv9`"),
    ],
)
def test_what_goes_wrong(
    words: str,
    code: int,
    message: str,
    resnet: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    corrupted = cifar_c(tmp_path / "corrupted")
    capsys.readouterr()
    assert run(words.format(resnet=resnet, trained=trained, corrupted=corrupted).split()) == code
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.out == ""
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_cut_short(resnet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resnet.write_bytes(resnet.read_bytes()[:5000])
    assert run(["eval", str(resnet), "--data", "digits", "--normalise", "none"]) == 1
    assert "it was cut short" in capsys.readouterr().err


def test_numbers_for_the_normalisation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = build("small-cnn", input_shape=(1, 32, 32))
    torch.save(network.state_dict(), tmp_path / "a.pth")
    images = Images(np.zeros((4, 32, 32, 1), np.uint8), np.arange(4), tuple("abcdefghij"))
    np.savez(
        tmp_path / "a.npz",
        images=images.images,
        labels=images.labels,
        class_names=np.array(images.class_names),
    )
    words = f"eval {tmp_path}/a.pth --data {tmp_path}/a.npz --mean 0.5 --std 0.25 --json"
    assert run(words.split()) == 0
    assert printed(capsys)["images"] == 4


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )


def test_a_missing_tensorboard_names_its_extra(tmp_path: Path) -> None:
    words = [
        "ttapca",
        "train",
        "digits",
        "small-cnn",
        "--epochs",
        "1",
        "--tensorboard",
        "--to",
        "run",
    ]
    code = (
        "import sys; sys.modules['tensorboard'] = None; "
        f"sys.argv = {words}; from ttapca.cli import main; main()"
    )
    result = run_python(code, tmp_path)
    assert result.returncode == 1
    assert "pip install 'ttapca[train]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ttapca.cli.app import run; "
        "print([run([name, '--help']) for name in ('layers', 'train', 'fit', 'eval')], "
        "'torch' in sys.modules)"
    )
    assert run_python(code, tmp_path).stdout.strip().endswith("[0, 0, 0, 0] False")


def test_events_are_written_where_tensorboard_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the writer: tensorboard itself is no part of the tests."""
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard")

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *_: object) -> None:
            written.append(("closed", 0.0, 0))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    words = f"train digits small-cnn --epochs 1 --tensorboard --to {tmp_path / 'run'} --json"
    assert run(words.split()) == 0
    accuracy = printed(capsys)["test_accuracy"]
    assert ("test_accuracy", accuracy, 1) in written
    assert written[-1][0] == "closed"
    assert "rotation_accuracy" not in {name for name, *_ in written}


def test_training_on_a_named_data_set(
    small_cifar: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"train cifar10 wrn-10-1 --epochs 1 --batch-size 25 --to {tmp_path / 'run'} --json"
    assert run(words.split()) == 0
    assert printed(capsys)["epoch"] == 1


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", interrupted)
    assert run(["train", "digits", "small-cnn", "--to", str(tmp_path / "run")]) == 130
    error = capsys.readouterr().err
    assert "train: stopped; the same command goes on after the last whole epoch\n" in error
    assert error.endswith("interrupted\n")


def pictures(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for name, light in (("dark", 0), ("light", 120)):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 100, (12, 12, 3)) + light
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def test_folders_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        pictures(tmp_path / "both" / split)
    options = f"wrn-10-1 --size 8 --batch-size 10 --epochs 2 --to {tmp_path / 'run'}"
    assert run(f"train {tmp_path / 'both' / 'train'} {options}".split()) == 0
    assert "no test split, so accuracy is that of the training" in capsys.readouterr().err
    weights = tmp_path / "run" / WEIGHTS
    assert run(f"eval {weights} --data {tmp_path / 'both'} --size 8 --json".split()) == 0
    assert printed(capsys)["images"] == 2 * 20
    assert run(f"eval {weights} --data {tmp_path / 'both'}".split()) == 1
    assert "images of shape 3x8x8; found 3x12x12. Resize" in capsys.readouterr().err
    pictures(tmp_path / "one" / "test")
    fit = f"fit {weights} --data {tmp_path / 'one'} --size 8 --to {tmp_path / 'filter'}"
    assert run(fit.split()) == 2
    assert "The train split must lie in" in capsys.readouterr().err
