"""`Results`: one SQLite file that keeps every finished measurement.

The rows of a unit are written in one transaction. A file of an earlier layout is read as it is, and
brought to the present one when it is opened for writing. Its `application_id` tells it from other
databases, its `user_version` is the layout. Tables of the first layout never change; later ones
added `per_image`, `labels` (not written any more), `claims`.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, get_args

from ttapca import _checks as rules
from ttapca._checks import conform, shown
from ttapca.benchmark.rows import SETTINGS, Cell, Fingerprint, Observation, Outcome, Row, Status
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, StorageError
from ttapca.support.disk import queued
from ttapca.support.parsing import parse_json

APPLICATION_ID = 0x74746170  # "ttap"
LAYOUT = 4
WITH_BITS, WITH_LABELS, WITH_FINGERPRINTS = 2, 3, 4  # the first layouts that have them
LONGEST_VALUE = 100_000_000  # bytes of a text or a picture
BUSY_SECONDS = 30  # a reader may hold the file for a moment

# By the type of a field: its column, and the rule for its values. Names of methods, corruptions and
# data may be of another version.
_NUMBERS = rules.ListOf(rules.MEASURED, 0, 10_000_000)
COLUMNS: dict[str, tuple[str, rules.Rule]] = {
    "str": ("TEXT NOT NULL", rules.Text(100_000)),
    "Setting": ("TEXT NOT NULL", rules.OneOf(SETTINGS)),
    "Status": ("TEXT NOT NULL", rules.OneOf(get_args(Status))),
    "int": ("INTEGER NOT NULL", rules.Whole(0)),
    "float": ("REAL NOT NULL", rules.Number(0)),
    "float | None": ("REAL", rules.Maybe(rules.Number())),
    "tuple[float, ...]": ("TEXT NOT NULL", _NUMBERS),
    "dict[str, str]": ("TEXT NOT NULL", rules.Record(others=rules.Text(10_000))),
}
KEY = {field.name: str(field.type) for field in dataclasses.fields(Cell)}
CORRECT = "correct"  # the field of `Outcome` that has a table of its own
MEASURED = {
    field.name: str(field.type) for field in dataclasses.fields(Outcome) if field.name != CORRECT
}
SEQUENCES = [name for name, kind in MEASURED.items() if kind.startswith("tuple")]
AS_JSON = [*SEQUENCES, *(name for name, kind in MEASURED.items() if kind.startswith("dict"))]
SPECTRA = ("source_spectrum", "test_spectrum", "gains")
STAGES = ("before", "after")
_PERCENT = rules.Maybe(rules.Number(0, 101))  # with room for rounding
CELL = {name: COLUMNS[kind][1] for name, kind in KEY.items()} | {"severity": rules.Whole(0, 5)}
OUTCOME = {name: COLUMNS[kind][1] for name, kind in MEASURED.items()}
OUTCOME |= dict.fromkeys(("error", "calibration_error"), _PERCENT)
OPTIONS: dict[str, rules.Rule] = {"options": rules.Record(others=rules.Plain())}
OBSERVATION: dict[str, rules.Rule] = dict.fromkeys(SPECTRA, _NUMBERS)
PICTURE: dict[str, rules.Rule] = {"stage": rules.OneOf(STAGES), "png": rules.blob(10_000_000)}
REFERENCE = "REFERENCES results (id) ON DELETE CASCADE"
_FIRST_SCHEMA = (
    "CREATE TABLE results ( id INTEGER PRIMARY KEY, "
    + "".join(f"{name} {COLUMNS[kind][0]}, " for name, kind in (KEY | MEASURED).items())
    + f"UNIQUE ({', '.join(KEY)}) )",
    f"CREATE TABLE observations ( result INTEGER PRIMARY KEY {REFERENCE}, "
    + f"{', '.join(f'{name} TEXT NOT NULL' for name in SPECTRA)} )",
    f"CREATE TABLE pictures ( result INTEGER NOT NULL {REFERENCE}, stage TEXT NOT NULL, "
    "number INTEGER NOT NULL, png BLOB NOT NULL, PRIMARY KEY (result, stage, number) )",
)
ADDED = {  # by layout: the table that it added
    WITH_BITS: f"CREATE TABLE per_image ( result INTEGER PRIMARY KEY {REFERENCE}, "
    f"{CORRECT} BLOB NOT NULL )",
    WITH_LABELS: "CREATE TABLE labels ( data TEXT NOT NULL, images INTEGER NOT NULL, "
    "names TEXT NOT NULL, numbers BLOB NOT NULL, PRIMARY KEY (data, images) )",
    WITH_FINGERPRINTS: "CREATE TABLE claims ( key TEXT NOT NULL, images INTEGER NOT NULL, "
    "fingerprint TEXT NOT NULL, PRIMARY KEY (key, images) )",
}
SCHEMAS = {  # by layout
    layout: (*_FIRST_SCHEMA, *(ADDED[each] for each in range(WITH_BITS, layout + 1)))
    for layout in range(1, LAYOUT + 1)
}


def per_image_rule(images: int, error: float | None) -> rules.Rule:
    """Return the rule for the bits of a measurement: one for each image, and the same error."""

    def holds(bits: bytes) -> bool:
        if error is None or len(bits) != -(-images // 8):
            return False
        wrong = images - int.from_bytes(bits).bit_count()
        return abs(100 * wrong - error * images) < 1e-6 * images

    words = f"a bit for each of {images:,} images, with an error of {error} %"
    return rules.Such(rules.blob(LONGEST_VALUE), holds, words)


def reader(path: Path) -> sqlite3.Connection:
    """Open a file to read it, even in a folder that cannot be written to."""
    # There SQLite can make no log beside it; as long as no rows wait in one, it never changes.
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
    opened.row_factory = sqlite3.Row
    try:
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            opened.execute(f"PRAGMA {setting}")
    except BaseException:
        opened.close()
        raise
    return opened


class Results(AbstractContextManager["Results"]):
    """A file of results.

    Args:
        path: The file; it is made if there is none.
        readonly: Whether to read only, which also works in a folder that cannot be written to.

    Raises:
        TtapcaError: The file is missing, damaged, something else, of a later layout, or in use.

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
            opened = reader if readonly else connection
            self._connection = opened(self.path)
        try:
            with self._errors_explained():
                self._open(readonly)
        except BaseException:
            self._connection.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; everything that was added is in it."""
        with self._errors_explained():
            self._connection.close()

    def rows(self) -> list[Row]:
        """Return all measurements, in the order in which they were made."""
        # Asked each time: a run may have brought the file to the present layout meanwhile.
        bits = self._pragma("user_version") >= WITH_BITS
        names = ", ".join((*KEY, *MEASURED, CORRECT if bits else f"NULL AS {CORRECT}"))
        joined = "LEFT JOIN per_image ON result = id" if bits else ""
        found = self._read(f"SELECT {names} FROM results {joined} ORDER BY id")  # noqa: S608
        return [self._row(stored) for stored in found]

    def observations(self) -> list[Observation]:
        """Return the observations of filters, in the order of the rows."""
        pictures: dict[tuple[int, str], list[bytes]] = {}
        for result, stage, png in self._read(
            "SELECT result, stage, png FROM pictures ORDER BY result, stage, number"
        ):
            self._check({"stage": stage, "png": png}, PICTURE)
            pictures.setdefault((result, stage), []).append(png)
        found = []
        for stored in self._read(
            "SELECT * FROM results JOIN observations ON result = id ORDER BY id"
        ):
            spectra = {name: self._parsed(name, stored[name]) for name in SPECTRA}
            self._check(spectra, OBSERVATION)
            facts = {name: tuple(numbers) for name, numbers in spectra.items()}
            facts |= {stage: tuple(pictures.get((stored["id"], stage), ())) for stage in STAGES}
            found.append(Observation(self._cell(stored), **facts))
        return found

    def statuses(self) -> dict[Cell, Status]:
        """Return how each measurement ended."""
        return {row.cell: row.outcome.status for row in self.rows()}

    def add(self, rows: Iterable[Row], observations: Iterable[Observation] = ()) -> None:
        """Write all rows in place of others of their cells, with observations; or nothing."""
        with self._errors_explained(), self._transaction():
            numbers = {row.cell: self._put(row) for row in rows}
            for observation in observations:
                self._put_observation(numbers[observation.cell], observation)

    def check_fingerprints(self, fingerprints: Iterable[Fingerprint]) -> None:
        """Write down fingerprints of new names, or none if a name stands for something else."""
        with self._errors_explained(), self._transaction():
            for one in fingerprints:
                place = (one.key, one.images)
                self._connection.execute(
                    "INSERT OR IGNORE INTO claims VALUES (?, ?, ?)", (*place, one.digest)
                )
                found = self._connection.execute(
                    "SELECT fingerprint FROM claims WHERE key = ? AND images = ?", place
                )
                if found.fetchone()[0] != one.digest:
                    raise OptionError(
                        f"In one file of results, a name stands for the same {one.kind}; "
                        f"{self.path} has measurements with others called `{one.name}`, or they "
                        "have changed since. Name another file with `--to FILE`, or rename them."
                    )

    def reserved(
        self, waiting: Callable[[str], None] | None = None
    ) -> AbstractContextManager[object]:
        """Be the only run that fills the file; `waiting` is told once who else does."""
        return queued(self.path.with_name(f"{self.path.name}-lock"), waiting)

    def _cell(self, stored: sqlite3.Row) -> Cell:
        values = {name: stored[name] for name in KEY}
        self._check(values, CELL)
        self._check({"options": self._parsed("options", values["options"])}, OPTIONS)
        return Cell(**values)

    def _row(self, stored: sqlite3.Row) -> Row:
        cell, bits = self._cell(stored), stored[CORRECT]
        values = {name: stored[name] for name in MEASURED}
        values |= {name: self._parsed(name, values[name]) for name in AS_JSON}
        self._check(values, OUTCOME)
        if bits is not None:
            rule = per_image_rule(cell.images, values["error"])
            self._check({CORRECT: bits}, {CORRECT: rule})
        values |= {name: tuple(values[name]) for name in SEQUENCES}
        return Row(cell, Outcome(**values, correct=bits or b""))

    def _parsed(self, name: str, text: object) -> Any:
        self._check({name: text}, {name: rules.Text(LONGEST_VALUE)})
        where = f"`{name}` in {self.path}"
        # A method that diverged has measured NaN, which is a finding.
        return parse_json(str(text), where, DataFormatError, largest=LONGEST_VALUE, finite=False)

    def _check(self, values: dict[str, Any], expected: dict[str, rules.Rule]) -> None:
        where = f"{self.path} is damaged or was changed"
        conform(values, rules.Record(expected), where, DataFormatError)

    def _put(self, row: Row) -> int:
        values = vars(row.cell) | vars(row.outcome)
        bits = values.pop(CORRECT)
        values |= {name: json.dumps(values[name]) for name in AS_JSON}
        marks = ", ".join(f":{name}" for name in values)
        kept = ", ".join(f"{name} = excluded.{name}" for name in MEASURED)
        found = self._connection.execute(
            f"INSERT INTO results ({', '.join(values)}) VALUES ({marks}) "  # noqa: S608
            f"ON CONFLICT ({', '.join(KEY)}) DO UPDATE SET {kept} RETURNING id",
            values,
        ).fetchall()  # all of them, else the statement is not over
        number: int = found[0][0]
        for table in ("per_image", "observations", "pictures"):
            self._connection.execute(f"DELETE FROM {table} WHERE result = ?", (number,))  # noqa: S608
        if bits:
            self._connection.execute("INSERT INTO per_image VALUES (?, ?)", (number, bits))
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
        application, version = (self._pragma(name) for name in ("application_id", "user_version"))
        found = self._read("SELECT type, name, sql FROM sqlite_master")
        if application != APPLICATION_ID and (found or application or readonly):
            raise DataFormatError(
                f"A file of results is one that `ttapca bench` wrote; {self.path} is another "
                "database. Name another file."
            )
        if version > LAYOUT:
            raise DataFormatError(
                f"{self.path} has layout {version}, and this ttapca knows layouts up to {LAYOUT}: "
                "a later version wrote it. Update ttapca."
            )
        if found:
            self._check_schema(version, found)
        if not readonly:
            self._pragma("journal_mode = WAL")
            self._pragma("synchronous = FULL")  # a finished measurement outlasts a power cut
            self._pragma("foreign_keys = ON")
        if not found:
            self._make()
        elif (state := self._pragma("quick_check")) != "ok":
            raise self._damaged(str(state))
        elif version < LAYOUT and not readonly:
            self._upgrade()

    def _check_schema(self, version: int, found: Iterable[sqlite3.Row]) -> None:
        """Refuse a schema that is not ours: a view or a trigger is a program."""
        if version not in SCHEMAS:
            raise self._damaged(f"it has layout {version}")
        for kind, name, sql in found:
            automatic = kind == "index" and sql is None  # SQLite makes these for unique columns
            if not automatic and " ".join(str(sql).split()) not in SCHEMAS[version]:
                raise DataFormatError(
                    f"A file of results has only the tables that ttapca made; {self.path} has the "
                    f"{shown(kind)} {shown(name)} as well, or in another form. Name another file."
                )

    def _make(self) -> None:
        with self._transaction():
            # Another process may have made it since we looked.
            if self._read("SELECT name FROM sqlite_master"):
                return
            for statement in SCHEMAS[LAYOUT]:
                self._connection.execute(statement)
            self._pragma(f"application_id = {APPLICATION_ID}")
            self._pragma(f"user_version = {LAYOUT}")

    def _upgrade(self) -> None:
        """Bring a file of an earlier layout to the present one; its rows stay as they are."""
        with self._transaction():  # another process may have done it meanwhile
            for version in range(self._pragma("user_version") + 1, LAYOUT + 1):
                self._connection.execute(ADDED[version])
                self._pragma(f"user_version = {version}")

    def _pragma(self, words: str) -> Any:
        with self._errors_explained():
            found = self._connection.execute(f"PRAGMA {words}").fetchone()
        return None if found is None else found[0]

    def _read(self, query: str) -> list[sqlite3.Row]:
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
            text = f"Cannot use the file of results {self.path}: {error}. Choose another place "
            text += "with `--to FILE`, or see who else uses it."
            if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
                text = f"Cannot write to {self.path}: {error}. All finished measurements are in "
                text += "the file; free some space and run the same command again."
            raise StorageError(text) from error

    def _damaged(self, finding: str) -> DataFormatError:
        return DataFormatError(
            f"{self.path} must be a whole file of results; it is damaged or something else: "
            f"{finding}. Move it away, or name another file."
        )
