"""How far a reader walks: files that a call enters, and changes from one file to another.

A walk counts calls of functions in files of `ttapca`. Its bounds are the lengths that were reached;
whoever shortens a walk lowers them, and a walk that grows beyond them needs a reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ttapca

SOURCES = f"{Path(ttapca.__file__).parent}{os.sep}"
IMAGES = torch.rand(400, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Linear(8, 10))
        return nn.Sequential(*layers[:3], nn.AdaptiveAvgPool2d(1), nn.Flatten(), layers[3]).eval()


def walk_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Return how many files a call enters, and how often it goes from one to another."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            entered.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(set(entered)), sum(one != other for one, other in pairwise(entered))


def called(method: str) -> tuple[int, int]:
    """The walk of a call of a method that has seen enough images to know their units."""
    adapted = ttapca.adapt(model := network(), method, filter=ttapca.fit(model, "0", IMAGES))
    adapted(IMAGES[:300])
    return walk_of(lambda: adapted(IMAGES[300:350]))


def fitted() -> tuple[int, int]:
    model = network()
    ttapca.fit(model, "0", IMAGES)  # the first one imports modules
    return walk_of(lambda: ttapca.fit(model, "0", IMAGES))


def adapted() -> tuple[int, int]:
    model = network()
    fitted = ttapca.fit(model, "0", IMAGES)
    ttapca.adapt(model, "wiener", filter=fitted).detach()
    return walk_of(lambda: ttapca.adapt(model, "wiener", filter=fitted))


@pytest.mark.parametrize(
    ("name", "walk", "files", "changes"),
    [
        ("fit", fitted, 31, 343),  # 303 before inputs could be lists and dicts of samples
        ('adapt(model, "wiener")', adapted, 36, 127),
        ('a call of "ttapca-relu"', lambda: called("ttapca-relu"), 13, 62),
        ('a call of "wiener"', lambda: called("wiener"), 25, 147),
    ],
)
def test_a_walk_does_not_grow(
    name: str, walk: Callable[[], tuple[int, int]], files: int, changes: int
) -> None:
    found = walk()
    print(f"{name}: {found[0]} files, {found[1]} changes of file")  # noqa: T201
    assert found[0] <= files
    assert found[1] <= changes
