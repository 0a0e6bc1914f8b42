"""A folder to work in, networks of a user's own, and a way to give commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ttapca
from ttapca.cli.app import run
from ttapca.datasets import TensorBatches, read_digits
from ttapca.networks import load, packaged

NETWORKS = """
import torch
from torch import nn

class ByTheMean(nn.Module):
    "Bright or dark, by the mean of the batch: lost when a batch has one class."
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
    def forward(self, x):
        self.stem(x)
        light = x.mean((1, 2, 3))
        away = light - light.mean()
        return torch.stack([-away, away + 1e-6], 1)

def mean(): return ByTheMean()
def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(),
                                 nn.Linear(100, 10))
def conv(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
def classes(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
                                    nn.Linear(144, 2))
def plain():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for values in network.parameters(): nn.init.zeros_(values)
    return network
def one():
    "The same weights at every call."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
                             nn.Linear(144, 1))
def patches():
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 12, 4, stride=4)
            self.norm = nn.LayerNorm(12)
            self.head = nn.Linear(12, 2)
        def forward(self, x):
            return self.head(self.norm(self.embed(x).flatten(2).transpose(1, 2)).mean(1))
    return Patches()
def tokens():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(48, 48)
            self.longer = nn.Linear(48, 60)
            self.head = nn.Linear(60, 2)
        def forward(self, x):
            cut = nn.functional.unfold(x, 4, stride=4).transpose(1, 2)
            more = torch.cat([cut, cut[:, :1]], 1)
            return self.head(self.longer(self.mix(more)).mean(1))
    return Tokens()
def needy(width): return nn.Linear(width, 2)
def raising(): return {}["gone"]
"""

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of networks as a user has it."""
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(NETWORKS)
    sys.modules.pop("own", None)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Give a command, check its exit code, and get what it wrote."""

    def give(words: str, code: int = 0) -> Any:
        capsys.readouterr()
        found = run(shlex.split(words))
        said = capsys.readouterr()
        assert found == code, said.err
        return said

    return give


@pytest.fixture
def weights(place: Path) -> Path:
    """Of `own:flat`, with statistics that are not those of a new network."""
    made: dict[str, Any] = {"__name__": "made"}
    exec(NETWORKS, made)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = made["flat"]()
        network[2].running_mean += 0.1
        network[4].weight *= 20  # predictions that depend on the image, not on the bias
    torch.save(network.state_dict(), place / "w.pth")
    return place / "w.pth"


@pytest.fixture
def digits() -> Path:
    """The file of a trained network that ships with the package."""
    return packaged()["digits-small-cnn"]


@pytest.fixture(scope="session")
def fitted_digits() -> ttapca.FittedFilter:
    batches = TensorBatches(read_digits("train"), 250)
    return ttapca.fit(load("digits-small-cnn"), "conv1", batches, 30)


@pytest.fixture
def filter_of_digits(place: Path, fitted_digits: ttapca.FittedFilter) -> Path:
    fitted_digits.save(place / "kept")
    return place / "kept"


@pytest.fixture
def pictures() -> Callable[..., Path]:
    """Write dark and bright pictures, in folders by class."""

    def write(folder: Path, each: int = 40, side: int = 8) -> Path:
        random = np.random.default_rng(0)
        for name, light in (("bright", 150), ("dark", 0)):
            (folder / name).mkdir(parents=True)
            for number in range(each):
                pixels = random.integers(0, 100, (side, side, 3)) + light
                Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
        return folder

    return write


def cifar_c(folder: Path, images: np.ndarray | None = None) -> Path:
    """Write a folder of CIFAR-C with fog only."""
    if images is None:
        images = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
    folder.mkdir()
    np.save(folder / "fog.npy", images)
    np.save(folder / "labels.npy", np.arange(len(images)) % 10 * (len(images) <= 10))
    return folder
