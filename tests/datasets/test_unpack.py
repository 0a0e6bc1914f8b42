from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ttapca.datasets import archives as unpack
from ttapca.datasets.archives import unpack_tar
from ttapca.errors import DataFormatError


def hostile(path: Path, **attributes: Any) -> None:
    """A tar with one innocent file, then one entry of the worst kind."""
    with tarfile.open(path, "w") as tar:
        entry = tarfile.TarInfo("top/good.txt")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"good"))
        bad = tarfile.TarInfo(attributes.pop("name", "top/bad"))
        content = attributes.pop("content", b"")
        bad.size = len(content)
        for name, value in attributes.items():
            setattr(bad, name, value)
        tar.addfile(bad, io.BytesIO(content))


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "attributes",
    [
        {"name": "../escape", "content": b"x"},
        {"name": "top/../../escape", "content": b"x"},
        {"name": "/escape", "content": b"x"},
        {"name": "top/..", "type": tarfile.DIRTYPE},
        {"name": "top\\..\\escape", "content": b"x"},
        {"name": "C:/escape", "content": b"x"},
    ],
    ids=lambda attributes: attributes["name"],
)
def test_a_path_that_leaves_the_folder(
    attributes: dict[str, Any], tmp_path: Path, recorder: Any
) -> None:
    hostile(tmp_path / "bad.tar", **attributes)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="leads out of the folder"):
        unpack_tar(tmp_path / "bad.tar", tmp_path / "out", limit=100, report=recorder)
    assert everything_in(tmp_path) == {"bad.tar", "out"}


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
    ],
)
def test_links_and_devices(kind: bytes, tmp_path: Path, recorder: Any) -> None:
    hostile(tmp_path / "bad.tar", type=kind, linkname="/etc/passwd")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="`top/bad` is a link or a device"):
        unpack_tar(tmp_path / "bad.tar", tmp_path / "out", limit=100, report=recorder)
    assert everything_in(tmp_path) == {"bad.tar", "out"}


def test_too_much_content(tmp_path: Path, pack: Any, recorder: Any) -> None:
    (tmp_path / "bomb.tar.gz").write_bytes(pack({"top/zeros": bytes(10_000_000)}))
    assert (tmp_path / "bomb.tar.gz").stat().st_size < 20_000
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="more than 1,000,000 bytes"):
        unpack_tar(tmp_path / "bomb.tar.gz", tmp_path / "out", limit=1_000_000, report=recorder)
    assert everything_in(tmp_path / "out") == set()


def test_two_files_of_one_name(tmp_path: Path, pack: Any, recorder: Any) -> None:
    (tmp_path / "two.tar").write_bytes(pack({"top/a": b"1", "other/a": b"2"}, "w"))
    with pytest.raises(DataFormatError, match="two files called `a`"):
        unpack_tar(tmp_path / "two.tar", tmp_path, limit=100, report=recorder)
    assert everything_in(tmp_path) == {"two.tar"}


def test_too_many_entries(
    tmp_path: Path, pack: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 3)
    (tmp_path / "many.tar").write_bytes(pack({f"top/{n}": b"" for n in range(4)}, "w"))
    with pytest.raises(DataFormatError, match="or 3 entries"):
        unpack_tar(tmp_path / "many.tar", tmp_path, limit=100, report=recorder)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("part", [0.01, 0.5, 0.9])
def test_a_truncated_archive(
    mode: str, part: float, tmp_path: Path, pack: Any, recorder: Any
) -> None:
    noise = bytes(range(256)) * 400
    content = pack({f"top/{n}": noise for n in range(5)}, mode)
    (tmp_path / "cut.tar").write_bytes(content[: int(len(content) * part)])
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match="damaged or truncated"):
        unpack_tar(tmp_path / "cut.tar", tmp_path / "out", limit=10**9, report=recorder)


def test_damaged_compression(tmp_path: Path, pack: Any, recorder: Any) -> None:
    content = bytearray(pack({"top/a": bytes(range(256)) * 40}))
    content[40:60] = bytes(20)
    (tmp_path / "bad.tar.gz").write_bytes(content)
    with pytest.raises(DataFormatError, match="damaged or truncated"):
        unpack_tar(tmp_path / "bad.tar.gz", tmp_path, limit=10**9, report=recorder)


def test_only_what_is_wanted_and_without_the_top_folder(
    tmp_path: Path, pack: Any, recorder: Any
) -> None:
    (tmp_path / "a.tar").write_bytes(pack({"top/a": b"1", "top/b": b"2", "c": b"3"}, "w"))
    for name in ("all", "some"):
        (tmp_path / name).mkdir()
    unpack_tar(tmp_path / "a.tar", tmp_path / "all", limit=9, report=recorder)
    unpack_tar(tmp_path / "a.tar", tmp_path / "some", limit=9, report=recorder, only={"b"})
    assert everything_in(tmp_path / "all") == {"a", "b", "c"}
    assert everything_in(tmp_path / "some") == {"b"}
    assert recorder.steps[-1][1:] == (3, 3)


def test_no_permission_of_the_archive_takes_effect(tmp_path: Path, recorder: Any) -> None:
    hostile(tmp_path / "a.tar", name="top/run", content=b"x", mode=0o4777)
    (tmp_path / "out").mkdir()
    unpack_tar(tmp_path / "a.tar", tmp_path / "out", limit=100, report=recorder)
    assert (tmp_path / "out" / "run").stat().st_mode & 0o7111 == 0


def tar_header(kind: bytes, size: int) -> bytes:
    entry = tarfile.TarInfo("top/zeros")
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_long_header_is_not_read_into_memory(kind: bytes, tmp_path: Path, recorder: Any) -> None:
    size = 100_000_000
    bomb = gzip.compress(tar_header(kind, size)) + gzip.compress(bytes(size), 1)
    (tmp_path / "bomb.tar.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=r"bomb\.tar\.gz .* header of more than 1,048,576"):
        unpack_tar(tmp_path / "bomb.tar.gz", tmp_path, limit=10**6, report=recorder)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [b"0", b"5"], ids=["a file", "a folder"])
def test_no_entry_leads_past_the_limit(kind: bytes, tmp_path: Path, recorder: Any) -> None:
    bomb = gzip.compress(tar_header(kind, 10**12)) + gzip.compress(bytes(10**6))
    (tmp_path / "bomb.tar.gz").write_bytes(bomb)
    with pytest.raises(DataFormatError, match=r"bomb\.tar\.gz is refused: .* more than 1,000,000"):
        unpack_tar(tmp_path / "bomb.tar.gz", tmp_path, limit=10**6, report=recorder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["top/" + "x" * 201], "no name of a file"),
        (["top/a\nb"], "no name of a file"),
        (["."], "is no file of any size"),
        (["top/a", "top/a/b"], "two files called `a/b`"),
        (["top/a/b", "top/a"], "two files called `a`"),
    ],
)
def test_names_that_no_folder_can_hold(
    names: list[str], message: str, tmp_path: Path, pack: Any, recorder: Any
) -> None:
    (tmp_path / "bad.tar").write_bytes(pack(dict.fromkeys(names, b""), "w"))
    with pytest.raises(DataFormatError, match=message):
        unpack_tar(tmp_path / "bad.tar", tmp_path, limit=10**6, report=recorder)
    assert everything_in(tmp_path) == {"bad.tar"}


def test_any_failure_of_the_parser_is_damage(tmp_path: Path, pack: Any, recorder: Any) -> None:
    """A size in base 256 that no index can hold is an OverflowError of `tarfile`."""
    content = bytearray(pack({"top/a": b"x"}, "w"))
    content[124:136] = b"\x80" + b"\x7f" * 11
    content[148:156] = b"%06o\0 " % (sum(content[:148]) + 8 * 32 + sum(content[156:512]))
    (tmp_path / "bad.tar").write_bytes(content)
    with pytest.raises(DataFormatError, match=r"bad\.tar is"):
        unpack_tar(tmp_path / "bad.tar", tmp_path, limit=10**6, report=recorder)
