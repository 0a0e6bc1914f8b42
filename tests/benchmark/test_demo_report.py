"""The images that the report of the demo shows: the first of each corruption that turn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ttapca
from ttapca import networks
from ttapca.benchmark import Benchmark, Plan, expand
from ttapca.benchmark.demo_report import RepairedImage, repaired_images
from ttapca.benchmark.report_page import report
from ttapca.benchmark.streams import segments
from ttapca.datasets import to_tensor

PLAN = Plan(
    "digits",
    "digits",
    ("wiener",),
    ("contrast", "pixelate", "clean"),
    settings=("episodic",),
    batch_sizes=(100,),
    components=(40,),
)


@torch.no_grad()
def test_the_first_images_that_turn_are_shown(tmp_path: Path) -> None:
    subject = Benchmark(PLAN).prepare(tmp_path / "r.sqlite")
    cells = [unit.cells[0] for unit in expand(PLAN, subject)]
    shown = repaired_images(cells, subject)
    assert [each.corruption for each in shown] == ["contrast"] * 2  # pixelate is of its family

    images = subject.source.images([("contrast", 5)])
    rows = segments("episodic", images.labels, 1, 0)[0][:100].tolist()
    untouched, model = (networks.load("digits-small-cnn") for _ in range(2))
    given: list[torch.Tensor] = []
    adapted = ttapca.adapt(model, "wiener", filter=subject.fitted)
    model.conv1.register_forward_hook(lambda _, seen, made: given.append(seen[0]))
    classes = adapted(to_tensor(images.images[rows])).argmax(1).tolist()
    turned = []
    for place, row in enumerate(rows):
        plain = int(untouched(to_tensor(images.images[row : row + 1])).argmax())
        if classes[place] == images.labels[row] != plain:
            turned.append((place, row, plain))
    names = images.class_names
    for found, (place, row, plain) in zip(shown, turned, strict=False):
        assert (found.wrong, found.right) == (names[plain], names[images.labels[row]])
        assert found.method == "wiener"
        pngs = (found.before, found.after)
        before, after = (np.asarray(Image.open(io.BytesIO(png))) for png in pngs)
        assert np.array_equal(before, images.images[row, ..., 0])
        seen = given[-1][place, 0] * model.normalise.std.item() + model.normalise.mean.item()
        assert np.abs(after - 255 * seen.clamp(0, 1).numpy()).max() <= 0.51
    assert repaired_images(cells[-1:], subject) == []  # clean images have no corruption


@pytest.mark.parametrize("count", [0, 2])
def test_the_page_shows_them_and_begins_with_the_line(count: int) -> None:
    one: dict[str, Any] = {"wrong": "<b>cat", "right": "dog", "before": b"1", "after": b"2"}
    turned = [RepairedImage("jpeg_compression", "wiener", **one)] * count
    page = report([], (), "To remember: 5 < 7." if count else "", turned)
    assert page.count("taken for <span") == count
    assert ("From wrong to right" in page) == bool(count)
    assert ('<p class="remember">To remember: 5 &lt; 7.</p>' in page) == bool(count)
    assert "<b>cat" not in page
