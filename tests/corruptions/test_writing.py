"""Writing the layout: whole files, the same bytes for any number of processes, and resuming."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ttapca.corruptions import corrupt
from ttapca.corruptions.writing import Export
from ttapca.datasets import read_cifar_c
from ttapca.engines import Lost
from ttapca.errors import (
    DataFormatError,
    DataNotFoundError,
    OptionError,
    ShapeError,
    StorageError,
    TtapcaError,
)
from ttapca.support.disk import locked

NAMES = ("fog", "contrast", "impulse_noise")
OTHERS = {"labels.npy", "corruptions.json"}


@pytest.fixture
def export(images, tmp_path) -> Export:
    return Export(images, np.arange(12), tmp_path / "out", NAMES)


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def test_the_layout_is_the_official_one(export, images):
    export.run()
    assert set(contents(export.to)) == {*(f"{name}.npy" for name in NAMES), *OTHERS}
    labels = np.load(export.to / "labels.npy", allow_pickle=False)
    assert labels.dtype == np.uint8
    assert (labels == np.tile(np.arange(12), 5)).all()
    for name in NAMES:
        blocks = np.load(export.path(name), mmap_mode="r", allow_pickle=False)
        assert blocks.shape == (60, 32, 32, 3)
        assert blocks.dtype == np.uint8
        for severity in range(1, 6):
            block = blocks[12 * (severity - 1) : 12 * severity]
            assert (block == corrupt(images, name, severity)).all()


def test_the_bytes_do_not_depend_on_processes_nor_on_tasks(export, images, tmp_path, monkeypatch):
    export.run()
    monkeypatch.setattr("ttapca.corruptions.writing._PIXELS_PER_TASK", 5 * 32 * 32)
    other = Export(images, np.arange(12), tmp_path / "other", NAMES)
    seen = []
    other.run(jobs=2, progress=lambda name, done, total: seen.append((name, done, total)))
    assert contents(other.to) == contents(export.to)
    assert {name for name, done, total in seen if done == total == 60} == set(NAMES)


def test_fewer_severities_make_fewer_blocks(images, tmp_path):
    Export(images, np.arange(12), tmp_path, ("fog",), severities=(2, 5)).run()
    blocks = np.load(tmp_path / "fog.npy")
    assert (blocks[12:] == corrupt(images, "fog", 5)).all()
    assert np.load(tmp_path / "labels.npy").shape == (24,)
    assert json.loads((tmp_path / "corruptions.json").read_text())["severities"] == [2, 5]


def test_large_images_and_a_thousand_classes(make_images, tmp_path):
    images, labels = make_images(3, 96, 120), np.array([999, 0, 255])
    Export(images, labels, tmp_path, ("contrast",), severities=(3, 4)).run()
    assert json.loads((tmp_path / "corruptions.json").read_text())["table"] == "imagenet-c"
    assert np.load(tmp_path / "labels.npy").dtype == np.uint16
    found = read_cifar_c(tmp_path, "contrast", 4)
    assert found.labels.tolist() == [999, 0, 255]
    assert (found.images == corrupt(images, "contrast", 4, table="imagenet-c")).all()
    other = Export(images, labels, tmp_path, ("contrast",), severities=(3, 4), table="cifar-c")
    with pytest.raises(OptionError, match="begun with table = 'imagenet-c', and now it is 'cifar"):
        other.run()
    (tmp_path / "labels.npy").unlink()
    Export(images, labels, tmp_path, ("contrast",), severities=(3, 4)).run()
    assert (tmp_path / "labels.npy").is_file()


def test_finished_files_are_kept_and_others_made_again(export):
    export.run()
    before = contents(export.to)
    marks = {each: each.stat().st_mtime_ns for each in export.to.iterdir()}
    export.path("fog").write_bytes(before["fog.npy"][:-1])  # torn by something else
    (export.to / ".contrast.npy.ttapca-unfinished-").write_bytes(b"left by a killed run")
    assert export.missing() == ("fog",)
    export.run()
    assert contents(export.to) == before
    kept = [each for each in marks if each.name != "fog.npy"]
    assert all(each.stat().st_mtime_ns == marks[each] for each in kept)
    dataclasses.replace(export, corruptions=("pixelate", "fog")).run()  # more can be added later
    assert (export.to / "pixelate.npy").is_file()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed = 0, and now it is 1"),
        ({"severities": (1,)}, "severities ="),
        ({"labels": np.zeros(12, int)}, "labels_sha256 ="),
    ],
)
def test_other_options_are_refused(export, change, named):
    export.run()
    before = contents(export.to)
    with pytest.raises(OptionError, match=f"files of one run only; .* was begun with {named}"):
        dataclasses.replace(export, **change).run()
    assert contents(export.to) == before


def test_what_a_folder_holds_from_elsewhere(export):
    export.to.mkdir()
    (export.to / "fog.npy").write_bytes(b"official")
    with pytest.raises(OptionError, match=r"holds fog\.npy from elsewhere"):
        export.run()
    assert contents(export.to) == {"fog.npy": b"official"}
    (export.to / "corruptions.json").write_text("{}")
    with pytest.raises(DataFormatError, match=r"json must be the one that a run wrote"):
        export.run()


def test_too_little_disk_stops_before_the_first_byte(export, monkeypatch):
    class Full:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Full)
    with pytest.raises(StorageError, match=r"1 MB are needed .*; only 0 MB are free\. Free"):
        export.run()
    assert contents(export.to) == {}


def test_a_disk_that_fills_up_leaves_no_torn_file(export, monkeypatch):
    export.run()
    (export.to / "fog.npy").unlink()
    before = contents(export.to)

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match=r"Cannot write to .*: No space left on device"):
        export.run()
    assert contents(export.to) == before


def test_a_simple_file_system_will_do(export, monkeypatch):
    def unsupported(*_arguments):
        raise OSError(errno.EBADF, "not here")

    monkeypatch.setattr("fcntl.flock", unsupported)
    export.run()
    assert export.missing() == ()


def test_a_failing_worker_process_leaves_no_torn_file(export, monkeypatch):
    """The file vanishes under the workers: the system's answer comes back from their process."""
    elsewhere = SimpleNamespace(offset=128)
    monkeypatch.setattr("numpy.lib.format.open_memmap", lambda *_arguments: elsewhere)
    with pytest.raises(StorageError, match=r"Cannot write to .*: No such file or directory"):
        export.run(jobs=2)
    assert set(contents(export.to)) == OTHERS


def test_a_folder_that_cannot_be_used_is_named(export, images, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"Cannot write to .*: Not a directory"):
        Export(images, np.arange(12), tmp_path / "file" / "out", NAMES).run()
    export.to.mkdir()
    with locked(export.to), pytest.raises(StorageError, match="another one is at work"):
        export.run()


def test_an_interrupt_leaves_whole_files_only(export):
    def interrupt(name, done, total):
        if name == "contrast":
            raise KeyboardInterrupt("by the user")

    with pytest.raises(KeyboardInterrupt, match="by the user"):
        export.run(progress=interrupt)
    assert set(contents(export.to)) <= {"fog.npy", "contrast.npy", *OTHERS}
    export.run()
    assert export.missing() == ()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": np.zeros((0, 32, 32, 3), np.uint8)}, ShapeError, "at least one image"),
        ({"labels": np.arange(3)}, ShapeError, r"one label for each image, \(12,\); found \(3,\)"),
        ({"labels": 7000 * np.arange(12)}, ShapeError, "from 0 to 65,535; found 0 to 77000"),
        (
            {"corruptions": ("frost",), "table": "imagenet-c"},
            DataNotFoundError,
            "ttapca data get frost",
        ),
        ({"corruptions": ("fogg",)}, OptionError, "Did you mean `fog`"),
        ({"corruptions": ()}, OptionError, "`corruptions` must be"),
        ({"severities": ()}, OptionError, "`severities` must be"),
        ({"severities": (1, 6)}, OptionError, r"`severities\[1\]` must be .* from 1 to 5; found 6"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(export, change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(export, **change).run()
    assert not export.to.exists()


def test_a_killed_worker_is_an_error_with_a_remedy(export, monkeypatch):
    class Killing:
        def run(self, tasks, _work):
            yield Lost(next(tasks), "its process was killed")

    monkeypatch.setattr("ttapca.corruptions.writing.engine_of", lambda _words: Killing())
    with pytest.raises(TtapcaError, match=r"was killed\. .*run the same command again"):
        export.run(jobs=2)
    assert set(contents(export.to)) == OTHERS


SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
from ttapca.corruptions.writing import Export
def progress(name, done, total):
    print(name, done, total, flush=True)
    if (name, done) == ("contrast", total):
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    images = np.full((2000, 32, 32, 3), 90, np.uint8)
    names = ("contrast", "shot_noise")
    export = Export(images, np.zeros(2000, int), Path(sys.argv[1]), names)
    export.run(jobs=2, progress=progress)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    script, to = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(to)]
    # It kills itself once the first file is whole. The pipe ends when the last worker has ended,
    # which it must by itself.
    killed = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in to.glob(".*.ttapca-unfinished-")] == [
        ".shot_noise.npy.ttapca-unfinished-"
    ]
    first = to / "contrast.npy"
    mark = first.stat().st_mtime_ns
    time.sleep(0.01)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "contrast" not in done.stdout
    assert first.stat().st_mtime_ns == mark
    assert not list(to.glob(".*"))
    assert np.load(to / "shot_noise.npy", mmap_mode="r").shape == (10000, 32, 32, 3)
