"""What workers are sent, without any worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.worlds import small_subject
from ttapca.datasets import read_digits
from ttapca.engines import artifacts
from ttapca.engines.artifacts import (
    MAPPED_FROM,
    MOST_OPEN,
    folder_beside,
    forget,
    keep_files_in,
    write_artifact,
)
from ttapca.errors import EngineError


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_worker_folders", [])


def test_content_survives_writing_and_opening(tmp_path: Path) -> None:
    subject = small_subject()
    large = np.arange(MAPPED_FROM, dtype=np.float32).reshape(2, -1)
    strided = np.broadcast_to(np.arange(8, dtype=np.uint8), (MAPPED_FROM, 8)).T
    content = {
        "network": subject.network.to(memory_format=torch.channels_last),
        "filter": subject.fitted,
        "arrays": [large, strided, large.astype(">f4"), np.array(["a", None])],
        "made here": lambda number: number + 1,
    }
    found = write_artifact(content, tmp_path, "all sorts").open()
    for one, other in zip(content["arrays"], found["arrays"], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert found["made here"](1) == 2
    for one, other in zip(
        content["network"].parameters(), found["network"].parameters(), strict=True
    ):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert torch.equal(found["filter"].singular_values_, subject.fitted.singular_values_)
    # A write goes into a copy of the page; the file stays as it was.
    found["arrays"][0][:] = -1
    again = write_artifact(content, tmp_path, "all sorts")
    assert again.open() is found
    forget(again)
    again = write_artifact(content, tmp_path, "all sorts")
    np.testing.assert_array_equal(again.open()["arrays"][0], large)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux shows its mappings")
def test_arrays_and_weights_are_mapped(tmp_path: Path) -> None:
    artifact = write_artifact({"pixels": np.zeros(MAPPED_FROM, np.uint8)}, tmp_path, "some pixels")
    maps = Path("/proc/self/maps")
    assert artifact.digest not in maps.read_text()
    found = artifact.open()
    assert artifact.digest in maps.read_text()
    del found
    forget(artifact)
    assert artifact.digest not in maps.read_text()


def test_equal_contents_have_equal_names(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, other = (write_artifact(small_subject().network, folder, "it") for folder in folders)
    assert (one.digest, one.size) == (other.digest, other.size)
    changed = small_subject().network
    with torch.no_grad():
        next(changed.parameters()).view(-1)[0] += 1
    assert write_artifact(changed, tmp_path, "it").digest != one.digest
    assert sorted(path.name for path in folders[0].iterdir()) == [one.digest]


def test_a_part_is_an_artifact_of_its_own(tmp_path: Path) -> None:
    part = read_digits()[:3]
    whole = {"part": part, "again": part}
    inner = write_artifact(part, tmp_path, "the part")
    outer = write_artifact(whole, tmp_path, "the whole", parts={id(part): inner})
    found = outer.open()
    assert found["part"].fingerprint() == part.fingerprint()
    assert found["part"] is found["again"] is inner.open()
    forget(outer)
    forget(inner)
    (tmp_path / inner.digest).unlink()
    with pytest.raises(EngineError, match=r"must see the part; this one does not see .*share"):
        outer.open()


def test_where_a_worker_looks(tmp_path: Path) -> None:
    artifact = write_artifact([1, 2], tmp_path, "numbers")
    assert folder_beside(artifact).parent == tmp_path
    away = dataclasses.replace(artifact, folder=Path("/nowhere"))
    assert away.file() is None
    own = tmp_path / "worker"
    keep_files_in(own)
    own.mkdir()
    (own / artifact.digest).write_bytes((tmp_path / artifact.digest).read_bytes())
    made = folder_beside(away)
    made.mkdir()
    assert (away.file(), made.parent) == (own / artifact.digest, own)
    assert away.open() == [1, 2]
    forget(away)
    assert list(own.iterdir()) == []
    (own / artifact.digest).write_bytes(b"something shorter")
    assert away.file() is None


def test_content_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"get the network as a pickle, .*generator.*in this process"
    ):
        write_artifact({"network": (number for number in [1])}, tmp_path, "the network")


def test_a_file_that_somebody_has_changed_is_not_opened(tmp_path: Path) -> None:
    """It would be unpickled, and so run whatever it says."""
    artifact = write_artifact([1, 2], tmp_path, "numbers")
    path = tmp_path / artifact.digest
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert artifact.file() == path  # of the same size
    with pytest.raises(EngineError, match=r"must be the file that was written.*of your own"):
        artifact.open()


def test_only_some_artifacts_stay_open(tmp_path: Path) -> None:
    numbers = range(MOST_OPEN + 1)
    first, *others = (write_artifact([number], tmp_path, "a number") for number in numbers)
    kept = first.open()
    assert first.open() is kept
    for other in others:
        other.open()
    assert first.open() is not kept
