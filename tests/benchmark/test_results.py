"""The file of results: what goes in comes out, and nothing else is taken for it."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ttapca.benchmark import Cell, Observation, Outcome, Results, Row
from ttapca.benchmark.results import LAYOUT
from ttapca.benchmark.rows import SETTINGS
from ttapca.errors import DataFormatError, DataNotFoundError, StorageError

CELL = Cell(
    "net", "0123456789abcdef", "digits", "generated, seed 0", "fog", 5, "online", "tent",
    '{"gain": "relu"}', "conv1", 40, 200, 1, 1e-3, 596, 0,
)  # fmt: skip
DONE = Outcome(
    "done", "", 12.5, 3.25, 0.1 + 0.2, (1 / 3, 2 / 3), (0.1, 0.7), 5, 1, 40, 0.5, 300.0,
    {"torch": "2"}, {"cpu": "fast"}, "2026-11-16T00:00:00+00:00", "ttapca bench 'a b'",
)  # fmt: skip
FAILED = replace(
    DONE, status="failed", reason="it broke", error=None, calibration_error=None, entropy=None,
    error_stream=(), entropy_stream=(),
)  # fmt: skip
# Two wrong of sixteen, and of thirteen: 12.5 % and 15.4 %; the last bits of a byte are padding.
SIXTEEN = Row(replace(CELL, images=16), replace(DONE, correct=b"\xff\xfc"))
THIRTEEN = Row(replace(CELL, images=13), replace(DONE, error=200 / 13, correct=b"\xff\x38"))
SEEN = Observation(CELL, (3.0, 1 / 3), (2.0, 1.0), (1.0, 0.5), (b"\x89PNG a", b"b"), (b"c",))
ROWS = [Row(replace(CELL, seed=seed), DONE) for seed in range(400)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def test_what_goes_in_comes_out(path: Path) -> None:
    other = replace(CELL, corruption="snow", setting="mixed")
    with Results(path) as results:
        results.add([Row(CELL, DONE), Row(other, FAILED)], [SEEN])
    with Results(path, readonly=True) as results:
        assert results.rows() == [Row(CELL, DONE), Row(other, FAILED)]
        assert results.observations() == [SEEN]
        assert results.statuses() == {CELL: "done", other: "failed"}


def test_the_bits_of_images_come_out_and_go_with_their_row(path: Path) -> None:
    with Results(path) as results:
        results.add([SIXTEEN, Row(CELL, DONE), THIRTEEN])
        assert results.rows() == [SIXTEEN, Row(CELL, DONE), THIRTEEN]
        again = Row(SIXTEEN.cell, FAILED)
        results.add([again])
        assert results.rows() == [again, Row(CELL, DONE), THIRTEEN]
    with closing(sqlite3.connect(path)) as connection:
        stored = connection.execute("SELECT correct FROM per_image").fetchall()
    assert stored == [(THIRTEEN.outcome.correct,)]


def test_a_file_of_the_first_layout_is_read_as_it_is_and_written_in_the_present_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "results_0_1.sqlite", path)
    content = path.read_bytes()

    pragma = Results._pragma

    def stopped(self: Results, words: str) -> object:
        if words.startswith("user_version ="):
            raise RuntimeError("after the new table was made")
        return pragma(self, words)

    def layout() -> int:
        with closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

    with Results(path, readonly=True) as reader:
        before, observations = reader.rows(), reader.observations()
        assert {row.outcome.correct for row in before} == {b""}
        assert (layout(), path.read_bytes()) == (1, content)
        with monkeypatch.context() as patch:
            patch.setattr(Results, "_pragma", stopped)
            with pytest.raises(RuntimeError, match="after the new table"):
                Results(path)
        assert layout() == 1
        with Results(path) as writer:
            assert (writer.rows(), writer.observations()) == (before, observations)
            writer.add([SIXTEEN])
            assert reader.rows() == [*before, SIXTEEN]  # a reader from before sees it too
    assert layout() == LAYOUT == 4
    with Results(path) as results:
        assert results.rows() == [*before, SIXTEEN]


def test_a_method_that_diverged_has_measured_nan(path: Path) -> None:
    diverged = replace(DONE, entropy_stream=(0.5, float("nan")))
    with Results(path) as results:
        results.add([Row(CELL, diverged)])
        (row,) = results.rows()
    assert row.outcome.entropy_stream == pytest.approx((0.5, float("nan")), nan_ok=True)


def test_every_part_of_the_key_counts(path: Path) -> None:
    others = {"setting": SETTINGS[0], "severity": 4, "options": "{}"}
    cells = [CELL]
    for name, value in vars(CELL).items():
        other = others.get(name) or value * 2 + type(value)(1)
        cells.append(replace(CELL, **{name: other}))
    with Results(path) as results:
        results.add(Row(cell, DONE) for cell in cells)
        assert [row.cell for row in results.rows()] == cells


def test_a_cell_that_is_there_is_replaced_in_its_place(path: Path) -> None:
    with Results(path) as results:
        results.add([Row(CELL, FAILED), *ROWS[1:3]], [SEEN])
        results.add([Row(CELL, DONE)])
        assert results.rows() == ROWS[:3]
        assert results.observations() == []


def test_a_full_disk_loses_no_finished_row(path: Path) -> None:
    with Results(path) as results:
        results.add(ROWS[:1])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # No file of this process may grow beyond this: writing fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(StorageError, match=r"Cannot write to .*All finished meas"):
                results.add(ROWS[1:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert results.rows() == ROWS[:1]
        results.add(ROWS[1:])
    with Results(path) as results:
        assert results.rows() == ROWS


def test_a_file_that_was_closed_has_one_kind_of_error(path: Path) -> None:
    results = Results(path)
    results.close()
    for read in (results.rows, results.observations):
        with pytest.raises(StorageError, match="Cannot use the file of results"):
            read()


def test_files_that_are_not_there(path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"no file of results at .*`ttapca bench`"):
        Results(path, readonly=True)
    assert not path.exists()
    with pytest.raises(StorageError, match="unable to open database file"):
        Results(path.parent / "nowhere" / "results.sqlite")
    path.touch()  # an empty file becomes one
    with pytest.raises(DataFormatError, match="is another database"):
        Results(path, readonly=True)
    with Results(path) as results:
        assert results.rows() == []


def changed_by(path: Path, script: str) -> None:
    with Results(path) as results:
        results.add([Row(CELL, DONE), SIXTEEN], [SEEN])
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")


def spoilt(path: Path, start: float, end: float, by: bytes) -> None:
    with Results(path) as results:
        results.add(ROWS[:200])
    content = path.read_bytes()
    size = len(content)
    path.write_bytes(content[: int(start * size)] + by + content[int(end * size) :])


# SQLite quotes this schema in its message, which Python then cannot read.
NO_TEXT = (
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET name = CAST(x'61ff62' AS TEXT), "
    "sql = CAST(x'435245415445ff' AS TEXT) WHERE name = 'pictures'"
)
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, r"is another database\. Name another"),
        (lambda path: spoilt(path, 0.6, 1, b""), "must be a whole file of results"),
        (lambda path: spoilt(path, 0.1, 0.2, bytes(12288)), "must be a whole file of results"),
        (lambda path: path.write_text("a,b\n" * 100), "something else: file is not a database"),
        ("PRAGMA user_version = 7", r"has layout 7.*Update ttapca"),
        ("PRAGMA user_version = -3", r"must be .*layout -3"),
        ("PRAGMA user_version = 1", "has the 'table' 'per_image' as well"),
        (NO_TEXT, "must be a whole file of results"),
        (f"CREATE VIEW v AS {ENDLESS}", "has the 'view' 'v' as well"),
        (f"DROP TABLE pictures; CREATE VIEW pictures AS {ENDLESS}", "the 'view' 'pictures' as"),
        (TRIGGER, "has the 'trigger' 't' as well"),
        ("CREATE TABLE more (a)", "has the 'table' 'more' as well"),
        ("CREATE INDEX i ON results (abs(seed))", "has the 'index' 'i' as well"),
        ("ALTER TABLE results ADD COLUMN more TEXT DEFAULT 'x'", "has the 'table' 'results' as"),
    ],
)
def test_what_is_no_file_of_results_is_refused_and_left_alone(
    path: Path, make: str | Callable[[Path], object], message: str
) -> None:
    if isinstance(make, str):
        changed_by(path, make)
    else:
        make(path)
    before = path.read_bytes()
    for readonly in (True, False):
        with pytest.raises(DataFormatError, match=rf"results\.sqlite.*{message}"):
            Results(path, readonly=readonly)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("error_stream = '[1'", "`error_stream` in .* is not JSON"),
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
        ("pictures SET png = 'text'", "`png` must be at most"),
        ("per_image SET correct = 'text'", "`correct` must be at most .* bytes; found 'text'"),
        ("per_image SET correct = x'ff'", "`correct` must be a bit for each of 16 images"),
        ("per_image SET correct = x'ffff'", r"16 images, with an error of 12\.5 %; found b'"),
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
    (holder,) = told
    assert holder.startswith("process ")
    assert "UTC" in holder


def test_a_reader_sees_what_is_finished_and_leaves_no_trace(path: Path) -> None:
    with Results(path) as writer, writer.reserved(), Results(path, readonly=True) as reader:
        writer.add(ROWS[:1])
        assert reader.rows() == ROWS[:1]
        writer.add(ROWS[1:2])
        assert reader.rows() == ROWS[:2]
    files, before = set(path.parent.iterdir()), path.read_bytes()
    with Results(path, readonly=True) as results:
        assert results.rows() == ROWS[:2]
        with pytest.raises(StorageError, match="attempt to write a readonly database"):
            results.add(ROWS[:3])
    assert (set(path.parent.iterdir()), path.read_bytes()) == (files, before)


@contextmanager
def nothing_can_be_written(folder: Path) -> Iterator[None]:
    """Take the right to write to a folder away from this process, also when it is root's."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:  # whom no mode stops
        os.seteuid(65534)
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
    with Results(path) as writer:
        writer.add(ROWS[:2])
        with nothing_can_be_written(open_folder), Results(path, readonly=True) as results:
            assert results.rows() == ROWS[:2]  # while a run goes on
    with nothing_can_be_written(open_folder):
        with pytest.raises(PermissionError, match="denied"):
            (open_folder / "new").touch()
        with Results(path, readonly=True) as results:
            assert results.rows() == ROWS[:2]
    assert list(open_folder.iterdir()) == [path]


def test_a_run_that_was_killed_is_not_read_in_part(open_folder: Path, path: Path) -> None:
    copy = open_folder / "results.sqlite"
    with Results(path) as results:
        results.add(ROWS[:2])
        for end in ("", "-wal"):  # as a kill leaves them
            shutil.copy(f"{path}{end}", f"{copy}{end}")
    with (
        nothing_can_be_written(open_folder),
        pytest.raises(StorageError, match=r"last rows in results\.sqlite-wal.*copy both files"),
    ):
        Results(copy, readonly=True)
    with Results(copy, readonly=True) as results:
        assert results.rows() == ROWS[:2]
