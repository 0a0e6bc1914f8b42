"""The file of results: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ttapca.benchmark import Cell, Observation, Outcome, Results, Row
from ttapca.benchmark.cells import SETTINGS
from ttapca.errors import DataFormatError, DataNotFoundError, StorageError

CELL = Cell(
    "net", "0123456789abcdef", "digits", "generated, seed 0", "fog", 5, "online", "tent",
    '{"gain": "relu"}', "conv1", 40, 200, 1, 1e-3, 596, 0,
)  # fmt: skip
DONE = Outcome(
    "done", "", 12.5, 3.25, 0.1 + 0.2, (1 / 3, 2 / 3), (0.1, 0.7), 5, 1, 40, 0.5, 300.0,
    {"torch": "2"}, {"cpu": "fast"}, "2026-11-16T00:00:00+00:00", "ttapca bench 'a b'",
)  # fmt: skip
FAILED = dataclasses.replace(
    DONE, status="failed", reason="it broke", error=None, calibration_error=None, entropy=None,
    error_stream=(), entropy_stream=(),
)  # fmt: skip
SEEN = Observation(CELL, (3.0, 1 / 3), (2.0, 1.0), (1.0, 0.5), (b"\x89PNG a", b"b"), (b"c",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def numbered(count: int) -> list[Row]:
    return [Row(dataclasses.replace(CELL, seed=seed), DONE) for seed in range(count)]


def test_what_goes_in_comes_out(path: Path) -> None:
    other = dataclasses.replace(CELL, corruption="snow", setting="mixed")
    with Results(path) as results:
        results.add([Row(CELL, DONE), Row(other, FAILED)], [SEEN])
    with Results(path, create=False) as results:
        assert results.rows() == [Row(CELL, DONE), Row(other, FAILED)]
        assert results.observations() == [SEEN]
        assert results.statuses() == {CELL: "done", other: "failed"}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Cell)])
def test_every_part_of_the_key_counts(path: Path, name: str) -> None:
    value = getattr(CELL, name)
    others = {"setting": SETTINGS[0], "severity": 4, "options": "{}"}
    other = others.get(name) or value * 2 + type(value)(1)
    with Results(path) as results:
        results.add([Row(CELL, DONE)])
        results.add([Row(dataclasses.replace(CELL, **{name: other}), DONE)])
        assert len(results.rows()) == 2


def test_a_cell_that_is_there_is_replaced_in_its_place(path: Path) -> None:
    rows = numbered(3)
    with Results(path) as results:
        results.add([Row(CELL, FAILED), *rows[1:]], [SEEN])
        results.add([Row(CELL, DONE)])
        assert results.rows() == [Row(CELL, DONE), *rows[1:]]
        assert results.observations() == []


def test_a_unit_is_wholly_there_or_not_at_all(path: Path) -> None:
    good, bad = numbered(2)
    broken = dataclasses.replace(bad, outcome=dataclasses.replace(DONE, reason=None))
    with Results(path) as results:
        with pytest.raises(StorageError, match=r"NOT NULL constraint failed: results\.reason"):
            results.add([good, broken])
        assert results.rows() == []
        results.add([good])
        assert results.rows() == [good]


@pytest.mark.parametrize("how", [{"create": False}, {"readonly": True}])
def test_a_missing_file(path: Path, how: dict[str, bool]) -> None:
    with pytest.raises(DataNotFoundError, match=r"no file of results at .*`ttapca bench` writes"):
        Results(path, **how)
    assert not path.exists()


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()


def cut_short(path: Path) -> None:
    with Results(path) as results:
        results.add(numbered(200))
    content = path.read_bytes()
    path.write_bytes(content[: int(0.6 * len(content))])


def overwritten(path: Path) -> None:
    with Results(path) as results:
        results.add(numbered(200))
    content = bytearray(path.read_bytes())
    content[8192:20480] = bytes(12288)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, r"is another database\. Name another"),
        (cut_short, "must be a whole file of results"),
        (overwritten, "must be a whole file of results"),
        (lambda path: path.write_text("a,b\n" * 100), "something else: file is not a database"),
        (lambda path: changed_by(path, "PRAGMA user_version = 7"), r"has layout 7.*Update ttapca"),
        (lambda path: changed_by(path, "PRAGMA user_version = -3"), r"must be .*layout -3"),
    ],
)
def test_what_is_no_file_of_results_is_refused_and_left_alone(
    path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(path)
    before = path.read_bytes()
    for how in ({"create": True}, {"create": False}, {"readonly": True}):
        with pytest.raises(DataFormatError, match=rf"results\.sqlite.*{message}"):
            Results(path, **how)
    assert path.read_bytes() == before


def changed_by(path: Path, script: str) -> None:
    with Results(path) as results:
        results.add([Row(CELL, DONE)], [SEEN])
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"


@pytest.mark.parametrize(
    ("script", "thing"),
    [
        (f"CREATE VIEW v AS {ENDLESS}", "'view' 'v'"),
        (f"DROP TABLE pictures; CREATE VIEW pictures AS {ENDLESS}", "'view' 'pictures'"),
        (
            "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END",
            "'trigger' 't'",
        ),
        ("CREATE TABLE more (a)", "'table' 'more'"),
        ("CREATE INDEX i ON results (abs(seed))", "'index' 'i'"),
        ("ALTER TABLE results ADD COLUMN more TEXT DEFAULT 'x'", "'table' 'results'"),
    ],
)
def test_a_file_that_brings_its_own_schema(path: Path, script: str, thing: str) -> None:
    changed_by(path, script)
    for readonly in (True, False):
        with pytest.raises(DataFormatError, match=rf"results.sqlite has the {thing} as well"):
            Results(path, readonly=readonly)


def test_a_schema_that_is_no_text(path: Path) -> None:
    """SQLite quotes the schema in its message, which Python then cannot read."""
    changed_by(
        path,
        "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = CAST(x'61ff62' AS TEXT), "
        "sql = CAST(x'435245415445ff' AS TEXT) WHERE name = 'pictures'",
    )
    for readonly in (True, False):
        with pytest.raises(DataFormatError, match=r"results\.sqlite must be a whole file"):
            Results(path, readonly=readonly)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("error_stream = '[1'", "`error_stream` in .* is not JSON"),
        ("error_stream = '3'", "`error_stream` must be a list"),
        ("error_stream = '[\"a\"]'", r"`error_stream\[0\]` must be a number"),
        ("error_stream = x'ff'", "`error_stream` must be text"),
        ("versions = '[]'", "`versions` must be an object"),
        ("versions = '{\"a\": 1}'", "`versions.a` must be text"),
        ("options = '[]'", "`options` must be an object"),
        ("options = 'x'", "`options` in .* is not JSON"),
        ("setting = 'never'", "`setting` must be one of"),
        ("status = 'lost'", "`status` must be one of done, failed"),
        ("severity = 'x'", "`severity` must be a whole number"),
        ("lr = 9e999", "`lr` must be a finite number"),
        ("model = x'00'", "`model` must be text"),
        ("error = 'x'", "`error` must be a finite number"),
        ("seconds = -1", "`seconds` must be a finite number from 0"),
        ("command = CAST(x'ff80' AS TEXT)", "Could not decode to UTF-8"),
        ("observations SET gains = '{}'", "`gains` must be a list"),
        ("observations SET test_spectrum = 7", "`test_spectrum` must be a list"),
        ("pictures SET png = 'text'", "`png` must be at most"),
        ("pictures SET stage = 'later' WHERE number = 1", "`stage` must be one of before, after"),
    ],
)
def test_a_row_that_makes_no_sense(path: Path, change: str, message: str) -> None:
    changed_by(path, f"UPDATE {change if ' SET ' in change else f'results SET {change}'}")
    errors = (DataFormatError, StorageError)
    refused = pytest.raises(errors, match=f"(?s)(?=.*results.sqlite).*{message}")
    with Results(path, readonly=True) as results, refused:
        results.rows()
        results.observations()


def test_a_method_that_diverged_has_measured_nan(path: Path) -> None:
    diverged = dataclasses.replace(DONE, entropy_stream=(0.5, float("nan")))
    with Results(path) as results:
        results.add([Row(CELL, diverged)])
        (row,) = results.rows()
    assert row.outcome.entropy_stream[0] == 0.5
    assert row.outcome.entropy_stream[1] != row.outcome.entropy_stream[1]


def test_an_empty_file_becomes_one(path: Path) -> None:
    path.touch()
    with pytest.raises(DataFormatError, match="is another database"):
        Results(path, create=False)
    with Results(path) as results:
        assert results.rows() == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="unable to open database file"):
        Results(tmp_path / "nowhere" / "results.sqlite")


def test_a_full_disk_loses_no_finished_row(path: Path) -> None:
    rows = numbered(400)
    with Results(path) as results:
        results.add(rows[:1])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # No file of this process may grow beyond this: writing fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(StorageError, match=r"Cannot write to .*All finished meas"):
                results.add(rows[1:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert results.rows() == rows[:1]
        results.add(rows[1:])
    with Results(path) as results:
        assert results.rows() == rows


def test_who_comes_second_waits_and_is_told_for_whom(path: Path) -> None:
    told: list[str] = []
    events: list[str] = []
    asked = threading.Event()

    def waits(holder: str) -> None:
        told.append(holder)
        asked.set()

    def second() -> None:
        with Results(path) as results, results.reserved(waits):
            events.append("second")

    with Results(path) as results, results.reserved():
        thread = threading.Thread(target=second)
        thread.start()
        assert asked.wait(60)
        events.append("first")
    thread.join(60)
    assert events == ["first", "second"]
    assert len(told) == 1
    assert told[0].startswith("process ")
    assert "UTC" in told[0]


def test_a_reader_sees_what_is_finished_while_a_run_writes(path: Path) -> None:
    with Results(path) as writer, writer.reserved(), Results(path, create=False) as reader:
        writer.add(numbered(2)[:1])
        assert len(reader.rows()) == 1
        writer.add(numbered(2)[1:])
        assert len(reader.rows()) == 2


NOBODY = 65534


@contextmanager
def nothing_can_be_written(folder: Path) -> Iterator[None]:
    """Take the right to write to a folder away from this process, also when it is root's."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:  # whom no mode stops
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, as pytest's cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_file_is_read_where_nothing_can_be_written(open_folder: Path) -> None:
    path = open_folder / "results #1?.sqlite"  # a name that an address must escape
    with Results(path) as results:
        results.add(numbered(2))
    with nothing_can_be_written(open_folder):
        with pytest.raises(PermissionError, match="denied"):
            (open_folder / "new").touch()
        with Results(path, readonly=True) as results:
            assert results.rows() == numbered(2)
    assert list(open_folder.iterdir()) == [path]


def test_a_reader_leaves_no_trace(path: Path) -> None:
    with Results(path) as results:
        results.add(numbered(2))
    before = path.read_bytes()
    with Results(path, readonly=True) as results:
        assert results.rows() == numbered(2)
        with pytest.raises(StorageError, match="attempt to write a readonly database"):
            results.add(numbered(3))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_run_that_was_killed_is_not_read_in_part(open_folder: Path, path: Path) -> None:
    copy = open_folder / "results.sqlite"
    with Results(path) as results:
        results.add(numbered(2))
        for end in ("", "-wal"):  # as a kill leaves them
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    with (
        nothing_can_be_written(open_folder),
        pytest.raises(StorageError, match=r"last rows in results\.sqlite-wal.*copy both files"),
    ):
        Results(copy, readonly=True)
    with Results(copy, readonly=True) as results:
        assert results.rows() == numbered(2)


def test_a_run_that_goes_on_is_read_where_nothing_can_be_written(open_folder: Path) -> None:
    path = open_folder / "results.sqlite"
    with Results(path) as writer:
        writer.add(numbered(2))
        with nothing_can_be_written(open_folder), Results(path, readonly=True) as reader:
            assert reader.rows() == numbered(2)
