"""The publishers' archives: download them, and unpack them as if they were hostile."""

from __future__ import annotations

import gzip
import logging
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

from ttapca.datasets.catalog import Archive
from ttapca.datasets.reading import HeaderFile, reading
from ttapca.errors import DataFormatError, SourceError
from ttapca.support.disk import writing
from ttapca.support.progress import Reporter

if TYPE_CHECKING:
    import requests

TIMEOUT_SECONDS = 15.0  # to connect, and for every read
ATTEMPTS = 3  # connections in one run; each continues where the last one broke
PIECE_BYTES = 1 << 16  # read at once from the network; an unfinished piece is lost
WHOLE_FILE, REST_OF_FILE, RANGE_REFUSED = 200, 206, 416  # status codes of HTTP

MAX_MEMBERS = 1000
MEMBER_BYTES = 10_240  # of headers and padding that a member may have beside its content
GZIP_MAGIC = b"\x1f\x8b"
PLAIN_NAME = re.compile(r"[A-Za-z0-9 ._+-]{1,100}")
SHOWN = 60  # characters of a name in a message


def download(archive: Archive, folder: Path, report: Reporter) -> Path:
    """Download an archive and verify it.

    What has arrived stays in `<name>.part`, and the next call continues from there. The file gets
    its name only when its checksum is right; a file with a wrong checksum is removed. Raise
    `SourceError` if the server cannot be reached, refuses, breaks off or sends something else.
    """
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise SourceError(
            "downloading needs the package pooch; get it with: pip install 'ttapca[data]'"
        ) from error
    part = folder / f"{archive.file_name}.part"
    resumed = part.exists()

    def bring(url: str, output_file: Any, _: object) -> None:
        _download_to(part, archive, url, report)
        part.replace(output_file)

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)  # the reporter says what happens
    try:
        with writing(part):
            found = pooch.retrieve(
                archive.url, archive.checksum, archive.file_name, folder, downloader=bring
            )
    except ValueError as error:  # pooch found another checksum, and has removed the file
        if resumed:  # the part of an earlier run may be what was wrong
            return download(archive, folder, report)
        raise SourceError(
            "what arrived has another checksum than the publisher's; it was removed"
        ) from error
    finally:
        logger.setLevel(level)
    return Path(found)


def _download_to(part: Path, archive: Archive, url: str, report: Reporter) -> None:
    """Fill the `.part` file; pooch alone would start again after every broken connection."""
    fault = "the connection ended"
    try:
        with part.open("ab") as file:
            if file.tell() > archive.size:
                _empty(file)
            for _ in range(ATTEMPTS):
                start = file.tell()
                if start < archive.size:
                    fault = _receive(file, archive, url, report) or fault
                if file.tell() in (start, archive.size):
                    break
            arrived = file.tell()
    finally:
        if not part.stat().st_size:
            part.unlink()
    if arrived == archive.size:
        return
    if arrived:
        fault += (
            f"; {arrived:,} of {archive.size:,} bytes have arrived, and the same command continues "
            "from there"
        )
    raise SourceError(fault)


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _receive(file: IO[bytes], archive: Archive, url: str, report: Reporter) -> str:
    """Append what one connection brings; return why it broke off, if it did."""
    import requests

    start = file.tell()
    headers = {"User-Agent": "ttapca", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, timeout=TIMEOUT_SECONDS, stream=True) as answer:
            if answer.status_code == RANGE_REFUSED and start:
                _empty(file)  # the server's file is shorter: ours is not its beginning
                return _receive(file, archive, url, report)
            answer.raise_for_status()
            _check_size(answer, archive.size)
            if answer.status_code == WHOLE_FILE:  # the server may not know ranges
                _empty(file)
            answer.raw.headers.pop("Content-Encoding", None)  # keep the file packed
            for piece in answer.iter_content(PIECE_BYTES):
                file.write(piece)
                if file.tell() > archive.size:
                    raise SourceError(
                        f"the server sends more than the {archive.size:,} bytes that the publisher "
                        "states"
                    )
                report.advance(f"downloading {archive.file_name}", file.tell(), archive.size)
    except requests.RequestException as error:
        return _reason(error)
    return ""


def _check_size(answer: requests.Response, size: int) -> None:
    """Refuse another file, such as a log-in page, before its content is read."""
    stated = answer.headers.get("Content-Length", "")
    if answer.status_code == REST_OF_FILE:
        stated = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if stated.isdecimal() and int(stated) != size:
        raise SourceError(
            f"the server has a file of {int(stated):,} bytes; the publisher's has {size:,}"
        )


def _reason(error: requests.RequestException) -> str:
    from requests.exceptions import ChunkedEncodingError

    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    broke = isinstance(error, ChunkedEncodingError)
    reason = getattr(root, "strerror", None) or str(root) or type(root).__name__
    return f"{'the connection broke' if broke else 'not reachable'}: {reason}"


def unpack_tar(archive: Path, target: Path, *, limit: int, report: Reporter) -> None:
    """Unpack the files in the top folder of a tar archive, plain or gzipped.

    Every entry is checked before anything is written. A link, a device, a path that leads elsewhere
    or more than `limit` bytes in all: then the whole archive is refused by `DataFormatError`.
    """
    with _open_tar(archive, limit) as tar:
        members, total, done = [], 0, 0
        for number, member in enumerate(tar):
            total += member.size
            if number >= MAX_MEMBERS or not 0 <= member.size <= total <= limit:
                raise _too_much(archive, limit)
            if not member.isdir():
                members.append(_without_folder(member, archive))
        for member in members:
            if "/" not in member.name:
                with writing(target / member.name):
                    tar.extract(member, target, filter="data")
            done += member.size
            report.advance(f"unpacking {archive.name}", done, total)


def _without_folder(member: tarfile.TarInfo, archive: Path) -> tarfile.TarInfo:
    """Return the member without its top folder, and with the rights of any other file."""
    parts = PurePosixPath(member.name).parts
    stays_inside = bool(parts) and ".." not in parts and all(map(PLAIN_NAME.fullmatch, parts))
    if not member.isreg() or not stays_inside:
        raise DataFormatError(
            f"{archive} is refused: its entry `{ascii(member.name[:SHOWN])[1:-1]}` is a link, a "
            "device or leads out of the folder; only files and folders are expected."
        )
    return member.replace(name="/".join(parts[1:] or parts), mode=0o644, deep=False)


@contextmanager
def _open_tar(archive: Path, limit: int) -> Iterator[tarfile.TarFile]:
    with reading(archive, "is damaged or truncated"), archive.open("rb") as plain:
        compressed = plain.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        plain.seek(0)
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=plain)) if compressed else plain
        bounded = cast("IO[bytes]", _Bounded(file, archive, limit))
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            yield tar


class _Bounded(HeaderFile):
    """A file that `tarfile` reads in small pieces, and not without end."""

    def __init__(self, file: IO[bytes], archive: Path, limit: int) -> None:
        super().__init__(file, archive)
        self._limit = limit

    def seek(self, place: int) -> int:
        """Go to a place, unless no real archive is as long."""
        if place > self._limit + MAX_MEMBERS * MEMBER_BYTES:
            raise _too_much(self._path, self._limit)
        return super().seek(place)


def _too_much(archive: Path, limit: int) -> DataFormatError:
    return DataFormatError(
        f"{archive} is refused: it would unpack to more than {limit:,} bytes or {MAX_MEMBERS} "
        "entries, which the real one does not."
    )
