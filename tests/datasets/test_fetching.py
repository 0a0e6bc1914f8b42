from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ttapca.datasets import fetching, load
from ttapca.datasets.catalog import DATA_SETS, find_data_set
from ttapca.datasets.fetching import fetch
from ttapca.datasets.catalog import DataSet
from ttapca.errors import DownloadError, OptionError, StorageError

FOLDER = "cifar-10-batches-bin"


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_a_data_set_is_fetched_once(
    tiny_set: DataSet, server: Any, tmp_path: Path, recorder: Any
) -> None:
    root = tmp_path / "new" / "root"
    first = fetch(tiny_set, root, recorder)
    assert first.source.startswith("local, http://127.0.0.1")
    assert first.holding.folder == root / FOLDER
    assert first.holding.state == "verified"
    assert load(root / FOLDER).fingerprint() == tiny_set.splits["test"].fingerprint
    assert fetch(tiny_set, root, recorder).source == "already there"
    assert len(server.requests) == 1
    assert visible(root) == [FOLDER]
    assert not list((root / ".downloads").rglob("*.tar.gz"))


def test_what_is_there_needs_no_writing(
    tiny_set: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(tiny_set, tmp_path)

    def refuse(path: Path) -> None:
        raise StorageError(f"{path} is read-only")

    monkeypatch.setattr(fetching, "make_folder", refuse)
    assert fetch(tiny_set, tmp_path).source == "already there"
    with pytest.raises(StorageError, match="is read-only"):
        fetch(tiny_set, tmp_path / "new")


def test_it_works_without_a_reporter(tiny_set: DataSet, tmp_path: Path) -> None:
    assert fetch(tiny_set, tmp_path / "root").holding.name == "tiny"


def test_a_damaged_set_is_replaced_and_kept(
    tiny_set: DataSet, tmp_path: Path, recorder: Any
) -> None:
    fetch(tiny_set, tmp_path, recorder)
    (tmp_path / FOLDER / "test_batch.bin").write_bytes(b"damage")
    fetched = fetch(tiny_set, tmp_path, recorder)
    assert fetched.holding.state == "verified"
    assert fetched.kept == tmp_path / f"{FOLDER}.before-1"
    assert (fetched.kept / "test_batch.bin").read_bytes() == b"damage"
    assert any("damaged" in note for note in recorder.notes)


def test_an_archive_placed_by_hand(
    tiny_set: DataSet, server: Any, tmp_path: Path, recorder: Any
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    placed = root / "tiny.tar.gz"
    placed.write_bytes(server.files["tiny.tar.gz"])
    server.status = 503
    assert fetch(tiny_set, root, recorder).source == f"{placed}, placed by hand"
    assert placed.exists()


def test_a_wrong_archive_placed_by_hand_does_not_stop_the_others(
    tiny_set: DataSet, tmp_path: Path, recorder: Any
) -> None:
    (tmp_path / "tiny.tar.gz").write_bytes(b"wrong")
    assert fetch(tiny_set, tmp_path, recorder).source.startswith("local")
    assert "placed by hand: failed: it has another checksum" in recorder.notes[0]


def test_when_every_source_fails_each_has_its_reason(
    tiny_set: DataSet, server: Any, tmp_path: Path, recorder: Any
) -> None:
    second = dataclasses.replace(tiny_set.archives[0], title="second", url=server.url("gone.tar"))
    server.status = 503
    data_set = dataclasses.replace(
        tiny_set, archives=(*tiny_set.archives, second), made_by="make it in {folder}"
    )
    with pytest.raises(DownloadError, match="none delivered") as caught:
        fetch(data_set, tmp_path / "root", recorder)
    message = str(caught.value)
    assert "- local, http" in message
    assert "the server answers 503" in message
    assert "- second, http" in message
    assert "the server answers 404" in message
    assert "By hand: download" in message
    assert f"Or make one like it: make it in {tmp_path / 'root' / FOLDER}" in message
    assert f"put tiny.tar.gz into {tmp_path / 'root'}" in message
    assert str(tmp_path / "root" / FOLDER / "data_batch_1.bin") in message
    assert visible(tmp_path / "root") == []


def with_archive(data_set: DataSet, server: Any, content: bytes, digest: Any) -> DataSet:
    """The same data set, whose publisher now offers another archive."""
    server.files["tiny.tar.gz"] = content
    archive = dataclasses.replace(data_set.archives[0], size=len(content), checksum=digest(content))
    return dataclasses.replace(data_set, archives=(archive,))


def test_a_hostile_archive_leaves_nothing(
    tiny_set: DataSet, server: Any, pack: Any, digest: Any, tmp_path: Path, recorder: Any
) -> None:
    hostile = with_archive(tiny_set, server, pack({"../escape": b"x"}), digest)
    with pytest.raises(DownloadError, match="leads out of the folder"):
        fetch(hostile, tmp_path / "root", recorder)
    assert visible(tmp_path / "root") == []
    assert not (tmp_path / "escape").exists()


def test_an_archive_with_other_content_leaves_nothing(
    tiny_set: DataSet, server: Any, pack: Any, digest: Any, tmp_path: Path, recorder: Any
) -> None:
    other = with_archive(tiny_set, server, pack({"top/test_batch.bin": b"x"}), digest)
    with pytest.raises(DownloadError, match="what it delivers is damaged: missing: data_batch_1"):
        fetch(other, tmp_path / "root", recorder)
    assert visible(tmp_path / "root") == []


def test_a_file_in_the_place_of_the_root(tiny_set: DataSet, tmp_path: Path, recorder: Any) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(StorageError, match="A file is where a folder should be"):
        fetch(tiny_set, tmp_path / "root", recorder)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_ends_it_without_other_sources(
    number: int,
    tiny_set: DataSet,
    server: Any,
    tmp_path: Path,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetching, "unpack_tar", refuse)
    data_set = dataclasses.replace(tiny_set, archives=tiny_set.archives * 2)
    with pytest.raises(StorageError, match=os.strerror(number)):
        fetch(data_set, tmp_path / "root", recorder)
    assert len(server.requests) == 1
    assert visible(tmp_path / "root") == []


def test_too_little_space_is_said_before_the_download(
    tiny_set: DataSet, server: Any, tmp_path: Path, recorder: Any
) -> None:
    huge = dataclasses.replace(tiny_set.archives[0], unpacked_limit=10**18)
    with pytest.raises(StorageError, match="MB are needed"):
        fetch(dataclasses.replace(tiny_set, archives=(huge,)), tmp_path / "root", recorder)
    assert server.requests == []


def test_ctrl_c_at_any_moment_leaves_nothing_half_there(
    tiny_set: DataSet, tmp_path: Path, recorder: Any
) -> None:
    """Stop at the first, second, third ... report, until one run gets through."""
    moments = 0
    while True:
        root = tmp_path / f"root-{moments}"
        left = iter(range(moments))

        def stop(*_: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt("stop")

        recorder.note = recorder.advance = stop
        try:
            fetch(tiny_set, root, recorder)
        except KeyboardInterrupt:
            assert visible(root) in ([], [FOLDER])
            if (root / FOLDER).exists():
                assert fetch(tiny_set, root).source == "already there"
            moments += 1
        else:
            break
    assert moments > 5


def test_an_unknown_name_gets_near_names() -> None:
    with pytest.raises(OptionError, match=r"called `cifar1O`. Did you mean `cifar10`"):
        find_data_set("cifar1O")


def test_the_catalogue_is_complete() -> None:
    assert list(DATA_SETS) == ["cifar10", "cifar100", "cifar10-c", "cifar100-c"]
    lengths = {"md5": 32, "sha256": 64}
    for data_set in DATA_SETS.values():
        sums = [archive.checksum for archive in data_set.archives]
        for layout in data_set.layouts:
            sums.extend(layout.checksums.values())
        for algorithm, digest in (entry.split(":") for entry in sums):
            assert len(digest) == lengths[algorithm]
        assert all(archive.url.startswith("https://") for archive in data_set.archives)
    for name in ("cifar10-c", "cifar100-c"):
        assert len(DATA_SETS[name].layouts[0].checksums) == 20  # nineteen corruptions and labels
