"""Checksums of files, written `algorithm:digest`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ttapca.datasets.progress import Reporter, Silent

CHUNK_BYTES = 1 << 20


def checksum(path: Path, algorithm: str, report: Reporter | None = None) -> str:
    """Compute the checksum of a file.

    Args:
        path: The file.
        algorithm: A name that `hashlib` knows.
        report: Who wants to see the progress.

    Returns:
        `algorithm:digest`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "empty"
        >>> path.touch()
        >>> checksum(path, "md5")
        'md5:d41d8cd98f00b204e9800998ecf8427e'
    """
    report = report or Silent()
    digest = hashlib.new(algorithm, usedforsecurity=False)
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report.advance(f"checking {path.name}", done, total)
    return f"{algorithm}:{digest.hexdigest()}"


def matches(path: Path, expected: str, report: Reporter | None = None) -> bool:
    """Whether a file has the checksum that it should have.

    Args:
        path: The file.
        expected: `algorithm:digest`.
        report: Who wants to see the progress.

    Returns:
        Whether they agree.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "empty"
        >>> path.touch()
        >>> matches(path, "md5:d41d8cd98f00b204e9800998ecf8427e")
        True
    """
    return checksum(path, expected.partition(":")[0], report) == expected
