"""The publishers' archives: pooch downloads them, and they are unpacked as if they were hostile."""

from __future__ import annotations

import gzip
import logging
import re
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

from ttapca.datasets.catalog import Archive
from ttapca.datasets.reading import reading
from ttapca.errors import DataFormatError, SourceError
from ttapca.support.disk import writing
from ttapca.support.progress import Reporter

if TYPE_CHECKING:
    import requests

TIMEOUT_SECONDS = 15.0  # to connect, and for every read: a silent server is a dead one
ATTEMPTS = 3  # connections in one run, each going on where the last was cut off
PIECE_BYTES = 1 << 16  # that arrive at once; an unfinished piece is lost when a connection breaks
CHUNK_BYTES = 1 << 20  # of an archive that are read at once
WHOLE_FILE, REST_OF_FILE, RANGE_REFUSED = 200, 206, 416  # answers of a server

MAX_MEMBERS = 1000
MEMBER_BYTES = 10_240  # of headers and padding that a member may have beside its content
GZIP_MAGIC = b"\x1f\x8b"
PLAIN_NAME = re.compile(r"[A-Za-z0-9 ._+-]{1,100}")
SHOWN = 60  # characters of a name in a message


def download(archive: Archive, folder: Path, report: Reporter) -> Path:
    """Download an archive and verify it.

    What has arrived is kept in `<name>.part`, and the next call goes on from there, unless it turns
    out to be wrong. The file gets its name only after its checksum agrees.

    Raises:
        SourceError: The server cannot be reached, refuses, cuts off or sends something else.
        StorageError: The folder cannot be written.
    """
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise SourceError(
            "downloading needs the package pooch; get it with: pip install 'ttapca[data]'"
        ) from error
    part = folder / f"{archive.file_name}.part"
    resumed = part.exists()
    logger, get = pooch.get_logger(), _Download(archive, part, report)
    level = logger.level
    logger.setLevel(logging.WARNING)  # the reporter says what happens
    try:
        with writing(part):
            found = pooch.retrieve(
                archive.url, archive.checksum, archive.file_name, folder, downloader=get
            )
    except ValueError as error:  # pooch's word for another checksum; it has removed the file
        if resumed:  # the beginning came from an earlier run and may be what was wrong
            return download(archive, folder, report)
        raise SourceError(
            "what arrived has another checksum than the publisher's; it was removed"
        ) from error
    finally:
        logger.setLevel(level)
    return Path(found)


class _Download:
    """Pooch's downloader, taught to go on where it was cut off; it is its own progress bar."""

    def __init__(self, archive: Archive, part: Path, report: Reporter) -> None:
        self.total = 0  # pooch sets this of a progress bar
        self._archive = archive
        self._part = part
        self._report = report
        self._file: IO[bytes]

    def __call__(self, url: str, output_file: Any, _: object) -> None:
        """Bring the whole archive to `output_file`, as pooch asks for it."""
        try:
            with self._part.open("ab") as self._file:
                fault = self._receive_all(url)
        finally:
            arrived, whole = self._part.stat().st_size, self._archive.size
            if not arrived:
                self._part.unlink()
        if arrived == whole:
            self._part.replace(output_file)
        elif arrived:
            raise SourceError(
                f"{fault}; {arrived:,} of {whole:,} bytes have arrived, and the same command goes "
                "on from there"
            )
        else:
            raise SourceError(fault)

    def _receive_all(self, url: str) -> str:
        """Connect until all has arrived, or nothing more comes; then say why."""
        from requests import RequestException

        fault = "the connection ended"
        for _ in range(ATTEMPTS):
            if self._file.tell() > self._archive.size:
                self._start_again()
            start = self._file.tell()
            if start == self._archive.size:
                break
            try:
                self._receive(url, start)
            except RequestException as error:
                fault = _reason(error)
                if error.response is not None and error.response.status_code == RANGE_REFUSED:
                    self._start_again()  # the file there is shorter: ours is not its beginning
                    continue
            if self._file.tell() <= start:
                break
        return fault

    def _receive(self, url: str, start: int) -> None:
        from pooch import HTTPDownloader

        headers = {"User-Agent": "ttapca", "Accept-Encoding": "identity"}
        HTTPDownloader(
            progressbar=self,
            chunk_size=PIECE_BYTES,
            timeout=TIMEOUT_SECONDS,
            headers=headers | ({"Range": f"bytes={start}-"} if start else {}),
            hooks={"response": self._check_answer},
        )(url, self._file, None)

    def _check_answer(self, answer: requests.Response, **_: object) -> None:
        """Before the content is read, refuse another file, such as a log-in page."""
        if answer.status_code not in (WHOLE_FILE, REST_OF_FILE):
            return
        stated = answer.headers.get("Content-Length", "")
        if answer.status_code == REST_OF_FILE:
            stated = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if stated.isdecimal() and int(stated) != self._archive.size:
            answer.close()
            raise SourceError(
                f"the server has a file of {int(stated):,} bytes; the publisher's has "
                f"{self._archive.size:,}"
            )
        if answer.status_code == WHOLE_FILE:  # also what a server sends that knows no ranges
            self._start_again()
        answer.raw.headers.pop("Content-Encoding", None)  # the file as it is, not unpacked

    def _start_again(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)

    def update(self, _: int) -> None:
        """Take note that pooch has written a piece."""
        done, whole = self._file.tell(), self._archive.size
        if done > whole:
            raise SourceError(
                f"the server sends more than the {whole:,} bytes that the publisher states"
            )
        self._report.advance(f"downloading {self._archive.file_name}", done, whole)

    def reset(self) -> None:
        """Do nothing: pooch expects this of a progress bar."""

    close = reset


def _reason(error: requests.RequestException) -> str:
    from requests.exceptions import ChunkedEncodingError

    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    cut_off = isinstance(error, ChunkedEncodingError)
    reason = getattr(root, "strerror", None) or str(root) or type(root).__name__
    return f"{'the connection broke' if cut_off else 'not reachable'}: {reason}"


def unpack_tar(
    archive: Path,
    target: Path,
    *,
    limit: int,
    report: Reporter,
    only: Collection[str] | None = None,
) -> None:
    """Unpack the files in the top folder of a tar archive.

    Every entry is checked before anything is written: a link, a device, a path that leads elsewhere
    or more than `limit` bytes in all condemn the whole archive.

    Args:
        archive: The archive, plain or packed by gzip.
        target: An existing folder.
        limit: Bytes that the content may have in all.
        report: Told how far it is.
        only: Names of files to take; all by default.

    Raises:
        DataFormatError: The archive is damaged, truncated, hostile or too large.
        StorageError: The target cannot be written.
    """
    with open_tar(archive, limit) as tar:
        members, total, done = [], 0, 0
        for number, member in enumerate(tar):
            total += member.size
            if number >= MAX_MEMBERS or not 0 <= member.size <= total <= limit:
                raise _too_much(archive, limit)
            if not member.isdir():
                members.append(_without_folder(member, archive))
        for member in members:
            if "/" not in member.name and (only is None or member.name in only):
                with writing(target / member.name):
                    tar.extract(member, target, filter="data")
            done += member.size
            report.advance(f"unpacking {archive.name}", done, total)


def _without_folder(member: tarfile.TarInfo, archive: Path) -> tarfile.TarInfo:
    """The same member below its top folder, and with the rights of any other file."""
    parts = PurePosixPath(member.name).parts
    stays_inside = bool(parts) and ".." not in parts and all(map(PLAIN_NAME.fullmatch, parts))
    if not member.isreg() or not stays_inside:
        raise DataFormatError(
            f"{archive} is refused: its entry `{ascii(member.name[:SHOWN])[1:-1]}` is a link, a "
            "device or leads out of the folder; only files and folders are expected."
        )
    return member.replace(name="/".join(parts[1:] or parts), mode=0o644, deep=False)


@contextmanager
def open_tar(archive: Path, limit: int) -> Iterator[tarfile.TarFile]:
    """Open a tar archive so that no header in it can ask for much memory or time.

    It may be packed by gzip. Its members must be read in pieces of at most `CHUNK_BYTES`.
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
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:
            raise DataFormatError(
                f"{self._archive} is refused: it has a header of more than {CHUNK_BYTES:,} bytes."
            )
        return self._file.read(size)

    def seek(self, place: int) -> int:
        if place > self._limit + MAX_MEMBERS * MEMBER_BYTES:
            raise _too_much(self._archive, self._limit)
        return self._file.seek(place)


def _too_much(archive: Path, limit: int) -> DataFormatError:
    return DataFormatError(
        f"{archive} is refused: it would unpack to more than {limit:,} bytes or {MAX_MEMBERS} "
        "entries, which the real one does not."
    )
