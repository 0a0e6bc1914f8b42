"""Files and folders that appear whole or not at all, locks, and errors that say the way out."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from ttapca.errors import StorageError

if sys.platform != "win32":  # Windows has no such locks
    import fcntl

STAGING_MARK = ".ttapca-unfinished-"
WHOLE_MARK = ".ttapca-whole-"  # in the name of a folder that is complete, but not in its place
LOCK_MARK = ".ttapca-lock"

Found = TypeVar("Found")

PLACE = "choose another place with `--to DIR`."
ADVICE = {
    errno.ENOSPC: f"Free some space, or {PLACE}",
    errno.EDQUOT: f"Your quota is used up; {PLACE}",
    errno.EROFS: f"It is read-only; {PLACE}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"You may not write there; {PLACE}"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), f"A file is where a folder should be: move it, or {PLACE}"
    ),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into `StorageError`, with the place and advice."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # one of our own errors, which has advice already
            raise
        advice = ADVICE.get(error.errno, "Choose another place with `--to DIR`.")
        raise StorageError(f"Cannot write to {path}: {error.strerror}. {advice}") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, or raise `StorageError`."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_space(folder: Path, needed: int) -> None:
    """Raise `StorageError` unless an existing folder's disk has this many bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{needed / 1e6:,.0f} MB are needed in {folder}; only {free / 1e6:,.0f} MB are free. "
            f"{ADVICE[errno.ENOSPC]}"
        )


@contextmanager
def _lock_on(handle: int, if_taken: Callable[[], None]) -> Iterator[None]:
    """Lock an open file; the operating system releases the lock of a process that died."""
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if_taken()
        except OSError:
            pass  # a network file system without locks
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of an existing folder: it gets a `StorageError`."""

    def refuse() -> None:
        raise StorageError(
            f"One process at a time may fill {folder}; another one is at work there. Wait for it "
            "to end, or choose another place with `--to DIR`."
        )

    if sys.platform == "win32":
        yield
        return
    with _lock_on(os.open(folder, os.O_RDONLY), refuse):
        yield


@contextmanager
def queued(lock: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Wait until no other process holds this lock, a file; `waiting` is told which one does."""
    if sys.platform == "win32":
        yield
        return
    with writing(lock):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)

    def wait() -> None:
        if waiting is not None:
            waiting(os.pread(handle, 1000, 0).decode(errors="replace") or "another process")
        fcntl.flock(handle, fcntl.LOCK_EX)

    with _lock_on(handle, wait):
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        holder = f"process {os.getpid()} on {platform.node()}, since {started}"
        os.ftruncate(handle, 0)
        os.pwrite(handle, holder.encode(), 0)
        yield


@contextmanager
def staged_folder(target: Path, *, keep_old: bool = True) -> Iterator[Path]:
    """Yield a folder to fill, and move it to `target` when the block ends."""
    # Processes take turns. One that is killed leaves either the old folder or the new one,
    # complete, at `target` or beside it, from where `recover` puts it back. `keep_old` renames the
    # old folder.
    with writing(target), _turn_at(target) as alone:
        _recover(target)
        staging = _new_staging(target, alone=alone)
        try:
            staging.mkdir()
            yield staging
            for path in (*staging.rglob("*"), staging):
                flush(path)
            replaced = _put_in_place(staging, target)
            flush(target.parent)
        finally:
            _remove(staging)
        # First the folder that this process replaced, then leftovers of a killed process.
        for old in (*replaced, *(_beside(target, WHOLE_MARK) if alone else ())):
            if not keep_old:
                _remove(old)
            elif old.exists():
                old.rename(spare_name(target))


def recover(target: Path) -> None:
    """Put back a folder of a process that was killed between the renames; of two, the new one."""
    if not os.path.lexists(target) and _beside(target, WHOLE_MARK):
        with _turn_at(target):  # of a process that is at work between these renames
            _recover(target)


def _recover(target: Path) -> None:
    if not os.path.lexists(target):
        for whole in _beside(target, WHOLE_MARK)[:1]:
            whole.rename(target)


@contextmanager
def _turn_at(target: Path) -> Iterator[bool]:
    """Let one process or thread at a time write to a place; yield False without such locks."""
    if sys.platform == "win32":
        yield False
        return
    # A file beside the place, which its holder removes before letting go of it. After waiting for
    # one that is gone, one waits again.
    lock = target.with_name(f".{target.name}{LOCK_MARK}")
    while True:
        with lock.open("ab", buffering=0) as file:  # closed, and so released, after an interrupt
            alone = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a network file system without locks
                alone = False
            if alone and not _is_at(lock, file.fileno()):
                continue
            try:
                yield alone
            finally:
                lock.unlink(missing_ok=True)
            return


def _new_staging(target: Path, *, alone: bool) -> Path:
    for leftover in _beside(target, STAGING_MARK) if alone else ():  # of killed processes
        _remove(leftover)
    own = f"{os.getpid()}-{secrets.token_hex(4)}"
    return target.with_name(f".{target.name}{STAGING_MARK}{own}")


def read_replaceable(folder: Path, read: Callable[[], Found]) -> Found:
    """Return what `read` finds in a folder that other processes may replace meanwhile."""
    while True:
        before = _identity(folder)
        try:
            return read()
        except Exception:  # the files may not have belonged together
            if _identity(folder) == before:
                raise


def _identity(folder: Path) -> tuple[object, ...]:
    with suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return tuple(_beside(folder, WHOLE_MARK))  # the next one may wait there


def _is_at(path: Path, handle: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False


def _put_in_place(staging: Path, target: Path) -> list[Path]:
    """Move a folder to its place, and return the new path of its predecessor, if there was one."""
    if not os.path.lexists(target):
        staging.rename(target)
        return []
    whole = target.with_name(staging.name.replace(STAGING_MARK, WHOLE_MARK))
    staging.rename(whole)
    old = whole.with_name(f"{whole.name}-old")  # sorted after the new one, see `recover`
    try:
        target.rename(old)
        try:
            whole.rename(target)
        except OSError:
            if not os.path.lexists(target):  # otherwise a reader has recovered the new one
                old.rename(target)
                raise
    except OSError:
        _remove(whole)
        raise
    return [old]


def _beside(target: Path, mark: str) -> list[Path]:
    there = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(path for path in there if path.name.startswith(f".{target.name}{mark}"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_file(target: Path, content: bytes) -> None:
    """Write a file in one step; a link stays one, and a device or pipe is written to."""
    with writing(target):
        if target.exists() and not target.is_file():  # a file in its place would destroy it
            target.write_bytes(content)
            return
        target = target.resolve()
        with _turn_at(target) as alone:
            staging = _new_staging(target, alone=alone)
            try:
                staging.write_bytes(content)
                flush(staging)
                staging.replace(target)
                flush(target.parent)
            finally:
                _remove(staging)


def spare_name(target: Path) -> Path:
    """Return the first free name among `<target>.before-1`, `<target>.before-2`, ..."""
    names = (target.with_name(f"{target.name}.before-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    if os.name == "nt":  # pragma: no cover - Windows cannot flush a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
