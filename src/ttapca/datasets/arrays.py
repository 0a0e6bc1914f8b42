"""Arrays in `.npy` and `.npz` files, whose headers may lie.

What a header says is compared with the bytes that are there before any memory is asked for.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ttapca.datasets.reading import reading
from ttapca.errors import DataFormatError, did_you_mean

PLAIN_KINDS = "biufSU"  # booleans, numbers and text; no objects, no records
HEADER_BYTES = 1 << 14  # numpy reads no header of more than 10,000
MAX_AXES = 32
MAX_MEMBERS = 1000  # arrays in an archive
# Deflate reaches 1,000 to 1, pictures hardly 10 to 1: what is larger and denser is meant to harm.
SMALL_BYTES = 100_000_000
MAX_RATIO = 100
CHUNK_BYTES = 1 << 20
SHOWN_NAMES = 20
NO_OBJECTS = "Files with pickled objects are refused; a truncated one must be fetched again."


@dataclass(frozen=True)
class _Layout:
    """How an array lies in its bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    offset: int  # of the array's first byte
    size: int  # in bytes


def map_npy(path: Path) -> NDArray[Any]:
    """Map the array of an `.npy` file into memory, read-only.

    Args:
        path: The file.

    Returns:
        The array; nothing is read until it is used.

    Raises:
        DataNotFoundError: The file is not there.
        DataFormatError: It is damaged or cut short, or holds objects.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels.npy"
        >>> np.save(path, np.arange(3))
        >>> map_npy(path).tolist()
        [0, 1, 2]
    """
    with reading(path, "is not a plain `.npy` array", NO_OBJECTS):
        with path.open("rb") as file:
            layout = _layout(file.read(HEADER_BYTES), path.stat().st_size)
        if not layout.size:  # there is no map of nothing
            return np.empty(layout.shape, layout.dtype)
        return np.memmap(path, layout.dtype, "r", layout.offset, layout.shape, layout.order)


def read_npz_arrays(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays of an `.npz` archive into memory.

    Args:
        path: The archive, as `numpy.savez` or `numpy.savez_compressed` writes it.
        names: Arrays that must be there.
        optional: Arrays that may be there.

    Returns:
        The arrays by name.

    Raises:
        DataNotFoundError: The file is not there.
        DataFormatError: An array is missing, damaged, pickled, or far larger than its file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mine.npz"
        >>> np.savez(path, labels=np.arange(3))
        >>> read_npz_arrays(path, ["labels"])["labels"].tolist()
        [0, 1, 2]
    """
    with reading(path, "is not a plain `.npz` archive", NO_OBJECTS):
        with path.open("rb") as file:
            if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise DataFormatError("It is a single array, not an `.npz` archive.")
        with zipfile.ZipFile(path) as archive:
            found = _members(archive)
            wanted = [*names, *(name for name in optional if name in found)]
            return {name: _read_member(archive, _find(found, name)) for name in wanted}


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise ValueError(f"it has more than {MAX_MEMBERS} members")
    return {info.filename.removesuffix(".npy"): info for info in infos}


def _find(members: dict[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    if name not in members:
        there = ", ".join(ascii(each)[1:-1] for each in list(members)[:SHOWN_NAMES]) or "none"
        raise DataFormatError(
            f"There is no array `{name}`.{did_you_mean(name, members)} There are: {there}."
        )
    return members[name]


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"`{info.filename}` is compressed in another way than numpy does")
    there = archive.fp.seek(0, io.SEEK_END) if archive.fp is not None else 0
    packed = min(info.compress_size, there)  # the archive may lie about that as well
    if info.file_size > max(SMALL_BYTES, MAX_RATIO * packed):
        raise ValueError(
            f"`{info.filename}` would unpack from {packed:,} to {info.file_size:,} bytes, more "
            f"than {MAX_RATIO} times as much, as no images do"
        )
    with archive.open(info) as member:
        head = member.read(HEADER_BYTES)
        layout = _layout(head, info.file_size)
        if layout.offset + layout.size != info.file_size:
            raise ValueError(f"`{info.filename}` is longer than its array")
        raw = np.empty(layout.size, np.uint8)
        _fill(raw.data, head[layout.offset :], member)
    return np.ndarray(layout.shape, layout.dtype, raw.data, order=layout.order)


def _fill(raw: memoryview, head: bytes, member: IO[bytes]) -> None:
    raw[: len(head)] = head
    done = len(head)
    while done < len(raw):
        chunk = member.read(CHUNK_BYTES)
        if not chunk:
            raise EOFError(f"`{member.name}` is cut short")
        raw[done : done + len(chunk)] = chunk
        done += len(chunk)


def _layout(head: bytes, there: int) -> _Layout:
    stream = io.BytesIO(head)
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its format has the version {version}; 1.0 and 2.0 are known")
    shape, fortran, dtype = readers[version](stream)
    if dtype.kind not in PLAIN_KINDS or not dtype.itemsize:
        raise ValueError(f"it holds {dtype.kind!r} items, not numbers or text")
    if len(shape) > MAX_AXES or min(shape, default=0) < 0:
        raise ValueError("its shape is not one of an array")
    size = math.prod(shape) * dtype.itemsize
    if stream.tell() + size > there:
        raise ValueError(
            f"it is cut short: shape {shape} of {dtype} takes {size:,} bytes, and "
            f"{there - stream.tell():,} are there"
        )
    return _Layout(shape, dtype, "F" if fortran else "C", stream.tell(), size)
