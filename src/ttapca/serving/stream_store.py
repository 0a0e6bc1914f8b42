"""The states of streams on disk, in one SQLite file, which `kill -9` leaves whole."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from ttapca._checks import shown
from ttapca.errors import SavedStreamError, StorageError
from ttapca.serving.stream_record import LONGEST_NAME, NAME_PATTERN
from ttapca.support.disk import writing
from ttapca.support.parsing import check_plain

APPLICATION = 0x7474_7063  # "ttpc", in the header of the file
SCHEMA = {
    "streams": """CREATE TABLE streams (
        name TEXT PRIMARY KEY NOT NULL, state BLOB NOT NULL, saved REAL NOT NULL
    ) WITHOUT ROWID""",
    # Of streams whose alarm is on, so that no states must be read to find them.
    "shifted": "CREATE TABLE shifted (name TEXT PRIMARY KEY NOT NULL) WITHOUT ROWID",
}
LARGEST_STATE = 1 << 28  # bytes
# The file may be from anybody: SQLite lets a row have values of any type in any column.
NAMES = "SELECT name FROM {} WHERE typeof(name) = 'text' AND length(name) <= ? ORDER BY name"
STATE = (
    "SELECT typeof(state), length(state), "
    "CASE WHEN typeof(state) = 'blob' AND length(state) <= ? THEN state END "
    "FROM streams WHERE name = ?"
)


class StreamStore(AbstractContextManager["StreamStore"]):
    """States by the names of their streams; any thread may call it.

    Args:
        path: The file; it is made if it does not exist.

    Example:
        >>> import tempfile
        >>> with StreamStore(Path(tempfile.mkdtemp()) / "streams.sqlite") as store:
        ...     store.write({"camera-7": b"..."})
        ...     store.names(), store.read("camera-7"), store.read("camera-8")
        (['camera-7'], b'...', None)
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("", "-wal", "-shm", "-journal"):  # SQLite would wait for a pipe
            check_plain(self.path.with_name(self.path.name + suffix), SavedStreamError)
        try:
            self._connection = self._opened()
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"Cannot keep streams in {self.path}: {error}. If another server uses this file, "
                "give this one a file of its own."
            ) from error
        except sqlite3.DatabaseError as error:
            raise SavedStreamError(
                f"{self.path} is no file of streams: {error}. Choose another place for them."
            ) from error

    def _opened(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False)
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # two servers would lose states
            connection.execute("PRAGMA journal_mode = WAL")
            # With WAL, NORMAL syncs only when the log has grown long: a power failure could take
            # hours of a quiet service with it. FULL is one sync for each transaction, so each save.
            connection.execute("PRAGMA synchronous = FULL")
            (found,) = connection.execute("PRAGMA application_id").fetchone()
            # Views and triggers would run what their author has written, for ever if need be.
            query = "SELECT name, substr(sql, 1, 999) FROM sqlite_master WHERE sql NOT NULL LIMIT 9"
            tables = {str(name): str(sql).split() for name, sql in connection.execute(query)}
            if found != APPLICATION and tables:
                raise sqlite3.DatabaseError("it belongs to another program")
            for name, sql in tables.items():
                if sql != SCHEMA.get(name, "").split():
                    raise sqlite3.DatabaseError(f"it holds {shown(name)}, which is not ours")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            for name in SCHEMA.keys() - tables.keys():
                connection.execute(SCHEMA[name])
        except BaseException:
            connection.close()
            raise
        return connection

    def names(self) -> list[str]:
        """Return the names of all streams, sorted; a row that has none is left out."""
        return self._names("streams")

    def shifted(self) -> list[str]:
        """Return the names of the streams that were written as shifted, sorted."""
        return self._names("shifted")

    def _names(self, table: str) -> list[str]:
        with self._transaction() as connection:
            rows = connection.execute(NAMES.format(table), (LONGEST_NAME,))
            return [name for (name,) in rows if re.fullmatch(NAME_PATTERN, name)]

    def read(self, name: str) -> bytes | None:
        """Return the state of a stream; None if there is none.

        Raises:
            SavedStreamError: What is there is no state.
        """
        with self._transaction() as connection:
            row = connection.execute(STATE, (LARGEST_STATE, name)).fetchone()
        if row is not None and row[2] is None:
            raise SavedStreamError(
                f"A state is a blob of at most {LARGEST_STATE:,} bytes; found {row[0]} of {row[1]}."
            )
        return None if row is None else bytes(row[2])

    def write(self, states: Mapping[str, bytes], shifted: Collection[str] = ()) -> None:
        """Replace the states of some streams by name, all of them or none."""
        now = time.time()
        rows = [(name, state, now) for name, state in states.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO streams VALUES (?, ?, ?)", rows)
            connection.executemany("DELETE FROM shifted WHERE name = ?", _rows(states))
            connection.executemany("INSERT INTO shifted VALUES (?)", _rows(shifted))

    def drop(self, names: Iterable[str]) -> None:
        """Forget some streams, all of them or none."""
        rows = _rows(names)
        with self._transaction() as connection:
            connection.executemany("DELETE FROM streams WHERE name = ?", rows)
            connection.executemany("DELETE FROM shifted WHERE name = ?", rows)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection to one thread at a time; an error of SQLite is a `StorageError`."""
        try:
            with self._lock, self._connection:
                yield self._connection
        except sqlite3.Error as error:
            raise StorageError(
                f"Streams in {self.path} cannot be read or written: {error}. Check the disk."
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._connection.close()

    def __exit__(self, *exception: object) -> None:
        """Close the file."""
        self.close()


def _rows(names: Iterable[str]) -> list[tuple[str]]:
    return [(name,) for name in names]
