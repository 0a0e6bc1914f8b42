"""Unpack a tar archive that may be hostile."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from ttapca.datasets.progress import Reporter
from ttapca.datasets.reading import reading
from ttapca.errors import DataFormatError
from ttapca.support.disk import writing

MAX_MEMBERS = 1000
MEMBER_BYTES = 10_240  # of headers and padding that a member may have beside its content
MAX_NAME_BYTES = 200  # of a path; file systems take 255 a part
COPY_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
SHOWN = 60  # characters of a name in a message


def unpack_tar(
    archive: Path,
    target: Path,
    *,
    limit: int,
    report: Reporter,
    only: Collection[str] | None = None,
) -> None:
    """Unpack regular files from a tar archive, without its top folder.

    Every entry is checked before anything is written: a path that leaves the folder, a link, a
    device, or more than `limit` bytes in all condemn the whole archive. Then the bytes of the files
    are copied, and nothing else that the archive says takes effect.

    Args:
        archive: The archive, compressed or not.
        target: An existing folder.
        limit: Bytes that the content may have in all.
        report: Who wants to see the progress.
        only: Names of files to take; all by default.

    Raises:
        DataFormatError: The archive is damaged, truncated, hostile or too large.
        StorageError: The target cannot be written.

    Example:
        >>> import tempfile
        >>> from ttapca.datasets.progress import Silent
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("hello")
        >>> with tarfile.open(folder / "a.tar", "w") as tar:
        ...     tar.add(folder / "a.txt", "top/a.txt")
        >>> (folder / "out").mkdir()
        >>> unpack_tar(folder / "a.tar", folder / "out", limit=10, report=Silent())
        >>> (folder / "out" / "a.txt").read_text()
        'hello'
    """
    with open_tar(archive, limit) as tar:
        members = list(_checked_members(tar, archive, limit))
        total, done = sum(member.size for member in members), 0
        for member in members:
            name = _without_top_folder(member)
            if only is None or name in only:
                _write_member(tar, member, target / name)
            done += member.size
            report.advance(f"unpacking {archive.name}", done, total)


@contextmanager
def open_tar(archive: Path, limit: int) -> Iterator[tarfile.TarFile]:
    """Open a tar archive so that no header in it can ask for much memory or time.

    Args:
        archive: The archive, plain or compressed by gzip.
        limit: Bytes that the content may have in all.

    Yields:
        The archive. Read its members in pieces of at most `COPY_BYTES`.

    Raises:
        DataFormatError: It is damaged or truncated, or larger than the limit.

    Example:
        >>> with open_tar(Path("nowhere.tar"), limit=1000):
        ...     pass
        Traceback (most recent call last):
        ttapca.errors.DataNotFoundError: nowhere.tar does not exist.
    """
    with reading(archive, "is damaged or truncated"), archive.open("rb") as plain:
        compressed = plain.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        plain.seek(0)
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=plain)) if compressed else plain
        bounded = cast("IO[bytes]", _Bounded(file, archive, limit))
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            yield tar


class _Bounded:
    """A file of which `tarfile` can read little at a time, and not without end.

    `tarfile` takes the length of a header for granted, and reads a header that says 8 GB in one
    piece, out of a few megabytes of compressed zeros.
    """

    def __init__(self, file: IO[bytes], archive: Path, limit: int) -> None:
        self._file = file
        self._archive = archive
        self._limit = limit
        self._end = limit + MAX_MEMBERS * MEMBER_BYTES

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= COPY_BYTES:
            raise DataFormatError(
                f"{self._archive} is refused: it has a header of more than {COPY_BYTES:,} bytes."
            )
        return self._file.read(size)

    def seek(self, place: int) -> int:
        if place > self._end:
            raise _too_much(self._archive, self._limit)
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


def _too_much(archive: Path, limit: int) -> DataFormatError:
    return DataFormatError(
        f"{archive} is refused: it would unpack to more than {limit:,} bytes or {MAX_MEMBERS} "
        "entries, which the real one does not."
    )


def _without_top_folder(member: tarfile.TarInfo) -> str:
    parts = PurePosixPath(member.name).parts
    return "/".join(parts[1:] or parts)


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    # Content only, never `extract`: no owner, permission, time or link of the archive takes effect.
    content = tar.extractfile(member)
    if content is None:  # pragma: no cover - a regular file has content
        return
    with content, writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            shutil.copyfileobj(content, file, COPY_BYTES)


def _checked_members(tar: tarfile.TarFile, archive: Path, limit: int) -> Iterator[tarfile.TarInfo]:
    total = 0
    files, folders = set[str](), set[str]()
    for number, member in enumerate(tar):
        _check_entry(member, archive)
        total += member.size
        if total > limit or number >= MAX_MEMBERS:
            raise _too_much(archive, limit)
        if member.isreg():
            name = _without_top_folder(member)
            above = {str(each) for each in PurePosixPath(name).parents}
            if name in files | folders or above & files:
                raise DataFormatError(f"{archive} is refused: it has two files called `{name}`.")
            files.add(name)
            folders |= above
            yield member


def _check_entry(member: tarfile.TarInfo, archive: Path) -> None:
    path, shown = PurePosixPath(member.name), ascii(member.name[:SHOWN])[1:-1]
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
        raise DataFormatError(f"{archive} is refused: its entry `{shown}` leads out of the folder.")
    if not (member.isreg() or member.isdir()):
        raise DataFormatError(
            f"{archive} is refused: its entry `{shown}` is a link or a device; only files and "
            "folders are expected."
        )
    if not member.name.isprintable() or len(member.name.encode("utf-8")) > MAX_NAME_BYTES:
        raise DataFormatError(f"{archive} is refused: its entry `{shown}` is no name of a file.")
    if member.size < 0 or not path.parts:
        raise DataFormatError(f"{archive} is refused: its entry `{shown}` is no file of any size.")
