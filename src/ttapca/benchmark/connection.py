"""Open a SQLite file to write to it or only to read it, also where nothing can be written.

A file in WAL mode has two more beside it while somebody uses it, and SQLite makes them even to
read. Where the folder cannot be written it gives up; then the file is opened as one that does not
change, which is right as long as nobody has rows for it in the log beside it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ttapca.errors import StorageError

BUSY_SECONDS = 30  # a reader may hold the file for a moment
LONGEST_VALUE = 100_000_000  # bytes of a text or a picture


def connect(path: Path, *, readonly: bool) -> sqlite3.Connection:
    """Open a file.

    Args:
        path: The file.
        readonly: Whether nothing will be written.

    Returns:
        A connection that commits by itself.

    Raises:
        StorageError: The file lies in a folder that cannot be written, and a part of it is still
            in its log.
        sqlite3.Error: SQLite cannot open it.

    Example:
        >>> connect(Path(":memory:"), readonly=False).execute("SELECT 1").fetchone()
        (1,)
    """
    connection = _careful(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None))
    if not readonly:
        return connection
    try:
        # As a reader and no more, but in a way that tidies up after itself: with `mode=ro` SQLite
        # would leave its two files behind.
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT name FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        name = getattr(error, "sqlite_errorname", "")
        if not path.is_file() or not name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
            raise
        return _connect_to_what_stands_still(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_what_stands_still(path: Path) -> sqlite3.Connection:
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise StorageError(
            f"A file of results in a folder that cannot be written is read when it is complete; "
            f"{path} has its last rows in {log.name}: it is being written, or the run was killed. "
            "Read it when the run has ended, or copy both files to a folder of your own."
        )
    address = f"{path.resolve().as_uri()}?immutable=1"
    return _careful(sqlite3.connect(address, uri=True, isolation_level=None))


def _careful(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Trust nothing that a file brings: neither its schema nor the sizes it states."""
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA mmap_size = 0")
    except BaseException:
        connection.close()
        raise
    return connection
