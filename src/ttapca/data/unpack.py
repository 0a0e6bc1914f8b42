"""Unpack a tar archive that may be hostile."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from ttapca.data.progress import Reporter
from ttapca.disk import writing
from ttapca.errors import DataFormatError

MAX_MEMBERS = 1000
COPY_BYTES = 1 << 20


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
        >>> from ttapca.data.progress import Silent
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("hello")
        >>> with tarfile.open(folder / "a.tar", "w") as tar:
        ...     tar.add(folder / "a.txt", "top/a.txt")
        >>> (folder / "out").mkdir()
        >>> unpack_tar(folder / "a.tar", folder / "out", limit=10, report=Silent())
        >>> (folder / "out" / "a.txt").read_text()
        'hello'
    """
    try:
        with tarfile.open(archive) as tar:
            members = list(_checked_members(tar, archive, limit))
            total, done = sum(member.size for member in members), 0
            for member in members:
                name = _without_top_folder(member)
                if only is None or name in only:
                    _write_member(tar, member, target / name)
                done += member.size
                report.advance(f"unpacking {archive.name}", done, total)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFormatError(f"{archive} is damaged or truncated: {error}.") from error


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
    total, seen = 0, set[str]()
    for number, member in enumerate(tar):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
            raise DataFormatError(
                f"{archive} is refused: its entry `{member.name}` leads out of the folder."
            )
        if not (member.isreg() or member.isdir()):
            raise DataFormatError(
                f"{archive} is refused: its entry `{member.name}` is a link or a device; only "
                "files and folders are expected."
            )
        total += member.size
        if total > limit or number >= MAX_MEMBERS:
            raise DataFormatError(
                f"{archive} is refused: it would unpack to more than {limit:,} bytes or "
                f"{MAX_MEMBERS} entries, which the real one does not."
            )
        if member.isreg():
            name = _without_top_folder(member)
            if name in seen:
                raise DataFormatError(f"{archive} is refused: it has two files called `{name}`.")
            seen.add(name)
            yield member
