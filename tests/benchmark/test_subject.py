"""The images of a comparison, which workers share; and names that stand for other content."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ttapca
from benchmark.worlds import DIGITS_PLAN, Recorder, small_subject
from ttapca.benchmark import Benchmark, ImageSource, Plan, Results, Row
from ttapca.benchmark.subject import ImageCache
from ttapca.corruptions import corrupt, sensors
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import Images, Series, read_digits, to_tensor
from ttapca.errors import (
    DataFormatError,
    DataNotFoundError,
    NotEnoughDataError,
    OptionError,
)

PLAN = DIGITS_PLAN.changed(corruptions=("fog", "clean"))
UNFILTERED = PLAN.changed(methods=("bn",))


def colour_images(count: int = 4) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 2, ("a", "b"))


def test_images_are_made_as_the_corruptions_make_them() -> None:
    clean = colour_images()
    source = ImageSource(clean, seed=7)
    found = source.images([("fog", 3), ("clean", 0)])
    assert np.array_equal(found.images[:4], corrupt(clean.images, "fog", 3, 7))
    assert np.array_equal(found.images[4:], clean.images)
    assert found.labels.tolist() == [*clean.labels, *clean.labels]
    assert source.images([("clean", 0)]).images is clean.images
    assert source.name == "generated, seed 7"
    first = source.images([("fog", 5)])  # made once for methods in a row
    assert source.images([("fog", 5)]) is first
    assert source.images([("fog", 4)]) is not first


def test_large_images_say_which_severities_they_have() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    source = ImageSource(Images(pixels, np.array([0, 1]), ("a", "b")))
    assert source.name == "generated with imagenet-c, seed 0"
    found = source.images([("contrast", 3)]).images
    assert np.array_equal(found, corrupt(pixels, "contrast", 3, table="imagenet-c"))


def test_the_severities_can_be_chosen(tmp_path: Path) -> None:
    clean = colour_images()
    harsh = ImageSource(clean, table="imagenet-c")
    assert harsh.name == "generated with imagenet-c, seed 0"
    expected = corrupt(clean.images, "contrast", 3, table="imagenet-c")
    assert np.array_equal(harsh.images([("contrast", 3)]).images, expected)
    assert ImageSource(clean, table="cifar-c").name == "generated, seed 0"
    own = tmp_path / "own.toml"
    own.write_text('name = "mine"\n[contrast]\nfactor = 0.5\n')
    mine = ImageSource(clean, table=str(own))
    name = mine.name
    assert name.startswith("generated with mine ")
    pixels = mine.images([("contrast", 3)]).images
    assert np.array_equal(pixels, corrupt(clean.images, "contrast", 1, table=own))
    own.write_text('name = "mine"\n[contrast]\nfactor = 0.4\n')
    assert ImageSource(clean, table=str(own)).name != name
    with pytest.raises(DataNotFoundError, match="photographs"):  # those that ship are for cifar-c
        harsh.check([("frost", 3)])


@pytest.mark.parametrize(
    ("table", "said"), [(None, "the default for 8 x 8"), ("cifar-c", "as asked")]
)
def test_a_comparison_says_which_severities_it_takes(
    tmp_path: Path, table: str | None, said: str
) -> None:
    for names, expected in (("clean", []), ("fog", [f"severities of cifar-c, {said}"])):
        recorder = Recorder()
        plan = UNFILTERED.changed(table=table, corruptions=(names,))
        Benchmark(plan, reporter=recorder).prepare(tmp_path / "r.sqlite")
        assert [each for each in recorder.notes if "severities" in each] == expected


def test_a_small_image_is_blurred_as_a_large_one_is() -> None:
    # A step from black to white, the same in every row: blur sees the same neighbourhood.
    step, large = np.zeros((1, 8, 8, 1), np.uint8), np.zeros((1, 32, 32, 3), np.uint8)
    step[:, :, 4:] = large[:, :, 16:] = 255
    small = Images(step, np.zeros(1, np.int64), ("a",))
    spoilt = ImageSource(small).images([("defocus_blur", 1)]).images[0, :, :, 0]
    expected = corrupt(large, "defocus_blur", 1, 0)[0, 12:20, 12:20, 0]
    assert np.array_equal(spoilt[:, 2:6], expected[:, 2:6])


def test_images_of_a_folder(tmp_path: Path) -> None:
    clean, folder = colour_images(), tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "fog.npy", np.concatenate([clean.images // level for level in range(1, 6)]))
    np.save(folder / "labels.npy", np.tile(clean.labels, 5).astype(np.uint8))
    source = ImageSource(clean[:3], folder)
    assert source.name == "CIFAR-10-C"
    assert np.array_equal(source.images([("fog", 2)]).images, clean.images[:3] // 2)
    assert np.array_equal(source.images([("clean", 0)]).images, clean.images[:3])
    rows = np.array([1, 3])
    some = ImageSource(clean.subset(rows), folder, rows=rows).images([("fog", 2)])
    assert np.array_equal(some.images, clean.images[rows] // 2)
    source.check([("fog", 5), ("clean", 0)])
    with pytest.raises(DataNotFoundError, match="No corruption `snow`"):
        source.check([("snow", 5)])
    other = Images(clean.images, 1 - clean.labels, clean.class_names)
    with pytest.raises(DataFormatError, match="the labels of `fog` differ"):
        ImageSource(other, folder).images([("fog", 1)])
    with pytest.raises(NotEnoughDataError, match="must hold the 6 test images"):
        ImageSource(colour_images(6), folder).images([("fog", 1)])


def test_frost_is_asked_for_before_a_run(tmp_path: Path) -> None:
    small = colour_images()
    large = Images(np.tile(small.images, (1, 2, 2, 1)), small.labels, small.class_names)
    source = ImageSource(large, textures=tmp_path)
    source.check([("fog", 5), ("clean", 0)])
    with pytest.raises(DataNotFoundError, match="Frost needs 6 photographs"):
        source.check([("fog", 5), ("frost", 5)])
    ImageSource(read_digits()[:2]).check([("frost", 5)])  # drawn
    ImageSource(small, textures=tmp_path).check([("frost", 5)])  # ships


# Images that processes share -----------------------------------------------------------------


def test_images_are_made_once(tmp_path: Path) -> None:
    cache, made = ImageCache(tmp_path / "cache", most=2), []

    def parts(value: int) -> Iterator[np.ndarray]:
        made.append(value)
        yield np.full((2, 4, 4, 3), value, np.uint8)
        yield np.full((1, 4, 4, 3), value + 1, np.uint8)

    for number, value in enumerate([1, 1, 7, 9, 7, 1]):
        found = cache.get(f"all {value}", 3, lambda value=value: parts(value))
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, np.concatenate(list(parts(value))))
        assert made.pop() == value
        for path in tmp_path.glob("cache/*.npy"):  # a second has passed
            os.utime(path, (number, path.stat().st_mtime - 1))
    assert made == [1, 7, 9, 1]  # there is room for two


def test_images_that_find_no_room_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ImageCache(tmp_path / "file", most=2)
    one = np.ones((1, 2, 2, 1), np.uint8)
    np.testing.assert_array_equal(cache.get("ones", 2, lambda: [one, one]), np.ones((2, 2, 2, 1)))

    def missing() -> Iterator[np.ndarray]:
        raise DataNotFoundError("no photographs")

    with pytest.raises(DataNotFoundError, match="no photographs"):
        ImageCache(tmp_path, most=2).get("frost", 1, missing)


def test_a_full_disk_is_not_kept_full(tmp_path: Path) -> None:
    one = np.ones((1, 2, 2, 1), np.uint8)
    tries: list[int] = []

    def parts() -> Iterator[np.ndarray]:
        yield one
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    np.testing.assert_array_equal(ImageCache(tmp_path, most=2).get("ones", 1, parts), one)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


# Fingerprints ------------------------------------------------------------------------------------


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
    said = r"stands for the same filter; .*others called `mine`.*--to FILE"
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
    said = r"the same corrupted images; .*others called `C/fog 5`"
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
    with pytest.raises(OptionError, match="or they have changed since"):
        Benchmark(plan).run(to)


def some_series(count: int = 40) -> Series:
    random = np.random.default_rng(4)
    return Series(random.standard_normal((count, 3, 30)), np.arange(count) % 4, tuple("abcd"))


def test_series_have_degradations_of_sensors() -> None:
    clean = some_series()
    source = ImageSource(clean, seed=3)
    found = source.images([("hum", 2), ("clean", 0)])
    assert (repr(found), source.name) == ("Series(80 of 3x30, 4 classes)", "generated, seed 3")
    assert np.array_equal(found.images[:40], sensors.degrade(clean.images, "hum", 2, 3))
    assert np.array_equal(found.images[40:], clean.images)
    source.check([("hum", 2), ("clean", 0)])
    with pytest.raises(OptionError, match=r"Series take .*gain_drift.*found `fog`.*for images"):
        source.check([("clean", 0), ("fog", 2)])
    with pytest.raises(OptionError, match=r"Images take .*found `hum`.*for series"):
        ImageSource(colour_images()).check([("hum", 2)])
    with pytest.raises(OptionError, match="a folder of images; found series"):
        ImageSource(clean, Path("CIFAR-10-C")).check([("hum", 2)])


def test_processes_share_series(tmp_path: Path) -> None:
    clean, conditions = some_series(), [("noise", 1), ("offset", 5)]
    plain = ImageSource(clean).images(conditions)
    shared = ImageSource(clean, cache=ImageCache(tmp_path, 3)).images(conditions)
    assert shared.images.dtype == np.float64
    assert np.array_equal(shared.images, plain.images)


def test_methods_are_compared_on_series(tmp_path: Path) -> None:
    """From an archive; a filter sees series, and leaves no pictures."""
    data = tmp_path / "mine.npz"
    parts = some_series(80), some_series()
    arrays = {f"x_{name}": part.images for name, part in zip(("train", "test"), parts, strict=True)}
    arrays |= {
        f"y_{name}": part.labels for name, part in zip(("train", "test"), parts, strict=True)
    }
    np.savez(data, **arrays)
    torch.manual_seed(0)
    layers = (nn.Conv1d(3, 8, 5), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 4)).eval()
    plan = Plan("mine", str(data), ("source", "wiener"), ("sensors", "clean"), (2,), ("online",))
    assert plan.corruptions == (*sensors.DEGRADATIONS, "clean")
    rows = Benchmark(plan, network).run(tmp_path / "results.sqlite")
    assert [row.outcome.reason for row in rows] == [""] * 16
    by_condition = {(row.cell.corruption, row.cell.method): row.outcome.error for row in rows}
    # By hand: the degraded samples, and the untouched network.
    made = sensors.degrade(parts[1].images, "noise", 2, 0)
    predicted = network(torch.tensor(made).float()).argmax(1)
    wrong = float((predicted != torch.tensor(parts[1].labels)).float().mean())
    assert by_condition["noise", "source"] == pytest.approx(100 * wrong)
    with Results(tmp_path / "results.sqlite") as results:
        seen = results.observations()
    assert seen
    assert all(each.before == () and each.source_spectrum for each in seen)
    images = Benchmark(plan.changed(corruptions=("standard",)), network)
    with pytest.raises(OptionError, match="found `gaussian_noise`, which is for images"):
        images.run(tmp_path / "other.sqlite")
