"""Shared by all readers: errors that name the file, and arrays whose headers may lie.

The size that a header states is compared with the bytes of the file before memory is allocated.
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ttapca._checks import OneOf, check_option
from ttapca.datasets.images import Images, Series
from ttapca.errors import DataFormatError, DataNotFoundError, ShapeError, TtapcaError, did_you_mean

Split = Literal["train", "test"]
MAX_REASON = 300  # characters of a parser's message
MAX_CLASSES = 1_000_000  # a higher label means damage, and is not worth a list of names

PLAIN_KINDS = "biufSU"  # booleans, numbers and text; no objects, no records
HEADER_BYTES = 1 << 14  # numpy reads no header of more than 10,000
# Deflate reaches 1,000 to 1, pictures hardly 10 to 1: a large array that is denser is an attack.
SMALL_BYTES = 100_000_000
MAX_RATIO = 100
MOST_DIMENSIONS = 32  # of numpy 1
GET_IT = "It is damaged or of another kind; get it again."
# numpy parses headers as Python. If two threads do that at once, Python 3.11 may miscount its own
# recursion, and raise SystemError (python/cpython#106905).
_parsing = threading.Lock()
NO_OBJECTS = "Files with pickled objects are refused; a truncated one must be fetched again."


def check_split(split: str) -> None:
    """Refuse a split that does not exist."""
    check_option("split", split, OneOf(get_args(Split)))


@contextmanager
def reading(path: Path, complaint: str = "cannot be read", advice: str = GET_IT) -> Iterator[None]:
    """Turn whatever a parser of a foreign format raises into one error that names the file."""
    try:
        yield
    except (DataFormatError, ShapeError) as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except TtapcaError:
        raise
    except FileNotFoundError as error:
        raise DataNotFoundError(f"{path} does not exist.") from error
    except MemoryError as error:
        raise DataFormatError(f"{path} needs more memory than there is.") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # from the system, not from a parser
            raise DataFormatError(f"{path} cannot be read: {error.strerror}.") from error
        reason = str(error)[:MAX_REASON] or type(error).__name__
        raise DataFormatError(f"{path} {complaint}: {reason}. {advice}") from error


def known_checksums(folder: str) -> dict[str, str]:
    """Return the checksums of the files in one of the official folders, by file name."""
    lines = Path(__file__).with_name("checksums.txt").read_text("ascii").splitlines()
    known = (line.partition("/") for line in lines)
    return dict(name.split() for place, _, name in known if place == folder)


def has_checksum(path: Path, expected: str) -> bool:
    """Return whether a file has the checksum `algorithm:digest`."""
    algorithm, _, digest = expected.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return found.hexdigest() == digest


def make_images(
    path: Path,
    images: NDArray[Any],
    labels: NDArray[np.integer],
    class_names: tuple[str, ...] | None,
) -> Images:
    """Return the `Images` or `Series` read from `path`; without names, classes are `0`, `1`, ..."""
    with reading(path):
        if labels.dtype.kind not in "iu":
            raise DataFormatError(f"Labels must be integers; found {labels.dtype}.")
        if not images.size:
            raise DataFormatError(f"There must be an image to read; found shape {images.shape}.")
        if class_names is None:
            highest = int(labels.max()) if labels.size else -1
            if highest >= MAX_CLASSES:
                raise DataFormatError(f"Labels must be class numbers from 0 up; found {highest}.")
            class_names = tuple(map(str, range(highest + 1)))
        if labels.shape == images.shape[:1]:  # any other shape is refused before it costs memory
            labels = labels.astype(np.int64)
        kind = Series if images.ndim == 3 and images.dtype.kind == "f" else Images
        return kind(images, cast("NDArray[np.int64]", labels), class_names)


def map_npy(path: Path) -> NDArray[Any]:
    """Map the array of an `.npy` file into memory, read-only."""
    with reading(path, "is not a plain `.npy` array", NO_OBJECTS):
        with path.open("rb") as file:
            header = _read_header(file.read(HEADER_BYTES), path.stat().st_size)
        if not header.size:  # the system maps no empty array
            return np.empty(header.shape, header.dtype)
        return np.memmap(path, header.dtype, "r", header.offset, header.shape, header.order)


def parse_npy(content: bytes) -> NDArray[Any]:
    """Return the array of an `.npy` in memory, a view of the bytes; call it inside `reading`."""
    header = _read_header(content[:HEADER_BYTES], len(content))
    if header.offset + header.size != len(content):
        raise ValueError("it is longer than its array")
    return np.ndarray(header.shape, header.dtype, content, header.offset, None, header.order)


def read_npz_arrays(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays of an `.npz` archive by name, read-only; the optional ones may be missing."""
    with _open_npz(path, names) as (archive, found):
        wanted = [*names, *(name for name in optional if name in found)]
        packed = path.stat().st_size
        return {name: parse_npy(_unpacked(archive, found[name], packed)) for name in wanted}


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in an `.npz` archive."""
    with _open_npz(path, []) as (_, found):
        return list(found)


def npz_shape(path: Path, name: str) -> tuple[int, ...]:
    """Return the shape of an array in an `.npz` archive, without reading the array."""
    with _open_npz(path, [name]) as (archive, found), archive.open(found[name]) as content:
        return _read_header(content.read(HEADER_BYTES), found[name].file_size).shape


@contextmanager
def _open_npz(
    path: Path, names: Sequence[str]
) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Open an archive that has these arrays; yield it with all its members by name."""
    plain = reading(path, "is not a plain `.npz` archive", NO_OBJECTS)
    with plain, zipfile.ZipFile(path) as archive:
        found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        for name in names:
            if name not in found:
                there = ", ".join(ascii(each)[1:-1] for each in list(found)[:20]) or "none"
                raise DataFormatError(
                    f"There is no array `{name}`.{did_you_mean(name, found)} There are: {there}."
                )
        yield archive, found


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, there: int) -> bytes:
    packed = min(info.compress_size, there)  # the archive may lie about that as well
    if info.file_size > max(SMALL_BYTES, MAX_RATIO * packed):
        raise ValueError(
            f"`{info.filename}` would unpack from {packed:,} to {info.file_size:,} bytes, more "
            f"than {MAX_RATIO} times as much, as no images do"
        )
    return archive.read(info)


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    offset: int  # of the first item
    size: int  # in bytes


def _read_header(head: bytes, there: int) -> _Header:
    """Parse the header of an `.npy` and compare it with the bytes that are there."""
    stream = io.BytesIO(head)
    version = npy.read_magic(stream)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its format has the version {version}; 1.0 and 2.0 are known")
    with _parsing:
        shape, fortran, dtype = readers[version](stream)
    if dtype.kind not in PLAIN_KINDS or not dtype.itemsize:
        raise ValueError(f"it holds {dtype.kind!r} items, not numbers or text")
    if min(shape, default=0) < 0 or len(shape) > MOST_DIMENSIONS:
        raise ValueError("its shape is not one of an array")
    size = math.prod(shape) * dtype.itemsize
    if stream.tell() + size > there:
        raise ValueError(
            f"it is cut short: shape {shape} of {dtype} takes {size:,} bytes, and "
            f"{there - stream.tell():,} are there"
        )
    return _Header(shape, dtype, "F" if fortran else "C", stream.tell(), size)
