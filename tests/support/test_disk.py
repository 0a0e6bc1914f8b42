from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ttapca
from oracles import images, small_convnet
from ttapca.errors import SourceError, StorageError
from ttapca.support import disk
from ttapca.support.disk import check_space, locked, make_folder, replace_file, staged_folder


def test_a_staged_folder_appears_at_once(tmp_path: Path) -> None:
    target = tmp_path / "data"
    with staged_folder(target) as folder:
        (folder / "a").write_text("1")
        assert folder.parent == tmp_path
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "other").mkdir()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_system_refuses_names_the_way_out(number: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{os.strerror(number)}.*--to DIR"):
        fail_halfway(tmp_path / "data", OSError(number, os.strerror(number)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match=r"1,000,000,000,000 MB are needed in .* MB are free"):
        check_space(tmp_path, 10**18)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(StorageError, match="A file is where a folder should be"):
            make_folder(path)


def test_a_full_disk_while_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"), staged_folder(tmp_path / "data"):
        pass
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from ttapca.support.disk import locked
with locked(Path(sys.argv[1])):
    print("started", flush=True)
    time.sleep(60)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def can_lock(folder: Path) -> bool:
    try:
        with locked(folder):
            return True
    except StorageError:
        return False


def test_two_processes_do_not_fill_one_place(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout.readline().strip() == "started"
        with pytest.raises(StorageError, match="another one is at work"), locked(tmp_path):
            pass
        process.kill()
    for _ in range(1200):  # the system releases the lock of a dead process a little later
        if can_lock(tmp_path):
            break
        time.sleep(0.05)
    assert can_lock(tmp_path)


# Forks a writer that dies before its n-th call to the operating system, for every n, and tells what
# is found afterwards. Of the kernel's own steps, each ends before the next begins.
DIES_EVERYWHERE = """
import json, os, shutil, sys, tempfile
from pathlib import Path
from ttapca.support import disk

keep_old = sys.argv[1] == "True"
CALLS = ("open", "os.", "shutil.", "tempfile.")

def write(target, text):
    with disk.staged_folder(target, keep_old=keep_old) as folder:
        for name in "ab":
            (folder / name).write_text(text)

def content(folder):
    names = sorted(os.listdir(folder)) if folder.is_dir() else None
    return names and [(folder / name).read_text() for name in names]

def one_that_dies(target, step):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = 0
    def count(event, _):
        nonlocal calls
        calls += event.startswith(CALLS)
        if calls > step:
            os._exit(9)
    sys.addaudithook(count)
    write(target, "new")
    os._exit(0)

found, step, code = [], 0, 9
while code:
    root = Path(tempfile.mkdtemp())
    target = root / "a filter[1]"
    write(target, "old")
    code = one_that_dies(target, step)
    at_once = content(target)
    disk.recover(target)
    recovered = content(target)
    write(target, "next")
    after = {path.name: content(path) for path in root.iterdir()}
    found.append([code, at_once, recovered, after])
    shutil.rmtree(root)
    step += 1
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked for every point of death")
@pytest.mark.parametrize("keep_old", [True, False])
def test_a_writer_that_dies_anywhere_leaves_the_old_or_the_new_one(keep_old: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES_EVERYWHERE, str(keep_old)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    codes, at_once, recovered, after = zip(*found, strict=True)
    old, new = ["old", "old"], ["new", "new"]
    assert len(found) > 10
    assert codes == (9,) * (len(found) - 1) + (0,)
    assert set(map(str, at_once)) == {str(old), str(new), "None"}
    assert set(map(str, recovered)) == {str(old), str(new)}
    for names in after:  # the next writer, and what it clears away
        assert names.pop("a filter[1]") == ["next", "next"]
        if keep_old:
            assert old in names.values()
            assert all(name.startswith("a filter[1].before-") for name in names)
        else:
            assert names == {}


@pytest.mark.parametrize("what", ["file", "link"])
def test_a_file_or_a_link_is_replaced_as_well(what: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = tmp_path / "here" / "data"
    target.parent.mkdir()
    if what == "file":
        target.touch()
    else:
        target.symlink_to(elsewhere, target_is_directory=True)
    with staged_folder(target, keep_old=False) as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in target.parent.iterdir()] == ["data"]
    assert not target.is_symlink()
    assert elsewhere.is_dir()


def test_renames_that_are_refused_leave_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "data"
    with staged_folder(target) as folder:
        (folder / "a").write_text("old")
    rename = os.rename
    for refused in ("data", ".data.ttapca-whole-"):

        def refuse(one: Any, other: Any, refused: str = refused) -> None:
            if Path(one).name.startswith(refused) and not Path(one).name.endswith("-old"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            rename(one, other)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            with (
                pytest.raises(StorageError, match="You may not write there"),
                staged_folder(target),
            ):
                pass
        disk.recover(target)
        assert (target / "a").read_text() == "old"


def test_what_was_left_beside_its_place_is_found_by_a_load(tmp_path: Path) -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", images(60), 5)
    fitted.save(tmp_path / "filter")
    (tmp_path / "filter").rename(tmp_path / f".filter{disk.WHOLE_MARK}x")
    assert ttapca.load(tmp_path / "filter").n_components_ == 5
    assert [path.name for path in tmp_path.iterdir()] == ["filter"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    replace_file(pipe, b"all of it")
    reader.join()
    assert read == [b"all of it"]
    assert pipe.is_fifo()
    with pytest.raises(StorageError, match="Is a directory"):
        replace_file(tmp_path, b"")


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    make_folder(file.parent)
    for content, made in ((b"new", "where a link leads nowhere yet"), (b"newer", "in its place")):
        link.unlink(missing_ok=True)
        link.symlink_to(file)
        replace_file(link, content)
        assert link.is_symlink(), made
        assert file.read_bytes() == content


# Two processes write one file over and over, and this one reads it until both have ended.
WRITERS = """
import os, sys
from pathlib import Path
from ttapca.support.disk import replace_file

target, contents = Path(sys.argv[1]), (b"one" * 1000, b"two" * 2000)
replace_file(target, contents[0])

def write(content):
    if os.fork():
        return
    try:
        for _ in range(50):
            replace_file(target, content)
    except BaseException as error:
        print(repr(error), flush=True)
    os._exit(0)

for content in contents:
    write(content)
ended = 0
while ended < 2:
    ended += os.waitpid(-1, os.WNOHANG)[0] > 0
    if target.read_bytes() not in contents:
        print("torn", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_processes_that_write_one_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path / "target")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_writer_that_waited_for_a_lock_that_is_gone_waits_for_the_next(tmp_path: Path) -> None:
    target, order = tmp_path / "data", ["first"]

    def write(name: str) -> None:
        with staged_folder(target, keep_old=False) as folder:
            order.append(name)
            (folder / "a").write_text(name)

    with staged_folder(target) as folder:
        others = [threading.Thread(target=write, args=(str(number),)) for number in range(3)]
        for other in others:
            other.start()
        (folder / "a").write_text("first")
        assert order == ["first"]
    for other in others:
        other.join()
    assert sorted(order) == ["0", "1", "2", "first"]
    assert (target / "a").read_text() == order[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_where_there_are_no_locks_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    other = tmp_path / f".data{disk.STAGING_MARK}other"
    other.mkdir()
    with staged_folder(tmp_path / "data") as folder:
        (folder / "a").write_text("1")
    replace_file(tmp_path / "file", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "data", "file"]
