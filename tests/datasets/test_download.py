from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ttapca.datasets import archives as download_module
from ttapca.datasets.archives import download
from ttapca.datasets.catalog import Archive
from ttapca.errors import SourceError, StorageError

CONTENT = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def archive(server: Any, digest: Any) -> Archive:
    server.files["data.tar"] = CONTENT
    return Archive("local", server.url("data.tar?download=1"), len(CONTENT), digest(CONTENT), 0)


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_a_download_is_verified_and_named(archive: Archive, tmp_path: Path, recorder: Any) -> None:
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert files_in(tmp_path) == {"data.tar": len(CONTENT)}
    assert ("downloading data.tar", len(CONTENT), len(CONTENT)) in recorder.steps


def test_what_is_there_is_not_fetched_again(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    for _ in range(2):
        download(archive, tmp_path, recorder)
    assert server.requests == [None]


def test_a_download_goes_on_where_it_was_cut_off(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    (tmp_path / "data.tar.part").write_bytes(CONTENT[:1_000_000])
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert server.requests == ["bytes=1000000-"]


def test_a_dropped_connection_is_taken_up_in_the_same_run(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.cut_after = 1_200_000
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert server.requests == [None, "bytes=1200000-", "bytes=2400000-"]


def test_a_server_that_keeps_dropping_is_given_up_but_what_came_is_kept(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.cut_after = 500_000
    with pytest.raises(SourceError, match=r"1,500,000 of 3,000,000 bytes have arrived.* goes on"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {"data.tar.part": 1_500_000}
    server.cut_after = None
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_it_all_again(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.ranges = False
    (tmp_path / "data.tar.part").write_bytes(CONTENT[:1_000_000])
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT


def test_a_wrong_beginning_is_thrown_away(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    (tmp_path / "data.tar.part").write_bytes(b"x" * 1_000_000)
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert server.requests == ["bytes=1000000-", None]


@pytest.mark.parametrize("size", [3_000_000, 3_000_001])
def test_a_wrong_part_of_full_length_is_thrown_away(
    size: int, archive: Archive, tmp_path: Path, recorder: Any
) -> None:
    (tmp_path / "data.tar.part").write_bytes(b"x" * size)
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.files["data.tar"] = b"x" * len(CONTENT)
    with pytest.raises(SourceError, match="another checksum than the publisher's; it was removed"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("size", [100, 4_000_000])
def test_a_file_of_another_size_is_not_taken(
    size: int, archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.files["data.tar"] = b"<" * size
    with pytest.raises(SourceError, match=f"a file of {size:,} bytes; the publisher's has 3,000"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}


def test_a_shorter_file_than_what_we_hold(
    archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.files["data.tar"] = CONTENT[:100]
    (tmp_path / "data.tar.part").write_bytes(CONTENT[:1000])
    with pytest.raises(SourceError, match="a file of 100 bytes"):
        download(archive, tmp_path, recorder)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_answer_that_refuses(
    status: int, archive: Archive, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.status = status
    with pytest.raises(SourceError, match=f"the server answers {status}"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_nobody_listens(tmp_path: Path, recorder: Any, digest: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}/data.tar"
    archive = Archive("local", url, 10, digest(b""), 0)
    with pytest.raises(SourceError, match="not reachable: Connection refused"):
        download(archive, tmp_path, recorder)
    (tmp_path / "data.tar.part").write_bytes(b"12345")
    with pytest.raises(SourceError, match="Connection refused; 5 of 10 bytes have arrived"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {"data.tar.part": 5}


def test_a_silent_server(tmp_path: Path, recorder: Any, digest: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.tar"
        with pytest.raises(SourceError, match="timed out"):
            download(Archive("local", url, 10, digest(b""), 0), tmp_path, recorder, timeout=0.1)


def test_ctrl_c_keeps_what_has_arrived(archive: Archive, tmp_path: Path, recorder: Any) -> None:
    def stop(task: str, done: int, total: int) -> None:
        if done >= total // 2:
            raise KeyboardInterrupt("stop")

    recorder.advance = stop
    with pytest.raises(KeyboardInterrupt, match="stop"):
        download(archive, tmp_path, recorder)
    part = tmp_path / "data.tar.part"
    assert list(tmp_path.iterdir()) == [part]
    assert CONTENT.startswith(part.read_bytes())


def test_a_full_disk(
    archive: Archive, tmp_path: Path, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download_module, "_copy", full)
    with pytest.raises(StorageError, match=r"No space left on device. Free some space"):
        download(archive, tmp_path, recorder)
