"""Put files in their place so that they are wholly there or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
def locked(folder: Path, name: str) -> Iterator[None]:
    """Keep two processes from filling one place; the operating system frees a dead one's lock.

    Args:
        folder: An existing folder.
        name: What is being filled.

    Yields:
        Nothing; work inside.

    Raises:
        StorageError: Another process is at work on it.

    Example:
        >>> with locked(Path(tempfile.mkdtemp()), "cifar10"):
        ...     pass
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows: checksums still catch a collision
        yield
        return
    path = folder / f".{name}.lock"
    with writing(path), path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"Another process is getting {name} into {folder}. Wait for it to end."
            ) from error
        yield


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Fill a folder beside its place and move it there in one step.

    When the block ends well the files are flushed to disk and the folder takes the place of
    `target`; what was there before is kept under another name. When it does not, for whatever
    reason, the unfinished folder is removed. What a killed process left is removed by the next.

    Args:
        target: Where the folder shall be.

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
            _flush(Path(staging))
            if target.exists():
                target.rename(spare_name(target))
            Path(staging).rename(target)
            _flush_entry(target.parent)
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
        _flush_entry(staging)
        staging.replace(target)
        _flush_entry(target.parent)


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


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    if os.name == "nt":  # pragma: no cover - Windows cannot flush a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
