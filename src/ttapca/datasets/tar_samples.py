"""Samples in a tar file as WebDataset writes them: neighbours whose names differ in their endings.

    00017.jpg   a picture, or 00017.npy, an array
    00017.cls   the number of its class, as text

The name of a sample ends at the first dot after the last slash; what follows says what it is, and
kinds that are not known here are skipped. Files are read where they lie, nothing is unpacked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from ttapca.datasets.pictures import MAX_PICTURE_BYTES, PICTURE_SUFFIXES
from ttapca.datasets.reading import HeaderFile, reading
from ttapca.errors import DataFormatError

ARRAY, LABEL = "npy", "cls"
IMAGES = frozenset({suffix.removeprefix(".") for suffix in PICTURE_SUFFIXES} | {ARRAY})
LONGEST_LABEL = 20  # bytes
MOST_PADDING = 2**20  # bytes of zeros at the end
SHOWN = 60  # characters of a name in a message


@dataclass(frozen=True)
class TarSample:
    """One sample.

    Attributes:
        name: Its name in the tar file.
        kind: The ending of the image's name, in lower case.
        image: The bytes of the image's file; empty if only counted.
        label: The number of its class, if there is one.
    """

    name: str
    kind: str
    image: bytes
    label: int | None = None


def count_samples(path: Path) -> int:
    """Return how many samples a tar file has: only headers are read.

    Raises:
        DataFormatError: It is no plain tar file, is cut short, or holds what is no sample.
    """
    return sum(1 for _ in _samples(path, contents=False))


def read_samples(path: Path) -> Iterator[TarSample]:
    """Yield the samples of a tar file in their order.

    Raises:
        DataFormatError: As for `count_samples`, and where the number of a class is none.
    """
    return _samples(path, contents=True)


def _samples(path: Path, *, contents: bool) -> Iterator[TarSample]:
    advice = "It must be a plain tar file, not a compressed one."
    with reading(path, "is not a readable tar file", advice):
        name, parts, there = "", dict[str, bytes](), path.stat().st_size
        with (
            path.open("rb") as file,
            tarfile.open(fileobj=cast("IO[bytes]", HeaderFile(file, path)), mode="r:") as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined] # it would keep all headers
                _check(member, there)
                start, kind = _name_and_kind(member.name)
                if not member.isreg() or kind not in IMAGES | {LABEL}:
                    continue
                if start != name and parts:
                    yield _sample(name, parts)
                    parts = {}
                name = start
                if kind in parts:
                    raise DataFormatError(f"There are two {_shown(f'{name}.{kind}')}.")
                parts[kind] = _content(file, member) if contents else b"0"
            end = archive.offset
        if parts:
            yield _sample(name, parts)
        _check_end(path, end)


def _check_end(path: Path, end: int) -> None:
    """Raise unless zeros follow the last member: `tarfile` takes anything else for the end, too."""
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(MOST_PADDING + 1)
    if len(rest) < tarfile.BLOCKSIZE:
        raise DataFormatError("It has no end: it was cut short, or is still being written.")
    if rest.strip(b"\0") or len(rest) > MOST_PADDING:
        raise DataFormatError(
            f"At byte {end:,}, something follows that is no file: it is damaged, or several tar "
            "files were joined."
        )


def _check(member: tarfile.TarInfo, there: int) -> None:
    """Raise unless a member is a folder, or a plain file that can be there."""
    if member.isdir():
        return
    if not member.isreg() or member.issparse():
        raise DataFormatError(
            f"Samples are plain files; {_shown(member.name)} is a link, a device or sparse."
        )
    if member.size > min(there, MAX_PICTURE_BYTES):
        raise DataFormatError(
            f"{_shown(member.name)} would have {member.size:,} bytes; the tar file has {there:,}, "
            f"and a sample up to {MAX_PICTURE_BYTES:,}."
        )


def _name_and_kind(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    start, _, kind = base.partition(".")
    return folder + slash + start, kind.lower() if start else ""


def _content(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    content = file.read(member.size)
    if len(content) < member.size:
        raise DataFormatError(f"It ends within {_shown(member.name)}: it was cut short.")
    return content


def _sample(name: str, parts: dict[str, bytes]) -> TarSample:
    images = sorted(parts.keys() & IMAGES)
    if len(images) != 1:
        raise DataFormatError(
            f"A sample has one image, with one of the endings {', '.join(sorted(IMAGES))}; "
            f"{_shown(name)} has {len(images) or 'none'}."
        )
    label = parts.get(LABEL)
    if label is None:
        return TarSample(name, images[0], parts[images[0]])
    text = label.strip()
    if len(label) > LONGEST_LABEL or not text.isdigit():
        raise DataFormatError(
            f"{_shown(f'{name}.{LABEL}')} holds the number of a class; found {text[:20]!r}."
        )
    return TarSample(name, images[0], parts[images[0]], int(text))


def _shown(name: str) -> str:
    return f"`{ascii(name)[1:-1][:SHOWN]}`"
