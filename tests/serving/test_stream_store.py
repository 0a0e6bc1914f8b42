"""The file of streams, when it is from anybody: it is refused at once, or read row by row."""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path

import pytest

from ttapca.errors import SavedStreamError
from ttapca.serving import StreamStore, stream_store

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two streams, one of them shifted."""
    path = tmp_path / "s.sqlite"
    with StreamStore(path) as store:
        store.write({"a": b"first", "b": b"second"}, shifted=["b"])
    return path


def change(path: Path, *statements: str) -> None:
    """Write what another program might have written."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP TABLE streams", f"CREATE VIEW streams AS {ENDLESS} i AS name, i, i FROM n"],
        ["DROP TABLE shifted", f"CREATE VIEW shifted AS {ENDLESS} 'a' || i AS name FROM n"],
        [f"CREATE VIEW other AS {ENDLESS} i FROM n"],
        [f"CREATE TRIGGER t INSERT ON streams BEGIN {ENDLESS} max(i) FROM n; END"],
        ["CREATE TABLE other (x)"],
        ["CREATE INDEX other ON streams (saved)"],
        ["DROP TABLE shifted", "CREATE TABLE shifted (name)"],
        ["DROP TABLE shifted", "CREATE VIRTUAL TABLE shifted USING fts5(name)"],
        ["DROP TABLE shifted", "CREATE TABLE shifted (name AS (hex(zeroblob(1e9))), x)"],
        ["PRAGMA application_id = 7"],
    ],
)
def test_what_is_no_table_of_ours_is_refused_before_it_runs(
    path: Path, statements: list[str]
) -> None:
    change(path, *statements)
    before = path.read_bytes()
    with pytest.raises(SavedStreamError, match=r"is no file of streams.*another place"):
        StreamStore(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "name",
    ["x'6162'", "CAST(x'ff61' AS TEXT)", "'../etc'", "''", "'a' || char(0)", f"'{'x' * 101}'"],
)
def test_a_row_without_a_name_hides_no_others(path: Path, name: str) -> None:
    change(
        path,
        f"INSERT INTO streams VALUES ({name}, x'00', 0)",
        f"INSERT INTO shifted VALUES ({name})",
    )
    with StreamStore(path) as store:
        assert (store.names(), store.shifted()) == (["a", "b"], ["b"])
        assert store.read("a") == b"first"


@pytest.mark.parametrize("state", ["100000000000", "1e300", "'text'", "zeroblob(11)"])
def test_a_state_of_another_type_is_no_state(
    path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_store, "LARGEST_STATE", 10)
    change(path, f"UPDATE streams SET state = {state} WHERE name = 'a'")
    with StreamStore(path) as store:
        with pytest.raises(SavedStreamError, match="A state is a blob of at most 10 bytes; found"):
            store.read("a")
        assert store.read("b") == b"second"
        store.write({"a": b"new"})
        assert store.read("a") == b"new"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
def test_pipes_are_not_waited_for(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "s.sqlite"
    os.mkfifo(path.with_name(path.name + suffix))
    with pytest.raises(SavedStreamError, match="must be a plain file; it is a folder, a pipe"):
        StreamStore(path)
    with pytest.raises(SavedStreamError, match="/dev/null must be a plain file"):
        StreamStore("/dev/null")
