"""The paper's numbers against its own source, known errata, and its setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ttapca.benchmark.paper import METHODS, needed_for_the_papers_setting, paper_row, paper_rows
from ttapca.corruptions import STANDARD
from ttapca.datasets.cifar import MANIFEST_FILE
from ttapca.networks import ARCHITECTURES, ImageNetwork

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "ttawpca.tex"
PRINTED = ("No Adaptation", "BN", "TENT", "exp-TTAwPCA", "ReLU-TTAwPCA")


def test_both_tables_are_whole() -> None:
    rows = paper_rows()
    assert [(row.table, row.setting, row.data, row.method) for row in rows] == [
        (table, setting, data, method)
        for table, setting, names in ((1, "episodic", METHODS), (2, "online", METHODS[2:]))
        for data in ("cifar10", "cifar100")
        for method in names
    ]
    assert all(tuple(row.errors) == STANDARD for row in rows)
    assert all(row.printed_name == PRINTED[METHODS.index(row.method)] for row in rows)


def test_means_are_computed_and_three_printed_ones_are_other_numbers() -> None:
    off = {
        (row.data, row.setting, row.method): (round(row.mean, 2), row.printed_mean)
        for row in paper_rows()
        if row.mean_differs
    }
    assert off == {
        ("cifar10", "episodic", "source"): (43.48, 43.53),
        ("cifar10", "episodic", "tent"): (20.42, 19.96),
        ("cifar10", "online", "ttapca-exp"): (20.32, 20.28),
    }


def test_rows_are_found_by_the_names_people_use() -> None:
    row = paper_row("CIFAR-100-C", "online", "ttapca-relu")
    assert row is not None
    assert row.spreads == {"frost": 0.20, "jpeg_compression": 0.10}
    assert paper_row("cifar10", "online", "bn") is None
    assert paper_row("cifar10", "continual", "tent") is None


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside the checkout")
def test_against_the_source_of_the_paper() -> None:
    printed = []
    for block in re.findall(r"\\begin\{table\*\}.*?\\end\{table\*\}", PAPER.read_text(), re.S):
        for line in block.splitlines():
            entries = [entry.strip() for entry in line.strip().rstrip("\\ ").split("&")]
            if len(entries) == 18 and re.search(r"\d", entries[2]):
                numbers = [float(re.findall(r"\d+\.\d+|\d+\.?", each)[0]) for each in entries[2:]]
                printed.append((entries[1].removesuffix(" (ours)"), *numbers))
    kept = [(row.printed_name, row.printed_mean, *row.errors.values()) for row in paper_rows()]
    assert kept == printed


def wide(normalisation: str, classes: int = 10) -> ImageNetwork:
    """The paper's network; its weights take no memory, because they are not used."""
    with torch.device("meta"):
        return ARCHITECTURES["wrn-28-10"](classes, normalisation, (3, 32, 32))


@pytest.mark.parametrize(
    ("data", "network", "folder", "images", "found"),
    [
        ("cifar10", wide("none"), "published", None, []),
        ("cifar10", wide("none"), "published", 10_000, []),
        # The paper does not say how its other network normalises.
        ("cifar100", wide("cifar100", classes=100), "published", None, []),
        ("cifar10", wide("cifar10"), "published", None, ["Network"]),
        ("cifar10", ARCHITECTURES["resnet20"](10, "none", (3, 32, 32)), "published", None,
         ["Network"]),
        ("cifar10", nn.ReLU(), "published", None, ["Network"]),
        ("cifar10", wide("none"), None, None, ["Corrupted images"]),
        ("cifar10", wide("none"), "made", None, ["Corrupted images"]),
        ("cifar10", nn.ReLU(), None, 1000,
         ["Network", "Corrupted images", "Images of each corruption"]),
        ("digits", nn.ReLU(), None, 50, []),  # which the paper does not have
    ],
)  # fmt: skip
def test_differences_to_the_papers_setting_come_with_the_way_to_it(
    data: str, network: nn.Module, folder: str | None, images: int | None, found: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    if folder == "made":
        (tmp_path / MANIFEST_FILE).write_text('{"severities": [5], "class_names": ["a", "b"]}')
    said = needed_for_the_papers_setting(data, network, tmp_path if folder else None, images)
    assert [each.partition(":")[0] for each in said] == found
    ways = {
        "Network": r"WRN-28-10 in the paper; .*Standard\.pt --normalise",
        "Corrupted images": "`ttapca data get cifar10-c`",
        "Images of each corruption": "leave out --quick",
    }
    assert all(re.search(ways[name], each) for name, each in zip(found, said, strict=True))
