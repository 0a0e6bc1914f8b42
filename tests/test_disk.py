from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ttapca import disk
from ttapca.disk import check_space, locked, make_folder, staged_folder
from ttapca.errors import SourceError, StorageError


def test_a_staged_folder_appears_at_once(tmp_path: Path) -> None:
    target = tmp_path / "data"
    with staged_folder(target) as folder:
        (folder / "a").write_text("1")
        assert folder.parent == tmp_path
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~disk._umask()


def fail_halfway(target: Path, error: BaseException) -> None:
    with staged_folder(target) as folder:
        (folder / "half").write_text("half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt("no"), SourceError("no"), ValueError("no")])
def test_a_failure_leaves_nothing_and_touches_nothing(error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(type(error), match="no"):
        fail_halfway(target, error)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (target / "old").read_text() == "old"


def test_what_was_there_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "data"
    for text in ("1", "2", "3"):
        with staged_folder(target) as folder:
            (folder / "a").write_text(text)
    found = {path.name: (path / "a").read_text() for path in tmp_path.iterdir()}
    assert found == {"data": "3", "data.before-1": "1", "data.before-2": "2"}


def test_what_was_there_can_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "data"
    for text in ("1", "2"):
        with staged_folder(target, keep_old=False) as folder:
            (folder / "a").write_text(text)
    assert {path.name: (path / "a").read_text() for path in tmp_path.iterdir()} == {"data": "2"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_system_refuses_names_the_way_out(number: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{os.strerror(number)}.*--to DIR"):
        fail_halfway(tmp_path / "data", OSError(number, os.strerror(number)))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"), staged_folder(tmp_path / "data"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(StorageError, match="A file is where a folder should be"):
            make_folder(path)


def test_too_little_space_is_known_before(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"1,000,000,000,000 MB are needed in .* MB are free"):
        check_space(tmp_path, 10**18)


KILLED = """
import sys, time
from pathlib import Path
from ttapca.disk import staged_folder
with staged_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    print("started", flush=True)
    time.sleep(60)
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    return process


def test_a_killed_process_leaves_nothing_half_there(tmp_path: Path) -> None:
    target = tmp_path / "data"
    with start(KILLED, str(target)) as process:
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    with staged_folder(target) as folder:
        (folder / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # the leftover is gone too


HOLDER = """
import sys, time
from pathlib import Path
from ttapca.disk import locked
with locked(Path(sys.argv[1])):
    print("started", flush=True)
    time.sleep(60)
"""


def test_two_processes_do_not_fill_one_place(tmp_path: Path) -> None:
    with start(HOLDER, str(tmp_path)) as process:
        with (
            pytest.raises(StorageError, match="another one is at work there"),
            locked(tmp_path),
        ):
            pass
        process.kill()
    entered = False
    for _ in range(100):  # the system frees the lock of a dead process, in its own time
        try:
            with locked(tmp_path):
                entered = True
                break
        except StorageError:
            time.sleep(0.05)
    assert entered


def test_an_error_inside_a_lock_stays_what_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(SourceError, match="of its own"), locked(tmp_path):
        raise SourceError("of its own")
