"""Files and folders that are wholly there or not at all, and what to say when the disk refuses."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from ttapca.errors import StorageError

STAGING_MARK = ".ttapca-unfinished-"
ADVICE = {
    errno.ENOSPC: "Free some space, or choose another place with `--to DIR`.",
    errno.EDQUOT: "Your quota is used up; choose another place with `--to DIR`.",
    errno.EROFS: "It is read-only; choose another place with `--to DIR`.",
    errno.EACCES: "You may not write there; choose another place with `--to DIR`.",
    errno.EPERM: "You may not write there; choose another place with `--to DIR`.",
    errno.ENOTDIR: "A file is where a folder should be; move it away or use `--to DIR`.",
    errno.EEXIST: "A file is where a folder should be; move it away or use `--to DIR`.",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says into an error that names the place and the way out.

    Args:
        path: The place being written to.

    Yields:
        Nothing; write inside.

    Raises:
        StorageError: The operating system refuses.

    Example:
        >>> with writing(Path("somewhere")):
        ...     pass
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # one of our own errors, which says all already
            raise
        advice = ADVICE.get(error.errno, "Choose another place with `--to DIR`.")
        raise StorageError(f"Cannot write to {path}: {error.strerror}. {advice}") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it.

    Args:
        path: The folder.

    Raises:
        StorageError: It cannot be made, or a file is in its place.

    Example:
        >>> make_folder(Path(tempfile.mkdtemp()) / "a" / "b")
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_space(folder: Path, needed: int) -> None:
    """Refuse to start what cannot end.

    Args:
        folder: An existing folder on the disk in question.
        needed: Bytes that will be written.

    Raises:
        StorageError: There is less.

    Example:
        >>> check_space(Path("."), 1)
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{needed / 1e6:,.0f} MB are needed in {folder}; only {free / 1e6:,.0f} MB are free. "
            f"{ADVICE[errno.ENOSPC]}"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of a folder; the operating system frees a dead one's lock.

    Args:
        folder: An existing folder.

    Yields:
        Nothing; work inside.

    Raises:
        StorageError: Another process is at work in it.

    Example:
        >>> with locked(Path(tempfile.mkdtemp())):
        ...     pass
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows: no lock, and renames are still atomic
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"One process at a time may fill {folder}; another one is at work there. Wait for "
                "it to end, or choose another place with `--to DIR`."
            ) from error
        except OSError:
            pass  # a network file system without locks: as on Windows
        yield
    finally:
        os.close(handle)


@contextmanager
def queued(lock: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Wait for one's turn; the operating system frees a dead process's lock.

    Args:
        lock: A file that stands for what is used in turns; it is made, and stays.
        waiting: Told once who has the turn, when it is somebody else.

    Yields:
        Nothing; work inside.

    Raises:
        StorageError: The file cannot be made.

    Example:
        >>> with queued(Path(tempfile.mkdtemp()) / "lock"):
        ...     pass
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows: no lock
        yield
        return
    with writing(lock):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting(os.pread(handle, 1000, 0).decode(errors="replace") or "another process")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a network file system without locks: as on Windows
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        os.ftruncate(handle, 0)
        os.pwrite(
            handle, f"process {os.getpid()} on {platform.node()}, since {started}".encode(), 0
        )
        yield
    finally:
        os.close(handle)


@contextmanager
def staged_folder(target: Path, *, keep_old: bool = True) -> Iterator[Path]:
    """Fill a folder beside its place and move it there in one step.

    When the block ends well the files are flushed to disk and the folder takes the place of
    `target`. When it does not, for whatever reason, the unfinished folder is removed. What a killed
    process left is removed by the next.

    Args:
        target: Where the folder shall be.
        keep_old: Whether what was there before is kept, under the name of `spare_name`.

    Yields:
        The folder to fill, on the same disk.

    Raises:
        StorageError: The operating system refuses to write.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "data"
        >>> with staged_folder(target) as folder:
        ...     _ = (folder / "a").write_text("all of it")
        >>> (target / "a").read_text()
        'all of it'
    """
    with writing(target):
        for leftover in target.parent.glob(f".{target.name}{STAGING_MARK}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = tempfile.mkdtemp(prefix=f".{target.name}{STAGING_MARK}", dir=target.parent)
        try:
            yield Path(staging)
            Path(staging).chmod(0o777 & ~_umask())  # `mkdtemp` makes folders for one user only
            for path in (*Path(staging).rglob("*"), Path(staging)):
                flush(path)
            old = spare_name(target)
            if target.exists():
                target.rename(old)
            Path(staging).rename(target)
            flush(target.parent)
            if not keep_old:
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def replace_file(target: Path, content: bytes) -> None:
    """Put a file in its place in one step: whoever reads it finds the old one or the new one.

    Args:
        target: The file; its folder is there.
        content: All of it.

    Raises:
        StorageError: The operating system refuses to write.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "log.csv"
        >>> replace_file(target, b"all of it")
        >>> target.read_text()
        'all of it'
    """
    # One fixed name, so that what a killed process left is overwritten by the next.
    staging = target.with_name(f".{target.name}{STAGING_MARK}")
    with writing(target):
        staging.write_bytes(content)
        flush(staging)
        staging.replace(target)
        flush(target.parent)


def spare_name(target: Path) -> Path:
    """A free name beside `target` to keep what was there before.

    Args:
        target: The name that is taken.

    Returns:
        `<target>.before-1`, or the first higher number that is free.

    Example:
        >>> spare_name(Path("data")).name
        'data.before-1'
    """
    names = (target.with_name(f"{target.name}.before-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, last through a power cut."""
    if os.name == "nt":  # pragma: no cover - Windows cannot flush a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
