"""Files that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np

from ttapca.corruptions.pixels import Pixels
from ttapca.errors import StorageError, TtapcaError

_PARTIAL = ".partial"


def partial_of(path: Path) -> Path:
    """Where a file grows until it is whole; hidden, and no `.npy` for a reader to find."""
    return path.with_name(f".{path.name}{_PARTIAL}")


def remove_partials(folder: Path) -> None:
    """Delete what a killed run left behind."""
    for path in folder.glob(f".*{_PARTIAL}"):
        path.unlink(missing_ok=True)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """The first bytes of an `.npy` file of uint8."""
    buffer = BytesIO()
    description = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def npy_size(shape: tuple[int, ...]) -> int:
    """How many bytes an `.npy` file of uint8 has."""
    return len(npy_header(shape)) + int(np.prod(shape))


def is_whole(path: Path, shape: tuple[int, ...]) -> bool:
    """Whether an `.npy` file of uint8 has this shape and every byte of it."""
    header = npy_header(shape)
    if not path.is_file() or path.stat().st_size != npy_size(shape):
        return False
    with path.open("rb") as file:
        return file.read(len(header)) == header


def reserve(path: Path, shape: tuple[int, ...]) -> None:
    """Begin an `.npy` file and claim its space, so that a full disk shows now and not halfway."""
    size = npy_size(shape)
    with partial_of(path).open("wb") as file:
        file.write(npy_header(shape))
        file.flush()
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # not on every system
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # nor every file system
                    raise


def write_rows(path: Path, shape: tuple[int, ...], first: int, rows: Pixels) -> None:
    """Write some rows of a file that was begun with `reserve`."""
    offset = len(npy_header(shape)) + first * int(np.prod(shape[1:]))
    with partial_of(path).open("r+b") as file:
        file.seek(offset)
        file.write(rows.tobytes())


def finish(path: Path) -> None:
    """Give a file its own name, once its bytes are on the disk."""
    partial = partial_of(path)
    with partial.open("r+b") as file:
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file at once."""
    partial_of(path).write_bytes(content)
    finish(path)


def _sync_folder(folder: Path) -> None:
    """Make renames last through a power cut, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep a second run out of the folder for as long as this one works in it.

    Raises:
        StorageError: Another run is at work there.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no lock, and renames are still atomic
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"One run at a time may write to a folder; another one is at work in {folder}. "
                "Wait for it to end, or choose another folder."
            ) from error
        except OSError:
            pass  # a network file system without locks: as on Windows
        yield
    finally:
        os.close(handle)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says about a folder into a `StorageError` with a remedy."""
    try:
        yield
    except TtapcaError:
        raise
    except OSError as error:
        raise StorageError(
            f"Files must be written to {folder}, and the system refused: "
            f"{error.strerror or error}. Files that were finished are kept; free some space or "
            "choose another folder, then run the same command again."
        ) from error
