"""What a run lacks to be the paper's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ttapca.benchmark.paper import needed_for_the_papers_setting
from ttapca.datasets.cifar import MANIFEST_FILE
from ttapca.networks import ARCHITECTURES, ImageNetwork


def wide(normalisation: str, classes: int = 10) -> ImageNetwork:
    """The paper's network; its weights take no memory, because nobody asks for them."""
    with torch.device("meta"):
        return ARCHITECTURES["wrn-28-10"](classes, normalisation, (3, 32, 32))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / MANIFEST_FILE).write_text(json.dumps({"severities": [5], "class_names": ["a", "b"]}))
    return folder


def test_the_papers_own_setting_needs_nothing(published: Path) -> None:
    for images in (None, 10_000):
        assert needed_for_the_papers_setting("cifar10", wide("none"), published, images) == []
    # The paper does not say how its other network normalises.
    hundred = wide("cifar100", classes=100)
    assert needed_for_the_papers_setting("cifar100", hundred, published, None) == []


def test_what_is_missing_is_said_with_the_way_to_it(published: Path, made: Path) -> None:
    for network in (wide("cifar10"), ARCHITECTURES["resnet20"](10, "none", (3, 32, 32)), nn.ReLU()):
        said = needed_for_the_papers_setting("cifar10", network, published, None)
        assert len(said) == 1
        assert re.match(r"Network: .* WRN-28-10 in the paper; .*Standard\.pt --normalise", said[0])
    for folder in (None, made):
        said = needed_for_the_papers_setting("cifar10", wide("none"), folder, None)
        assert len(said) == 1
        assert "`ttapca data get cifar10-c`" in said[0]
    said = needed_for_the_papers_setting("cifar10", nn.ReLU(), None, 1000)
    assert [each.partition(":")[0] for each in said] == [
        "Network",
        "Corrupted images",
        "Images of each corruption",
    ]


def test_data_that_the_paper_does_not_have_are_not_compared_with_it() -> None:
    assert needed_for_the_papers_setting("digits", nn.ReLU(), None, 50) == []
