"""`Results`: one SQLite file that keeps every finished measurement, whatever happens to the run.

What is run together is written in one transaction: after a crash, `kill -9` or a full disk, all of
it is in the file or none of it. `application_id` and `user_version` in the file say what it is and
which layout it has, so no other database is mistaken for one, or written to.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, Self, get_args

from ttapca._checks import (
    Blob,
    ListOf,
    Maybe,
    Measured,
    Number,
    OneOf,
    Plain,
    Record,
    Rule,
    Text,
    Whole,
    conform,
    shown,
)
from ttapca.benchmark.cells import SETTINGS, Cell, Observation, Outcome, Row, Status
from ttapca.errors import DataFormatError, DataNotFoundError, StorageError
from ttapca.support.disk import queued
from ttapca.support.parsing import parse_json

APPLICATION_ID = 0x74746170  # "ttap"
LAYOUT = 1
BUSY_SECONDS = 30  # a reader may hold the file for a moment
LONGEST_VALUE = 100_000_000  # bytes of a text or a picture

# By the type of a field: its column, and what may stand in it. Names of methods, corruptions and
# data may be those of another version.
_NUMBERS = ListOf(Measured(), 0, 10_000_000)
COLUMNS: dict[str, tuple[str, Rule]] = {
    "str": ("TEXT NOT NULL", Text(100_000)),
    "Setting": ("TEXT NOT NULL", OneOf(SETTINGS)),
    "Status": ("TEXT NOT NULL", OneOf(get_args(Status))),
    "int": ("INTEGER NOT NULL", Whole(0)),
    "float": ("REAL NOT NULL", Number(0)),
    "float | None": ("REAL", Maybe(Number())),
    "tuple[float, ...]": ("TEXT NOT NULL", _NUMBERS),
    "dict[str, str]": ("TEXT NOT NULL", Record(others=Text(10_000))),
}
KEY = {field.name: str(field.type) for field in dataclasses.fields(Cell)}
MEASURED = {field.name: str(field.type) for field in dataclasses.fields(Outcome)}
SEQUENCES = [name for name, kind in MEASURED.items() if kind.startswith("tuple")]
AS_JSON = [*SEQUENCES, *(name for name, kind in MEASURED.items() if kind.startswith("dict"))]
SPECTRA = ("source_spectrum", "test_spectrum", "gains")
STAGES = ("before", "after")
_PERCENT = Maybe(Number(0, 101))  # with room for rounding
CELL = {name: COLUMNS[kind][1] for name, kind in KEY.items()} | {"severity": Whole(0, 5)}
OUTCOME = {name: COLUMNS[kind][1] for name, kind in MEASURED.items()}
OUTCOME |= dict.fromkeys(("error", "calibration_error"), _PERCENT)
OPTIONS: dict[str, Rule] = {"options": Record(others=Plain())}
OBSERVATION: dict[str, Rule] = dict.fromkeys(SPECTRA, _NUMBERS)
PICTURE: dict[str, Rule] = {"stage": OneOf(STAGES), "png": Blob(10_000_000)}
REFERENCE = "REFERENCES results (id) ON DELETE CASCADE"
SCHEMA = (
    "CREATE TABLE results ( id INTEGER PRIMARY KEY, "
    + "".join(f"{name} {COLUMNS[kind][0]}, " for name, kind in (KEY | MEASURED).items())
    + f"UNIQUE ({', '.join(KEY)}) )",
    f"CREATE TABLE observations ( result INTEGER PRIMARY KEY {REFERENCE}, "
    + f"{', '.join(f'{name} TEXT NOT NULL' for name in SPECTRA)} )",
    f"CREATE TABLE pictures ( result INTEGER NOT NULL {REFERENCE}, stage TEXT NOT NULL, "
    "number INTEGER NOT NULL, png BLOB NOT NULL, PRIMARY KEY (result, stage, number) )",
)


class Results:
    """A file of results.

    Args:
        path: The file; it is made where there is none.
        readonly: Whether to read only, which also works in a folder that cannot be written to;
            then no file is made.

    Raises:
        DataNotFoundError: There is no file to read.
        DataFormatError: The file is something else, is damaged, has a later layout, or holds
            tables, views or triggers that ttapca did not make.
        StorageError: The file cannot be opened or written; or it is opened to read, its folder
            cannot be written to, and a run has not finished writing it.

    Example:
        >>> import tempfile
        >>> with Results(Path(tempfile.mkdtemp()) / "results.sqlite") as results:
        ...     results.rows()
        []
    """

    def __init__(self, path: Path | str, *, readonly: bool = False) -> None:
        self.path = Path(path)
        if readonly and not self.path.is_file():
            raise DataNotFoundError(
                f"There is no file of results at {self.path}. `ttapca bench` writes one."
            )
        with self._errors_explained():
            self._connection = _reader(self.path) if readonly else _connection(self.path)
        try:
            with self._errors_explained():
                self._open(readonly)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        """Return the results themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; everything that was added is in it."""
        with self._errors_explained():
            self._connection.close()

    def rows(self) -> list[Row]:
        """Return all measurements, in the order in which they were made."""
        names = ", ".join((*KEY, *MEASURED))
        found = self._read(f"SELECT {names} FROM results ORDER BY id")  # noqa: S608
        split = len(KEY)
        return [Row(self._cell(values[:split]), self._outcome(values[split:])) for values in found]

    def observations(self) -> list[Observation]:
        """Return what the filters did, in the order of the rows."""
        pictures: dict[tuple[int, str], list[bytes]] = {}
        for result, stage, png in self._read(
            "SELECT result, stage, png FROM pictures ORDER BY result, stage, number"
        ):
            self._check({"stage": stage, "png": png}, PICTURE)
            pictures.setdefault((result, stage), []).append(png)
        names = ", ".join((*KEY, *SPECTRA))
        found = []
        for number, *values in self._read(
            f"SELECT id, {names} FROM results JOIN observations ON result = id ORDER BY id"  # noqa: S608
        ):
            texts = zip(SPECTRA, values[len(KEY) :], strict=True)
            facts: dict[str, Any] = {name: self._parsed(name, text) for name, text in texts}
            self._check(facts, OBSERVATION)
            facts = {name: tuple(numbers) for name, numbers in facts.items()}
            facts |= {stage: tuple(pictures.get((number, stage), ())) for stage in STAGES}
            found.append(Observation(self._cell(values[: len(KEY)]), **facts))
        return found

    def statuses(self) -> dict[Cell, Status]:
        """Return how each measurement ended."""
        return {row.cell: row.outcome.status for row in self.rows()}

    def add(self, rows: Iterable[Row], observations: Iterable[Observation] = ()) -> None:
        """Write what was run together: all of it or, when anything goes wrong, nothing.

        Args:
            rows: Rows to write. One whose cell is in the file already replaces it, in its place.
            observations: Of some of these rows.

        Raises:
            StorageError: The disk is full or refuses; what was there before stays.
        """
        with self._errors_explained(), self._transaction():
            numbers = {row.cell: self._put(row) for row in rows}
            for observation in observations:
                self._put_observation(numbers[observation.cell], observation)

    def reserved(
        self, waiting: Callable[[str], None] | None = None
    ) -> AbstractContextManager[object]:
        """Be the only run that fills the file; wait while another one does.

        Args:
            waiting: Called once with who holds the file, if one has to wait.
        """
        return queued(self.path.with_name(f"{self.path.name}-lock"), waiting)

    def _cell(self, stored: Sequence[Any]) -> Cell:
        values = dict(zip(KEY, stored, strict=True))
        self._check(values, CELL)
        self._check({"options": self._parsed("options", values["options"])}, OPTIONS)
        return Cell(**values)

    def _outcome(self, stored: Sequence[Any]) -> Outcome:
        values = dict(zip(MEASURED, stored, strict=True))
        values |= {name: self._parsed(name, values[name]) for name in AS_JSON}
        self._check(values, OUTCOME)
        return Outcome(**values | {name: tuple(values[name]) for name in SEQUENCES})

    def _parsed(self, name: str, text: object) -> Any:
        self._check({name: text}, {name: Text(LONGEST_VALUE)})
        where = f"`{name}` in {self.path}"
        # A method that diverged has measured NaN, which is a finding.
        return parse_json(str(text), where, DataFormatError, largest=LONGEST_VALUE, finite=False)

    def _check(self, values: dict[str, Any], rules: dict[str, Rule]) -> None:
        conform(values, Record(rules), f"{self.path} is damaged or was changed", DataFormatError)

    def _put(self, row: Row) -> int:
        values = vars(row.cell) | vars(row.outcome)
        values |= {name: json.dumps(values[name]) for name in AS_JSON}
        marks = ", ".join(f":{name}" for name in values)
        kept = ", ".join(f"{name} = excluded.{name}" for name in MEASURED)
        self._connection.execute(
            f"INSERT INTO results ({', '.join(values)}) VALUES ({marks}) "  # noqa: S608
            f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {kept}",
            values,
        )
        where = " AND ".join(f"{name} = :{name}" for name in KEY)
        found = self._connection.execute(f"SELECT id FROM results WHERE {where}", values)  # noqa: S608
        number: int = found.fetchone()[0]
        for table in ("observations", "pictures"):
            self._connection.execute(f"DELETE FROM {table} WHERE result = ?", (number,))  # noqa: S608
        return number

    def _put_observation(self, number: int, observation: Observation) -> None:
        spectra = [json.dumps(getattr(observation, name)) for name in SPECTRA]
        self._connection.execute("INSERT INTO observations VALUES (?, ?, ?, ?)", (number, *spectra))
        for stage in STAGES:
            for place, png in enumerate(getattr(observation, stage)):
                self._connection.execute(
                    "INSERT INTO pictures VALUES (?, ?, ?, ?)", (number, stage, place, png)
                )

    def _open(self, readonly: bool) -> None:
        """Make sure that the file is ours before anything is written to it."""
        application, layout = (self._pragma(name) for name in ("application_id", "user_version"))
        found = self._read("SELECT type, name, sql FROM sqlite_master")
        if application != APPLICATION_ID and (found or application or readonly):
            raise DataFormatError(
                f"A file of results is one that `ttapca bench` wrote; {self.path} is another "
                "database. Name another file."
            )
        if layout > LAYOUT:
            raise DataFormatError(
                f"{self.path} has layout {layout}, and this ttapca knows layouts up to {LAYOUT}: "
                "a later version wrote it. Update ttapca."
            )
        if found:
            self._check_schema(layout, found)
        if not readonly:
            self._pragma("journal_mode = WAL")
            self._pragma("synchronous = FULL")  # a finished measurement outlasts a power cut
            self._pragma("foreign_keys = ON")
        if not found:
            self._make()
        elif (state := self._pragma("quick_check")) != "ok":
            raise self._damaged(str(state))

    def _check_schema(self, layout: int, found: Iterable[tuple[Any, ...]]) -> None:
        """Refuse a schema that is not ours: a view or a trigger is a program."""
        if layout != LAYOUT:
            raise self._damaged(f"it has layout {layout}")
        for kind, name, sql in found:
            automatic = kind == "index" and sql is None  # SQLite makes these for unique columns
            if not automatic and " ".join(str(sql).split()) not in SCHEMA:
                raise DataFormatError(
                    f"A file of results has only the tables that ttapca made; {self.path} has the "
                    f"{shown(kind)} {shown(name)} as well, or in another form. Name another file."
                )

    def _make(self) -> None:
        with self._transaction():
            # Another process may have made it since we looked.
            if self._read("SELECT name FROM sqlite_master"):
                return
            for statement in SCHEMA:
                self._connection.execute(statement)
            self._pragma(f"application_id = {APPLICATION_ID}")
            self._pragma(f"user_version = {LAYOUT}")

    def _pragma(self, words: str) -> Any:
        found = self._connection.execute(f"PRAGMA {words}").fetchone()
        return None if found is None else found[0]

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        with self._errors_explained(), closing(self._connection.execute(query)) as cursor:
            return cursor.fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it already
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn SQLite's errors into ones that name the file and the way out."""
        try:
            yield
        except UnicodeDecodeError as error:  # SQLite quotes the file in its message
            raise self._damaged("its schema is not text") from error
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
                raise self._damaged(str(error)) from error
            if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
                raise StorageError(
                    f"Cannot write to {self.path}: {error}. All finished measurements are in the "
                    "file; free some space and run the same command again."
                ) from error
            raise StorageError(
                f"Cannot use the file of results {self.path}: {error}. Choose another place with "
                "`--to FILE`, or see who else uses it."
            ) from error

    def _damaged(self, finding: str) -> DataFormatError:
        return DataFormatError(
            f"{self.path} must be a whole file of results; it is damaged or something else: "
            f"{finding}. Move it away, or name another file."
        )


def _reader(path: Path) -> sqlite3.Connection:
    """Open a file to read it, even in a folder that cannot be written to.

    SQLite makes two files beside one in WAL mode, even to read it, and gives up where it cannot.
    Then the file is opened as one that never changes, which is right as long as no rows are
    waiting in the log beside it.
    """
    connection = _connection(path)
    try:
        # With `mode=ro` SQLite would leave its two files behind.
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT name FROM sqlite_master").fetchone()
        return connection
    except BaseException as error:
        connection.close()
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
    return _connection(f"{path.resolve().as_uri()}?immutable=1", uri=True)


def _connection(path: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    """Open a file without trusting its schema or the sizes that it states."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, uri=uri)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection
