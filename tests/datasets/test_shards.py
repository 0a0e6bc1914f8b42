"""Images in many files: every kind of shard, and what is no shard."""

from __future__ import annotations

import io
import pickle
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import format as npy_format
from PIL import Image

import ttapca
from fitting.parted import assert_same
from oracles import small_convnet
from ttapca.datasets import Shards, is_sharded, open_shards
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, ShapeError, TtapcaError
from ttapca.fitting.readers import PartedData

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 6, 6, 3), np.uint8)
LABELS = np.arange(20) % 3
EXPECTED = torch.from_numpy(PIXELS.transpose(0, 3, 1, 2).copy()).float() / 255


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def make_arrays(folder: Path, rows: slice, number: int) -> None:
    np.save(folder / f"{number}.npy", PIXELS[rows])


def make_labelled_arrays(folder: Path, rows: slice, number: int) -> None:
    make_arrays(folder, rows, number)
    np.save(folder / f"{number}.labels.npy", LABELS[rows])


def make_archives(folder: Path, rows: slice, number: int) -> None:
    np.savez_compressed(folder / f"{number}.npz", images=PIXELS[rows], labels=LABELS[rows])


def make_folders(folder: Path, rows: slice, number: int) -> None:
    (folder / f"{number}").mkdir()
    for place, pixels in enumerate(PIXELS[rows]):
        (folder / f"{number}" / f"{place:03}.png").write_bytes(png(pixels))


def make_folders_of_classes(folder: Path, rows: slice, number: int) -> None:
    for place, pixels in enumerate(PIXELS[rows]):
        one = folder / f"{number}" / f"class {place // 3}"
        one.mkdir(parents=True, exist_ok=True)
        (one / f"{place % 3}.png").write_bytes(png(pixels))


def make_tars(folder: Path, rows: slice, number: int) -> None:
    members: list[tuple[str, bytes]] = []
    for place, (pixels, label) in enumerate(zip(PIXELS[rows], LABELS[rows], strict=True)):
        name = f"set.v2/{place:04}"
        members += [(f"{name}.PNG", png(pixels)), (f"{name}.cls", f"{label}\n".encode())]
        members += [(f"{name}.json", b"{}"), (f"{name}.seg.png", b"of another kind")]
    write_tar(folder / f"{number}.tar", members)


def make_tars_of_arrays(folder: Path, rows: slice, number: int) -> None:
    members = [(f"{place}.npy", npy(pixels)) for place, pixels in enumerate(PIXELS[rows])]
    write_tar(folder / f"{number}.tar", members, format=tarfile.GNU_FORMAT)


KINDS = {
    "npy": make_arrays,
    "npy and labels": make_labelled_arrays,
    "npz": make_archives,
    "folders": make_folders,
    "folders of classes": make_folders_of_classes,
    "tar": make_tars,
    "tar of arrays": make_tars_of_arrays,
}


def made(folder: Path, make: Callable[[Path, slice, int], None]) -> Path:
    for number, rows in enumerate((slice(7), slice(7, 8), slice(8, 20))):
        make(folder, rows, number)
    return folder / "*"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_shard(kind: str, tmp_path: Path) -> None:
    shards = open_shards(made(tmp_path, KINDS[kind]), batch_size=5)
    assert isinstance(shards, PartedData)
    assert [len(part) for part in shards.parts] == [7, 1, 12]
    assert (shards.samples, len(shards), shards.image_shape()) == (20, 6, (3, 6, 6))
    again: Shards = pickle.loads(pickle.dumps(shards))
    assert len(pickle.dumps(again)) < 5000
    batches = list(again)
    images = [batch[0] if isinstance(batch, tuple) else batch for batch in batches]
    assert [len(each) for each in images] == [5, 2, 1, 5, 5, 2]
    assert torch.equal(torch.cat(images), EXPECTED)
    labelled = kind in ("npy and labels", "npz", "tar")
    assert all(isinstance(batch, tuple) == labelled for batch in batches)
    if labelled:
        assert torch.cat([batch[1] for batch in batches]).tolist() == LABELS.tolist()
    assert [len(each[0] if labelled else each) for each in shards.batched(20)] == [7, 1, 12]


@pytest.mark.parametrize("kind", ["npy", "tar"])
def test_a_fit_of_shards_is_that_of_the_images(kind: str, tmp_path: Path) -> None:
    for number in range(4):
        KINDS[kind](tmp_path, slice(5 * number, 5 * number + 5), number)
        KINDS[kind](tmp_path, slice(5 * number, 5 * number + 5), number + 4)
    shards = open_shards(tmp_path / "*", batch_size=256)
    images = torch.cat([EXPECTED, EXPECTED])
    found = ttapca.fit(small_convnet(), "conv1", shards, 10)
    assert_same(found, ttapca.fit(small_convnet(), "conv1", images, 10))
    assert found.n_samples_ == 40


def test_headers_are_parsed_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are opened by several threads, and Python 3.11 cannot parse in two of them."""
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 4, 4, 3), np.uint8))
    parse, busy, most = npy_format.read_array_header_1_0, list[int](), list[int]()

    def slow(stream: Any) -> Any:
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()
        return parse(stream)

    monkeypatch.setattr(npy_format, "read_array_header_1_0", slow)
    assert open_shards(str(tmp_path / "*.npy")).samples == 12
    assert max(most) == 1


def test_floating_point_numbers_stay_as_they_are(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).normal(size=(9, 4)).astype(">f8")
    np.save(tmp_path / "a.npy", numbers)
    np.savez(tmp_path / "b.npz", images=numbers.astype(np.float32))
    one, two = open_shards([tmp_path / "a.npy", tmp_path / "b.npz"])
    assert torch.equal(one, torch.from_numpy(numbers.astype("<f8")))
    assert two.dtype == torch.float32


def test_pictures_are_resized(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.png", png(PIXELS[0])), ("b.jpg", png(PIXELS[1][:5]))])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.png").write_bytes(png(PIXELS[2]))
    batches = open_shards([tmp_path / "a.tar", tmp_path / "b"], size=4, shorter_side=5)
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 4, 4), (1, 3, 4, 4)]
    with pytest.raises(ShapeError, match=r"a\.tar: All images.*`size=` to resize pictures"):
        list(open_shards(tmp_path / "a.tar"))


def test_patterns(tmp_path: Path) -> None:
    for number in (8, 9, 10, 11):
        np.save(tmp_path / f"part-{number:03}.npy", PIXELS[:number])
    (tmp_path / "[odd].npy").write_bytes((tmp_path / "part-008.npy").read_bytes())

    def counts(*names: str) -> list[int]:
        return [len(part) for part in open_shards([tmp_path / name for name in names]).parts]

    assert counts("part-*.npy") == [8, 9, 10, 11]
    assert counts("part-00*.npy", "part-01?.npy") == [8, 9, 10, 11]
    assert counts("part-011.npy", "part-008.npy") == [11, 8]  # as they were named
    assert counts("[odd].npy") == [8]  # a file of this name comes before a pattern
    assert print_of(open_shards(tmp_path / "part-010.npy")) == (
        "all 10 samples of 1 shard, in stored order"
    )


def print_of(shards: Shards) -> str:
    return str(shards)


@pytest.mark.parametrize(
    ("words", "sharded"),
    [
        ("train/*.tar", True),
        ("one.tar", True),
        ("cifar10", False),
        ("mine.npz", False),
        ("pictures/", False),
    ],
)
def test_words_that_name_shards(words: str, sharded: bool) -> None:
    assert is_sharded(words) is sharded


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ([], DataNotFoundError, "the list is empty"),
        ("none-*.npy", DataNotFoundError, r"there is no .*none-\*\.npy"),
        ("notes.txt", DataFormatError, r"\.npy, \.npz, \.tar; not .*notes\.txt"),
        ("empty", DataFormatError, "empty holds none"),
    ],
)
def test_what_is_not_there(what: Any, error: type[TtapcaError], match: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no images")
    (tmp_path / "empty").mkdir()
    given = tmp_path / what if isinstance(what, str) else what
    with pytest.raises(error, match=match):
        open_shards(given)


def test_options_without_effect(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", PIXELS)
    with pytest.raises(OptionError, match=r"`size=` is for pictures.*a\.npy is an array"):
        open_shards(tmp_path / "a.npy", size=4)
    write_tar(tmp_path / "a.tar", [("a.npy", npy(PIXELS[0]))])
    with pytest.raises(OptionError, match=r"`size=` is for pictures; .*a\.tar holds arrays"):
        list(open_shards(tmp_path / "a.tar", size=4))
    with pytest.raises(OptionError, match="`batch_size` must be"):
        open_shards(tmp_path / "a.npy", batch_size=0)


def broken(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


PNG = png(PIXELS[0])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.npy", npy(PIXELS)[:-1], "is cut short"),
        ("a.npy", npy(np.array([{}])), "holds 'O' items"),
        ("a.npy", npy(np.zeros(4)), r"have a shape \(n, ...\)"),
        ("a.npy", npy(np.zeros((4, 3, 6, 6), np.uint8)), r"\(n, height, width, channels\)"),
        ("a.npy", npy(np.zeros((4, 3), np.int32)), "bytes, 0 to 255, or floating-point"),
        ("a.npz", b"PK", "not a plain `.npz` archive"),
        ("a.npz", b"", "not a plain `.npz` archive"),
        ("a.tar", b"", "not a readable tar file"),
        ("a.tar", b"x" * 2000, "not a readable tar file"),
        ("a.tar", bytes(10_240), "holds none"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    path = broken(tmp_path, name, content)
    with pytest.raises((DataFormatError, ShapeError), match=match) as caught:
        list(open_shards(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("a.cls", b"1")], "`a` has none"),
        ([("a.png", PNG), ("a.jpg", PNG)], "`a` has 2"),
        ([("a.png", PNG), ("a.png", PNG)], "`a` has 2"),
        (
            [("a.png", PNG), ("a.cls", b"cat")],
            r"`a\.cls` holds the number of a class; found b'cat'",
        ),
        ([("a.png", PNG), ("a.cls", b"1" * 30)], "cannot be read"),
        ([("a.png", PNG), ("a.cls", b"1"), ("b.png", PNG)], "Either all samples have a class"),
        ([("a.png", b"no picture")], r"no readable image `a\.png`: it is none of PNG"),
        ([("a.png", PNG[:60])], r"no readable image `a\.png`"),
        ([("a.npy", b"no array")], r"no readable image `a\.npy`"),
        ([("a.npy", npy(PIXELS[0]) + b"x")], r"no readable image `a\.npy`: it is longer"),
        ([("a.npy", npy(np.zeros((2, 2), np.int64)))], "bytes, 0 to 255, or floating-point"),
        ([("a.npy", npy(np.zeros(3))), ("b.npy", npy(np.zeros(4)))], "All images must have one"),
    ],
)
def test_samples_that_are_none(
    members: list[tuple[str, bytes]], match: str, tmp_path: Path
) -> None:
    path = write_tar(tmp_path / "bad.tar", members)
    with pytest.raises((DataFormatError, ShapeError), match=match) as caught:
        list(open_shards(path))
    assert str(path) in str(caught.value)


def test_a_tar_file_that_breaks_off_is_not_a_shorter_one(tmp_path: Path) -> None:
    """The parser takes any damaged header for the end; samples after it must not be missed."""
    members = [(f"{number}.png", PNG) for number in range(6)]
    content = write_tar(tmp_path / "whole.tar", members).read_bytes()
    size = 512 + -(-len(PNG) // 512) * 512
    joined = content + content
    noise = content[: 3 * size] + b"\x07" * 512 + content[3 * size + 512 :]
    cuts = [content[:cut] for cut in (3 * size, 3 * size + 100, 3 * size + 512, 6 * size)]
    for damaged in (*cuts, noise, joined):
        with pytest.raises(DataFormatError, match=r"Zeros must mark the end|not a readable tar"):
            open_shards(broken(tmp_path, "damaged.tar", damaged))
    assert open_shards(broken(tmp_path, "long.tar", content + bytes(5000))).samples == 6


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataFormatError, match=r"`a\.png` is a link, a device or sparse"):
        open_shards(tmp_path / "a.tar")


def test_a_header_that_lies_about_its_size(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.size = 10**12
    path = broken(tmp_path, "a.tar", info.tobuf() + bytes(1024))
    with pytest.raises(DataFormatError, match=r"a\.tar is not a readable tar file"):
        open_shards(path)


def test_nothing_is_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_tar(folder / "a.tar", [("../../evil.png", PNG), ("/tmp/evil2.png", PNG)])
    before = sorted(tmp_path.rglob("*"))
    assert sum(map(len, open_shards(folder / "a.tar"))) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_shard_that_changed_since_it_was_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", PIXELS)
    shards = open_shards(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", PIXELS[:19])
    with pytest.raises(DataFormatError, match=r"a\.npy said 20, and 19 rows came"):
        ttapca.fit(small_convnet(), "conv1", shards, 5)
    (tmp_path / "a.npy").unlink()
    with pytest.raises(DataNotFoundError, match=r"no .*a\.npy here.*all workers share"):
        shards.parts[0].check()


def test_labels_of_another_number(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", PIXELS)
    for labels in (LABELS[:3], LABELS.astype(float)):
        np.save(tmp_path / "a.labels.npy", labels)
        with pytest.raises(DataFormatError, match=r"one label for each of 20 images"):
            list(open_shards(tmp_path / "*.npy"))
