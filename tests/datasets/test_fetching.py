"""Getting a data set from the first source that delivers, and knowing what is there."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from ttapca.datasets import fetch, fetching, find_data_set, inventory, load, sources
from ttapca.datasets.fetching import inspect
from ttapca.datasets.sources import DATA_SETS
from ttapca.errors import DownloadError, OptionError, StorageError

FOLDER = "cifar-10-batches-bin"


def visible(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def refuse(*_, **__):
    raise OSError(30, "Read-only file system")


def test_a_data_set_is_fetched_once_and_replaced_if_damaged(
    tiny_set, server, tmp_path, recorder, monkeypatch, make_images
):
    root = tmp_path / "new" / "root"
    first = fetch(tiny_set, root, recorder)
    assert first.source.startswith("http://127.0.0.1")
    assert (first.holding.folder, first.holding.state) == (root / FOLDER, "verified")
    assert first.holding.size == sum(path.stat().st_size for path in (root / FOLDER).iterdir())
    assert inspect(tiny_set, tiny_set.layouts[0], root / FOLDER) == first.holding
    assert load(root / FOLDER).fingerprint() == make_images(10, seed=1).fingerprint()
    with monkeypatch.context() as read_only:  # what is there needs no writing
        read_only.setattr(fetching, "make_folder", refuse)
        assert fetch(tiny_set, root).source == "already there"
    assert len(server.requests) == 1
    assert visible(root) == [FOLDER]
    assert list((root / ".downloads").iterdir()) == []
    (root / FOLDER / "test_batch.bin").write_bytes(b"damage")
    again = fetch(tiny_set, root, recorder)
    assert again.holding.state == "verified"
    assert again.kept == root / f"{FOLDER}.before-1"
    assert (again.kept / "test_batch.bin").read_bytes() == b"damage"
    assert any("damaged" in note for note in recorder.notes)


def test_an_archive_placed_by_hand(tiny_set, server, tmp_path, recorder):
    placed = tmp_path / "tiny.tar.gz"
    placed.write_bytes(b"wrong")
    assert fetch(tiny_set, tmp_path, recorder).source.startswith("http")
    assert "placed by hand: failed: it has another checksum" in recorder.notes[0]
    placed.write_bytes(server.files["tiny.tar.gz"])
    (tmp_path / FOLDER).rename(tmp_path / "away")
    server.status = 503
    assert fetch(tiny_set, tmp_path, recorder).source == f"{placed}, placed by hand"
    assert placed.exists()


def test_when_every_source_fails_each_has_its_reason(tiny_set, server, tmp_path, recorder):
    root = tmp_path / "root"
    second = dataclasses.replace(tiny_set.archives[0], url=server.url("gone.tar"))
    server.status = 503
    data_set = dataclasses.replace(
        tiny_set, archives=(*tiny_set.archives, second), made_by="make it in {folder}"
    )
    with pytest.raises(DownloadError, match="none delivered") as caught:
        fetch(data_set, root, recorder)
    for words in (
        "- http",
        "the server answers 503",
        "gone.tar",
        "the server answers 404",
        f"put tiny.tar.gz into {root}",
        str(root / FOLDER / "data_batch_1.bin"),
        f"Or make one like it: make it in {root / FOLDER}",
    ):
        assert words in str(caught.value)
    assert visible(root) == []


def test_an_archive_with_other_content_leaves_nothing(tiny_set, server, pack, digest, tmp_path):
    server.files["tiny.tar.gz"] = content = pack({"top/test_batch.bin": b"x"})
    other = dataclasses.replace(tiny_set.archives[0], size=len(content), checksum=digest(content))
    with pytest.raises(DownloadError, match="delivers is damaged: missing: data_batch_1"):
        fetch(dataclasses.replace(tiny_set, archives=(other,)), tmp_path / "root")
    assert visible(tmp_path / "root") == []


def test_a_disk_that_refuses_ends_it_without_other_sources(tiny_set, server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="A file is where a folder should be"):
        fetch(tiny_set, tmp_path / "file")
    huge = dataclasses.replace(tiny_set.archives[0], unpacked_size=10**18)
    with pytest.raises(StorageError, match="MB are needed"):
        fetch(dataclasses.replace(tiny_set, archives=(huge,)), tmp_path / "root")
    assert server.requests == []
    monkeypatch.setattr(sources, "unpack", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        fetch(dataclasses.replace(tiny_set, archives=tiny_set.archives * 2), tmp_path / "root")
    assert len(server.requests) == 1
    assert visible(tmp_path / "root") == []


def test_ctrl_c_at_any_moment_leaves_nothing_half_there(tiny_set, tmp_path, recorder):
    """Stop at the first, second, third ... report, until one run gets through."""
    for moments in range(1000):
        root = tmp_path / f"root-{moments}"
        left = iter(range(moments))

        def stop(*_, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt("stop")

        recorder.note = recorder.advance = stop
        try:
            fetch(tiny_set, root, recorder)
        except KeyboardInterrupt:
            assert visible(root) in ([], [FOLDER])
            if (root / FOLDER).exists():
                assert inspect(tiny_set, tiny_set.layouts[0], root / FOLDER).state == "verified"
        else:
            break
    assert 5 < moments < 999


def test_the_catalogue_is_complete():
    with pytest.raises(OptionError, match=r"called `cifar1O`. Did you mean `cifar10`"):
        find_data_set("cifar1O")
    assert list(DATA_SETS) == ["cifar10", "cifar100", "cifar10-c", "cifar100-c"]
    lengths = {"md5": 32, "sha256": 64}
    for data_set in DATA_SETS.values():
        sums = [archive.checksum for archive in data_set.archives]
        for layout in data_set.layouts:
            sums.extend(layout.checksums.values())
            files = layout.version.files.values() if layout.version else ()
            assert {name for names in files for name in names} <= layout.checksums.keys()
            assert layout.version or len(layout.checksums) == 20  # 19 corruptions and the labels
        for algorithm, digest in (entry.split(":") for entry in sums):
            assert len(digest) == lengths[algorithm]
        assert all(archive.url.startswith("https://") for archive in data_set.archives)


def state_of(data_set, folder):
    holding = inspect(data_set, data_set.layouts[0], folder)
    return holding.state, holding.detail


def test_damaged_files_are_named(tiny_set, tmp_path):
    folder = fetch(tiny_set, tmp_path / "root").holding.folder
    path = folder / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1  # one bit
    path.write_bytes(content)
    assert state_of(tiny_set, folder) == ("damaged", "another checksum: data_batch_2.bin")
    (folder / "test_batch.bin").unlink()
    missing = "missing: test_batch.bin; another checksum: data_batch_2.bin"
    assert state_of(tiny_set, folder) == ("damaged", missing)


def test_the_states_of_cifar_c(tmp_path, digest):
    folder = tmp_path / "CIFAR-10-C"
    assert inventory(tmp_path) == []
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(2, np.uint8))
    np.save(folder / "fog.npy", np.zeros((2, 4, 4, 3), np.uint8))
    (holding,) = inventory(tmp_path)
    assert holding.state == "damaged"
    assert holding.detail.endswith("another checksum: fog.npy, labels.npy")
    sums = dict(DATA_SETS["cifar10-c"].layouts[0].checksums)
    for name in ("fog.npy", "labels.npy"):
        sums[name] = digest((folder / name).read_bytes())
    layout = dataclasses.replace(DATA_SETS["cifar10-c"].layouts[0], checksums=sums)
    holding = inspect(DATA_SETS["cifar10-c"], layout, folder)
    assert (holding.state, holding.detail) == ("partial", "1 of 19 corruptions, all verified")
    (folder / "corruptions.json").write_text(json.dumps({"severities": [1, 5]}))
    generated = ("generated", "1 corruptions, not the publisher's files")
    assert state_of(DATA_SETS["cifar10-c"], folder) == generated
    (folder / "fog.npy").write_bytes(b"torn")
    state, detail = state_of(DATA_SETS["cifar10-c"], folder)
    assert state == "damaged"
    assert "not a plain `.npy` array" in detail
    (folder / "corruptions.json").write_text('{"severities": 3}')
    state, detail = state_of(DATA_SETS["cifar10-c"], folder)
    assert state == "damaged"
    assert "corruptions.json" in detail
