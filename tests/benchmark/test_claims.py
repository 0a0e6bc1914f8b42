"""What a name stands for in a file of results: whatever else comes under it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ttapca
from benchmark.worlds import small_subject
from ttapca.benchmark import Benchmark, Plan, Results, Row
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import OptionError

PLAN = Plan(
    model="digits",
    data="digits",
    methods=("ttapca-relu",),
    corruptions=("fog", "clean"),
    settings=("online",),
    batch_sizes=(25,),
    components=(16,),
    images=50,
)
UNFILTERED = PLAN.changed(methods=("bn",))


def saved_filter(folder: Path, images: int) -> Path:
    network = small_subject().network
    pixels = to_tensor(read_digits("train").images[:images])
    ttapca.fit(network, "conv1", pixels, 16).save(folder)
    return folder


def corrupted_digits(folder: Path, *names: str, seed: int = 0) -> Path:
    """Write a folder in the CIFAR-C layout, with the same images at every severity."""
    digits = read_digits()
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "labels.npy", np.tile(digits.labels, 5))
    for name in names:
        pixels = corrupt_any_size(digits.images, name, 5, seed)
        np.save(folder / f"{name}.npy", np.tile(pixels, (5, 1, 1, 1)))
    return folder


def rows_of(path: Path) -> list[Row]:
    with Results(path, readonly=True) as results:
        return results.rows()


def test_another_filter_of_the_same_name_is_refused(tmp_path: Path) -> None:
    to, first = tmp_path / "r.sqlite", saved_filter(tmp_path / "a" / "mine", 100)
    before = Benchmark(PLAN, filter=first).run(to)
    assert Benchmark(PLAN, filter=first).run(to) == before
    other = saved_filter(tmp_path / "b" / "mine", 200)
    said = r"stands for the same filter; .*another one that is called `mine` too.*rename the filter"
    with pytest.raises(OptionError, match=said):
        Benchmark(PLAN, filter=other).run(to)
    assert rows_of(to) == before
    # A filter that is fitted and kept, one of another name, and one of another network are others.
    Benchmark(PLAN).run(to)
    Benchmark(PLAN, filter=saved_filter(tmp_path / "b" / "yours", 200)).run(to)
    Benchmark(PLAN, small_subject().network, other).run(to)
    layers = [row.cell.layer for row in rows_of(to) if row.cell.severity]
    assert layers == ["conv1, mine", "conv1", "conv1, yours", "conv1, mine"]


def test_another_folder_of_corrupted_images_of_the_same_name_is_refused(tmp_path: Path) -> None:
    to, first = tmp_path / "r.sqlite", corrupted_digits(tmp_path / "a" / "C", "fog")

    def benchmark(folder: Path, *names: str) -> Benchmark:
        return Benchmark(UNFILTERED.changed(corrupted=str(folder), corruptions=names))

    before = benchmark(first, "fog", "clean").run(to)
    assert benchmark(first, "fog", "clean").run(to) == before
    other = corrupted_digits(tmp_path / "b" / "C", "fog", "frost", seed=1)
    said = r"the same corrupted images; .*others of `fog` 5 in a folder that is called `C` too"
    with pytest.raises(OptionError, match=said):
        benchmark(other, "fog", "clean").run(to)
    with pytest.raises(OptionError, match=said):  # although one of them is new
        benchmark(other, "frost", "fog").run(to)
    assert rows_of(to) == before
    # The folder may get more corruptions.
    corrupted_digits(first, "frost")
    assert len(benchmark(first, "fog", "frost").run(to)) == 2
    assert [row.cell.corruption for row in rows_of(to)] == ["fog", "clean", "frost"]


def test_a_folder_whose_last_image_changed_is_another_one(tmp_path: Path) -> None:
    to, folder = tmp_path / "r.sqlite", corrupted_digits(tmp_path / "C", "fog")
    plan = UNFILTERED.changed(corrupted=str(folder), corruptions=("fog",))
    Benchmark(plan).run(to)
    pixels = np.load(folder / "fog.npy")
    digits = len(pixels) // 5
    pixels[4 * digits + plan.images - 1] ^= 255  # the last that is measured, at severity 5
    np.save(folder / "fog.npy", pixels)
    with pytest.raises(OptionError, match="or these have changed since"):
        Benchmark(plan).run(to)
