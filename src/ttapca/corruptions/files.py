"""Files that are whole or not there: written under another name, then renamed."""

from __future__ import annotations

import errno
import os
from io import BytesIO
from pathlib import Path

import numpy as np

from ttapca.corruptions.pixels import Pixels
from ttapca.support.disk import flush

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
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file at once."""
    partial_of(path).write_bytes(content)
    finish(path)
