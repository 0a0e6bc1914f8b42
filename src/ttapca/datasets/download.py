"""Download a file whose size and checksum are known, and go on where it was cut off."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from ttapca.datasets.checksums import CHUNK_BYTES, matches
from ttapca.datasets.progress import Reporter
from ttapca.datasets.sources import Archive
from ttapca.errors import SourceError
from ttapca.support.disk import writing

TIMEOUT_SECONDS = 15.0  # to connect, and for every read: a silent server is a dead one
ATTEMPTS = 3  # connections in one run, each going on where the last was cut off


def download(
    archive: Archive, folder: Path, report: Reporter, *, timeout: float = TIMEOUT_SECONDS
) -> Path:
    """Download an archive and verify it.

    What has arrived is kept in `<name>.part` and continued by the next call, unless it turns out
    to be wrong. The file gets its name only after its checksum agrees.

    Args:
        archive: What to download.
        folder: An existing folder for it.
        report: Who wants to see the progress.
        timeout: Seconds to wait for the server.

    Returns:
        The verified file.

    Raises:
        SourceError: The server cannot be reached, refuses, cuts off or sends something else.
        StorageError: The folder cannot be written.

    Example:
        >>> from ttapca.datasets.catalog import DATA_SETS
        >>> from ttapca.datasets.progress import Silent
        >>> path = download(DATA_SETS["cifar10"].archives[0], Path("."), Silent())  # doctest: +SKIP
    """
    target = folder / archive.file_name
    part = folder / f"{archive.file_name}.part"
    if target.is_file() and matches(target, archive.checksum, report):
        return target
    resumed = _size(part) > 0
    _complete(archive, part, report, timeout)
    if not matches(part, archive.checksum, report):
        part.unlink()
        if not resumed:
            raise SourceError(
                "what arrived has another checksum than the publisher's; it was removed"
            )
        # The beginning came from an earlier run and may be what is wrong: once more from nothing.
        return download(archive, folder, report, timeout=timeout)
    with writing(target):
        part.replace(target)
    return target


def _complete(archive: Archive, part: Path, report: Reporter, timeout: float) -> None:
    if _size(part) > archive.size:
        part.unlink()
    reason = "the connection ended"
    for _ in range(ATTEMPTS):
        if _size(part) == archive.size:
            return
        try:
            _receive(archive, part, report, timeout)
        except SourceError as error:
            if not _size(part):
                raise
            reason = str(error)
            break
    if _size(part) != archive.size:
        raise SourceError(
            f"{reason}; {_size(part):,} of {archive.size:,} bytes have arrived, and the same "
            "command goes on from there"
        )


def _receive(archive: Archive, part: Path, report: Reporter, timeout: float) -> None:
    start = _size(part)
    headers = {"User-Agent": "ttapca", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(archive.url, headers=headers)  # noqa: S310 - a catalogued URL
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            _check_stated_size(response, archive)
            # A server that knows no ranges answers 200 with the whole file.
            goes_on = response.status == http.HTTPStatus.PARTIAL_CONTENT
            with writing(part), part.open("ab" if goes_on else "wb") as file:
                _copy(response, file, archive, report)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # the file there is shorter than what we hold: ours is not its beginning
            return
        raise SourceError(f"the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise SourceError(f"not reachable: {_reason(error.reason)}") from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise SourceError(f"the connection broke: {_reason(error)}") from error


def _check_stated_size(response: http.client.HTTPResponse, archive: Archive) -> None:
    """Refuse another file, such as a log-in page, before it is taken for a beginning of ours."""
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        total = response.headers.get("Content-Length", "")
    if total.isdecimal() and int(total) != archive.size:
        raise SourceError(
            f"the server has a file of {int(total):,} bytes; the publisher's has {archive.size:,}"
        )


def _copy(response: IO[bytes], file: IO[bytes], archive: Archive, report: Reporter) -> None:
    done = file.tell()
    task = f"downloading {archive.file_name}"
    while chunk := _read(response):
        done += len(chunk)
        if done > archive.size:
            raise SourceError(
                f"the server sends more than the {archive.size:,} bytes that the publisher states"
            )
        file.write(chunk)
        report.advance(task, done, archive.size)
    file.flush()
    os.fsync(file.fileno())


def _read(response: IO[bytes]) -> bytes:
    try:
        return response.read(CHUNK_BYTES)
    except (http.client.HTTPException, OSError):
        # Cut off: what arrived so far is good, and a further attempt asks for the rest.
        return b""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(reason: object) -> str:
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__
