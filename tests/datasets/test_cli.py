"""`ttapca data` as a user meets it: words in, text and an exit code out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ttapca.cli.app import run
from ttapca.cli.arguments import cache_root
from ttapca.datasets import fetching, load
from ttapca.datasets.catalog import DATA_SETS
from ttapca.datasets.sources import DataSet

FOLDER = "cifar-10-batches-bin"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def known(tiny_set: DataSet, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set)  # type: ignore[arg-type]
    return tiny_set


def test_get_then_list(known: DataSet, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "get", "tiny"]) == 0
    text = capsys.readouterr()
    assert text.out.split("  ")[:2] == ["tiny", str(home / FOLDER)]
    assert "verified  (source: local, http://127.0.0.1" in text.out
    assert "tiny: local, http://127.0.0.1" in text.err
    assert load("tiny", root=home).fingerprint() == known.splits["test"].fingerprint
    assert run(["data", "get", "tiny"]) == 0
    assert "(source: already there)" in capsys.readouterr().out
    assert run(["data", "list"]) == 0
    text = capsys.readouterr()
    assert f"Data sets in {home}" in text.out
    assert "0.1 MB  verified: 6 files with the publisher's checksums" in text.out
    assert "cifar100-c           -  not there; get it with: ttapca data get cifar100-c" in text.out


def test_list_as_json(known: DataSet, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["data", "get", "tiny"])
    capsys.readouterr()
    assert run(["data", "list", "--json"]) == 0
    by_name = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert by_name["tiny"] == {
        "name": "tiny",
        "layout": "binary version",
        "folder": str(home / FOLDER),
        "bytes": sum(path.stat().st_size for path in (home / FOLDER).iterdir()),
        "state": "verified",
        "detail": "6 files with the publisher's checksums",
    }


def test_another_folder(
    known: DataSet, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "get", "tiny", "--to", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / FOLDER).is_dir()
    assert not home.exists()
    (tmp_path / "there" / FOLDER / "test_batch.bin").unlink()
    capsys.readouterr()
    assert run(["data", "list", "--in", str(tmp_path / "there")]) == 0
    assert "damaged: missing: test_batch.bin" in capsys.readouterr().out
    assert run(["data", "get", "tiny", "--to", str(tmp_path / "there")]) == 0
    assert "is kept as" in capsys.readouterr().err


def test_an_unknown_name_is_a_call_that_makes_no_sense(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "get", "cifar1"]) == 2
    assert "error: No data set is called `cifar1`. Did you mean" in capsys.readouterr().err
    assert not home.exists()


def test_every_source_fails(
    known: DataSet, server: Any, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 503
    assert run(["data", "get", "tiny"]) == 1
    error = capsys.readouterr().err
    assert "error: tiny must come from one of its sources; none delivered:" in error
    assert "the server answers 503" in error
    assert "By hand: download" in error


def test_a_file_where_the_home_should_be(
    known: DataSet, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.touch()
    assert run(["data", "get", "tiny"]) == 1
    assert "error: Cannot write to" in capsys.readouterr().err


def test_a_full_disk(
    known: DataSet,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetching, "unpack_tar", full)
    assert run(["data", "get", "tiny"]) == 1
    assert "No space left on device. Free some space" in capsys.readouterr().err
    assert not (home / FOLDER).exists()


INTERRUPTED = """
import sys
from ttapca.cli import main
from ttapca.datasets.catalog import CIFAR10, DATA_SETS
from ttapca.datasets.sources import Archive
import dataclasses
archive = Archive("slow", sys.argv.pop(1), 10, "sha256:0", 10)
DATA_SETS["cifar10"] = dataclasses.replace(CIFAR10, archives=(archive,), npm=None)
main()
"""


def test_ctrl_c(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/slow.tar"
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, url, "data", "get", "cifar10"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "TTAPCA_HOME": str(tmp_path),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "cifar10: stopped; the same command goes on from here" in error
    assert error.endswith("interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == [".downloads"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TTAPCA_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"TTAPCA_HOME": "", "XDG_CACHE_HOME": "/b"}, "/b/ttapca"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/ttapca"),
        ({"TTAPCA_HOME": "~/d", "HOME": "/c"}, "/c/d"),
    ],
)
def test_where_the_cache_is(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TTAPCA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)
