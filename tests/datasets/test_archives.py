"""Downloads that break off, servers that misbehave, and tar archives that may be hostile."""

from __future__ import annotations

import gzip
import io
import socket
import sys
import tarfile
import tracemalloc

import numpy as np
import pytest

from ttapca.datasets import archives
from ttapca.datasets.archives import download, unpack_tar
from ttapca.datasets.catalog import Archive
from ttapca.errors import DataFormatError, SourceError, StorageError

CONTENT = np.random.default_rng(0).bytes(3_000_000)
PIECE = archives.PIECE_BYTES


@pytest.fixture
def archive(server, digest):
    server.files["data.tar"] = CONTENT
    return Archive("local", server.url("data.tar?download=1"), len(CONTENT), digest(CONTENT), 0)


def files_in(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_download_is_verified_and_fetched_once(archive, server, tmp_path, recorder, capfd):
    server.headers["Content-Encoding"] = "x-gzip"  # some servers say so of every .tar.gz
    for _ in range(2):
        assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert files_in(tmp_path) == {"data.tar": len(CONTENT)}
    assert ("downloading data.tar", len(CONTENT), len(CONTENT)) in recorder.steps
    assert server.requests == [None]
    assert capfd.readouterr() == ("", "")


def test_a_broken_connection_is_continued(archive, server, tmp_path, recorder):
    server.cut_after = 5 * PIECE
    with pytest.raises(SourceError, match=r"broke: .* 983,040 of 3,000,000 bytes have arrived"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {"data.tar.part": 15 * PIECE}
    server.cut_after = 20 * PIECE + 1
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert server.requests[-2:] == [f"bytes={15 * PIECE}-", f"bytes={35 * PIECE}-"]


@pytest.mark.parametrize(
    ("part", "ranges", "requests"),
    [
        (CONTENT[:1_000_000], False, 1),  # a server without ranges sends everything again
        (b"x" * 1_000_000, True, 2),  # a wrong beginning
        (b"x" * 3_000_000, True, 1),  # a wrong file of full length
        (b"x" * 3_000_001, True, 1),
        (CONTENT, True, 0),
    ],
)
def test_what_an_earlier_run_left(part, ranges, requests, archive, server, tmp_path, recorder):
    server.ranges = ranges
    (tmp_path / "data.tar.part").write_bytes(part)
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert len(server.requests) == requests
    assert files_in(tmp_path) == {"data.tar": len(CONTENT)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"data.tar": b"x" * len(CONTENT)}}, "another checksum than the publisher's; it"),
        ({"files": {"data.tar": b"<" * 100}}, "a file of 100 bytes; the publisher's has 3,000"),
        ({"status": 403}, "the server answers 403"),
    ],
)
def test_a_server_that_sends_something_else(changes, message, archive, server, tmp_path, recorder):
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(SourceError, match=message):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}


def test_a_file_without_end_and_one_that_has_become_shorter(
    archive, server, tmp_path, recorder, monkeypatch
):
    server.files["data.tar"], server.stated = CONTENT * 2, False
    with pytest.raises(SourceError, match="sends more than the 3,000,000 bytes"):
        download(archive, tmp_path, recorder)
    server.files["data.tar"], server.stated = CONTENT[:100], True
    (tmp_path / "data.tar.part").write_bytes(CONTENT[:1000])
    with pytest.raises(SourceError, match="a file of 100 bytes"):
        download(archive, tmp_path, recorder)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(SourceError, match=r"needs the package pooch; .*'ttapca\[data\]'"):
        download(archive, tmp_path, recorder)


@pytest.mark.parametrize(
    ("listening", "message"), [(False, "not reachable: Connection refused"), (True, "timed out")]
)
def test_a_server_that_does_not_answer(
    listening, message, server, tmp_path, recorder, digest, monkeypatch
):
    monkeypatch.setattr(archives, "TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.tar"
        (tmp_path / "data.tar.part").write_bytes(b"12345")
        with pytest.raises(SourceError, match=f"{message}.*; 5 of 10 bytes have arrived"):
            download(Archive("local", url, 10, digest(b""), 0), tmp_path, recorder)
    assert files_in(tmp_path) == {"data.tar.part": 5}


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (OSError(28, "No space left on device"), StorageError, r"on device. Free some space"),
    ],
)
def test_what_has_arrived_is_kept(fault, error, message, archive, tmp_path, recorder):
    def stop(task, done, total):
        if done >= total // 2:
            raise fault

    recorder.advance = stop
    with pytest.raises(error, match=message):
        download(archive, tmp_path, recorder)
    part = tmp_path / "data.tar.part"
    assert list(tmp_path.iterdir()) == [part]
    assert CONTENT.startswith(part.read_bytes())


def everything_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


OUTSIDE = ("../escape", "top/../../escape", "/escape", "top\\..\\escape", "C:/escape")
BAD_NAMES = ("top/" + "x" * 101, "top/a\nb", ".")
LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE)
DEVICES = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


@pytest.mark.parametrize(
    "attributes",
    [
        *({"name": name} for name in (*OUTSIDE, *BAD_NAMES)),
        *({"type": kind, "linkname": "/etc/passwd"} for kind in (*LINKS, *DEVICES)),
    ],
    ids=repr,
)
def test_an_entry_that_is_no_plain_file_condemns_the_archive(attributes, tmp_path, recorder, pack):
    content = io.BytesIO(pack({"top/good.txt": b"good"}, "w"))
    with tarfile.open(fileobj=content, mode="a") as tar:
        bad = tarfile.TarInfo("top/bad")
        for name, value in attributes.items():
            setattr(bad, name, value)
        tar.addfile(bad)
    (tmp_path / "bad.tar").write_bytes(content.getvalue())
    (tmp_path / "out").mkdir()
    with pytest.raises(DataFormatError, match=r"bad\.tar is refused: .* leads out of the folder"):
        unpack_tar(tmp_path / "bad.tar", tmp_path / "out", limit=100, report=recorder)
    assert everything_in(tmp_path) == {"bad.tar", "out"}


@pytest.mark.parametrize(
    ("kind", "stated", "size", "message"),
    [
        (tarfile.REGTYPE, 10**7, 10**7, "more than 1,000,000 bytes"),
        (tarfile.DIRTYPE, 10**12, 10**6, "more than 1,000,000 bytes"),
        (tarfile.XHDTYPE, 10**8, 10**8, "header of more than 1,048,576"),
        (tarfile.XGLTYPE, 10**8, 10**8, "header of more than 1,048,576"),
        (tarfile.GNUTYPE_LONGNAME, 10**8, 10**8, "header of more than 1,048,576"),
        (tarfile.GNUTYPE_LONGLINK, 10**8, 10**8, "header of more than 1,048,576"),
    ],
)
def test_a_bomb_is_not_unpacked(kind, stated, size, message, tmp_path, recorder):
    entry = tarfile.TarInfo("top/zeros")
    entry.type, entry.size = kind, stated
    bomb = gzip.compress(entry.tobuf(tarfile.GNU_FORMAT)) + gzip.compress(bytes(size), 1)
    (tmp_path / "bomb.tar.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=rf"bomb\.tar\.gz is refused: .*{message}"):
        unpack_tar(tmp_path / "bomb.tar.gz", tmp_path, limit=10**6, report=recorder)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    assert everything_in(tmp_path) == {"bomb.tar.gz"}


def test_damage_of_any_kind_is_named(tmp_path, pack, recorder, monkeypatch):
    files = {f"top/{n}": bytes(range(256)) * 400 for n in range(5)}
    plain, packed = pack(files, "w"), pack(files)
    # A size in base 256 that no index can hold is an OverflowError of `tarfile`.
    absurd = bytearray(plain)
    absurd[124:136] = b"\x80" + b"\x7f" * 11
    absurd[148:156] = b"%06o\0 " % (sum(absurd[:148]) + 8 * 32 + sum(absurd[156:512]))
    cut = [content[: len(content) * n // 10] for content in (plain, packed) for n in (1, 5, 9)]
    for content in (*cut, packed[:40] + bytes(20) + packed[60:], absurd):
        (tmp_path / "bad.tar").write_bytes(content)
        with pytest.raises(DataFormatError, match=r"bad\.tar is (damaged or truncated|refused)"):
            unpack_tar(tmp_path / "bad.tar", tmp_path, limit=10**9, report=recorder)
    (tmp_path / "bad.tar").write_bytes(plain)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    with pytest.raises(DataFormatError, match="or 3 entries"):
        unpack_tar(tmp_path / "bad.tar", tmp_path, limit=10**9, report=recorder)


def test_files_are_unpacked_without_folders_and_rights(tmp_path, pack, recorder):
    files = {"top/a": b"1", "./top/b": b"2", "c": b"3", "top/in/d": b"4", "top/a/e": b"5"}
    content = io.BytesIO(pack(files, "w"))
    with tarfile.open(fileobj=content, mode="a") as tar:
        program = tarfile.TarInfo("top/run")
        program.mode = 0o4777
        tar.addfile(program)
    (tmp_path / "a.tar").write_bytes(content.getvalue())
    (tmp_path / "out").mkdir()
    unpack_tar(tmp_path / "a.tar", tmp_path / "out", limit=9, report=recorder)
    assert everything_in(tmp_path / "out") == {"a", "b", "c", "run"}
    assert recorder.steps[-1][1:] == (5, 5)
    assert (tmp_path / "out" / "run").stat().st_mode & 0o7133 == 0
