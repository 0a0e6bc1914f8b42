"""How a file of results is opened, without trusting it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ttapca.benchmark.results_layout import LONGEST_VALUE
from ttapca.errors import StorageError

BUSY_SECONDS = 30  # a reader may hold the file for a moment


def reader(path: Path) -> sqlite3.Connection:
    """Open a file to read it, even in a folder that cannot be written to.

    SQLite makes two files beside one in WAL mode, even to read it, and gives up where it cannot.
    Then the file is opened as one that never changes, which is right as long as no rows are
    waiting in the log beside it.
    """
    opened = connection(path)
    try:
        # With `mode=ro` SQLite would leave its two files behind.
        opened.execute("PRAGMA query_only = ON")
        opened.execute("SELECT name FROM sqlite_master").fetchone()
        return opened
    except BaseException as error:
        opened.close()
        name = getattr(error, "sqlite_errorname", "")
        if not path.is_file() or not name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            raise
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise StorageError(
            f"In a folder that cannot be written to, only a complete file of results can be read; "
            f"{path} has its last rows in {log.name}: it is being written, or the run was killed. "
            "Read it when the run has ended, or copy both files to a folder of your own."
        )
    return connection(f"{path.resolve().as_uri()}?immutable=1", uri=True)


def connection(path: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    """Open a file without trusting its schema or the sizes that it states."""
    opened = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, uri=uri)
    try:
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            opened.execute(f"PRAGMA {setting}")
    except BaseException:
        opened.close()
        raise
    return opened
