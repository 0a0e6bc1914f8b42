"""`ttapca data` as a user meets it: words in, text and an exit code out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ttapca.cli.app import run
from ttapca.cli.arguments import cache_root
from ttapca.datasets import load
from ttapca.datasets.sources import DATA_SETS

FOLDER = "cifar-10-batches-bin"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def known(tiny_set, monkeypatch):
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set)
    return tiny_set


def test_get_then_list(known, home, capsys):
    assert run(["data", "get", "tiny"]) == 0
    text = capsys.readouterr()
    assert text.out.split("  ")[:2] == ["tiny", str(home / FOLDER)]
    assert "verified  (source: http://127.0.0.1" in text.out
    assert "tiny: http://127.0.0.1" in text.err
    assert len(load("tiny", root=home)) == 10
    assert run(["data", "get", "tiny"]) == 0
    assert "(source: already there)" in capsys.readouterr().out
    assert run(["data", "list"]) == 0
    text = capsys.readouterr()
    assert f"Data sets in {home}" in text.out
    assert "0.1 MB  verified: 6 files with the publisher's checksums" in text.out
    assert "cifar100-c           -  not there; get it with: ttapca data get cifar100-c" in text.out
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


def test_another_folder(known, home, tmp_path, capsys):
    there = tmp_path / "there"
    assert run(["data", "get", "tiny", "--to", str(there)]) == 0
    assert not home.exists()
    (there / FOLDER / "test_batch.bin").unlink()
    capsys.readouterr()
    assert run(["data", "list", "--in", str(there)]) == 0
    assert "damaged: missing: test_batch.bin" in capsys.readouterr().out
    assert run(["data", "get", "tiny", "--to", str(there)]) == 0
    assert "is kept as" in capsys.readouterr().err


def test_a_failure_has_a_message_and_a_code(known, server, home, capsys):
    assert run(["data", "get", "cifar1"]) == 2
    assert "error: No data set is called `cifar1`. Did you mean" in capsys.readouterr().err
    server.status = 503
    assert run(["data", "get", "tiny"]) == 1
    assert "error: tiny must come from one of its sources" in capsys.readouterr().err
    assert not (home / FOLDER).exists()


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a parent ignores
from ttapca.cli import main
from ttapca.datasets.sources import DATA_SETS, Archive
import dataclasses
archive = Archive(sys.argv.pop(1), 10, "sha256:0", 10)
DATA_SETS["cifar10"] = dataclasses.replace(DATA_SETS["cifar10"], archives=(archive,), npm=None)
main()
"""


def test_ctrl_c(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(300)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/slow.tar"
        settings = {"PYTHONPATH": os.pathsep.join(sys.path), "TTAPCA_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, url, "data", "get", "cifar10"],
            env={**os.environ, "no_proxy": "127.0.0.1", **settings},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=300)
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
def test_where_the_cache_is(variables, expected, monkeypatch):
    for name in ("TTAPCA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)
