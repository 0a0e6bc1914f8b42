"""The file of results: its tables, the rules for their values, and how it is opened.

Its `application_id` tells it from other databases, its `user_version` is the layout. Tables of the
first layout never change; later ones added `per_image`, `labels` (not written any more), `claims`.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import get_args

from ttapca import _checks as rules
from ttapca.benchmark.rows import SETTINGS, Cell, Outcome, Status
from ttapca.errors import StorageError

APPLICATION_ID = 0x74746170  # "ttap"
LAYOUT = 4
WITH_BITS, WITH_LABELS, WITH_FINGERPRINTS = 2, 3, 4  # the first layouts that have them
LONGEST_VALUE = 100_000_000  # bytes of a text or a picture
BUSY_SECONDS = 30  # a reader may hold the file for a moment

# By the type of a field: its column, and the rule for its values. Names of methods, corruptions and
# data may be of another version.
_NUMBERS = rules.ListOf(rules.Measured(), 0, 10_000_000)
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
PICTURE: dict[str, rules.Rule] = {"stage": rules.OneOf(STAGES), "png": rules.Blob(10_000_000)}
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
    return rules.Such(rules.Blob(LONGEST_VALUE), holds, words)


def reader(path: Path) -> sqlite3.Connection:
    """Open a file to read it, even in a folder that cannot be written to.

    There SQLite can make no log beside it; as long as no rows wait in one, it never changes.
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
    opened.row_factory = sqlite3.Row
    try:
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            opened.execute(f"PRAGMA {setting}")
    except BaseException:
        opened.close()
        raise
    return opened
