from __future__ import annotations

import csv
import io
import json
import math

import pytest

from benchmark.synthetic_rows import cell, everything, failed, paper_grid, row
from ttapca.benchmark.tables import ResultTable, Value, export, markdown
from ttapca.errors import OptionError

SPECIAL = "a_b & 50 % #1 {x} ~^\\ $y | *z* <b>"


def test_json_keeps_every_field_of_every_row() -> None:
    rows = [*everything(), row(cell(), entropy_stream=(1.0, math.nan, math.inf), correct=b"\x0f")]
    records = json.loads(export(rows, "json"))
    assert records[-1]["entropy_stream"] == [1.0, None, None]  # JSON has no word for these
    assert records[-1]["correct"] == "0f"  # which images were right, in hexadecimal digits
    for record, each in zip(records[:-1], rows[:-1], strict=True):
        expected = vars(each.cell) | vars(each.outcome) | {"correct": ""}
        assert record == json.loads(json.dumps(expected))
        assert list(record) == list(expected)
    with pytest.raises(OptionError, match=r"found 'jsn'\. Did you mean `json`"):
        export([], "jsn")


def test_a_record_is_json_also_where_a_method_diverged() -> None:
    streams = {"entropy_stream": (1.0, math.nan), "error_stream": (math.inf, 2.0)}
    record = row(cell("tent"), **streams).record()
    again = json.loads(json.dumps(record, allow_nan=False))
    assert (again["entropy_stream"], again["error_stream"]) == ([1.0, None], [None, 2.0])
    assert again["machine"] == record["machine"]


def test_csv_reads_back() -> None:
    rows = [row(cell("bn", model='odd, "name"\n')), *paper_grid()]
    records = list(csv.DictReader(io.StringIO(export(rows, "csv"))))
    assert [record["method"] for record in records] == [each.cell.method for each in rows]
    assert [float(record["error"]) for record in records] == [each.outcome.error for each in rows]
    assert records[0]["model"] == 'odd, "name"\n'
    assert json.loads(records[0]["machine"])["cores"] == "2"
    assert "correct" not in records[0]  # thousands of digits would make a cell unreadable


def test_markdown_has_as_many_entries_in_every_line() -> None:
    values = (Value(SPECIAL), Value("1", 1.0, "number", best=True))
    text = markdown(ResultTable(SPECIAL, ("method", "x|y"), (values,)))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}
    assert lines[-1].endswith("| **1** |")
    assert "<b>" not in text.replace("\\<b\\>", "")
    exported = export(paper_grid(), "markdown")  # with notes, and the comparison
    assert exported.count("### ") == 2
    assert "1,000 samples per corruption" in exported
    assert "| tent, paper | 20.42 (printed 19.96) |" in exported


def test_the_tables_end_with_what_failed_and_why() -> None:
    exported = export(
        [*paper_grid(), failed(cell("bn", seed=1), "AttachError: no layer")], "markdown"
    )
    last = exported.split("### ")[-1]
    assert last.startswith("What failed\n")
    assert last.endswith("| bn | episodic | Fog | 5 | 1 | AttachError: no layer |\n")
    assert "What failed" not in export(paper_grid(), "markdown")
