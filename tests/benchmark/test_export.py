from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmark.synthetic_rows import cell, everything, failed, paper_grid, row, write_everything
from ttapca.benchmark.difference_tables import paper_tables
from ttapca.benchmark.exports import export, latex, markdown
from ttapca.benchmark.tables import ResultTable, Value, error_tables
from ttapca.cli import app as command_line
from ttapca.cli.console import rich_table
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
    with pytest.raises(OptionError, match=r"found 'latx'\. Did you mean `latex`"):
        export([], "latx")


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
    assert "1,000 images per corruption" in exported
    assert "| tent, paper | 20.42 (printed 19.96) |" in exported


def test_the_tables_end_with_what_failed_and_why() -> None:
    exported = export(
        [*paper_grid(), failed(cell("bn", seed=1), "AttachError: no layer")], "markdown"
    )
    last = exported.split("### ")[-1]
    assert last.startswith("What failed\n")
    assert last.endswith("| bn | episodic | Fog | 5 | 1 | AttachError: no layer |\n")
    assert "What failed" not in export(paper_grid(), "markdown")


def test_latex_has_every_number_in_whole_lines_and_escapes_its_own_marks() -> None:
    text = latex(ResultTable(SPECIAL, ("m",), ((Value(SPECIAL),), (Value("1 ±2"),))))
    escaped = r"a\_b \& 50 \% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \$y"
    assert escaped in text
    assert r"1 $\pm$2 \\" in text
    rows = everything()
    text = export(rows, "latex")
    found = []
    pattern = r"\\begin\{tabular\}\{([lr]+)\}\n\\toprule\n(.*?)\\bottomrule"
    *tabulars, failures = re.findall(pattern, text, flags=re.S)
    assert failures[1].count(r"no BatchNorm <layer> \& co") == 2
    for layout, body in (*tabulars, failures):
        lines = [line for line in body.splitlines() if line != r"\midrule"]
        assert all(line.endswith(r" \\") for line in lines)
        entries = [line.removesuffix(r" \\").split(" & ") for line in lines]
        assert {len(line) for line in entries} == {len(layout)}
        found += [each for line in entries[1:] for each in line[1:] if body != failures[1]]
    plain = [re.sub(r"\\textbf\{(.*)\}", r"\1", each) for each in found]
    plain = [each.replace("$\\pm$", "±").replace("$-$", "−") for each in plain]  # noqa: RUF001
    shown = [*error_tables(rows), *paper_tables(rows)]
    values = [value for table in shown for line in table.rows for value in line]
    numbers = [value.text for value in values if value.kind == "number"]
    assert [each for each in plain if each not in ("failed", "--")] == numbers
    assert text.count(r"\begin{table*}") == len(shown) + 1  # what failed


def test_a_table_for_a_terminal() -> None:
    (table,) = error_tables(paper_grid())
    shown = rich_table(table)
    assert shown.row_count == len(table.rows)
    assert [str(column.header) for column in shown.columns] == list(table.columns)
    assert [column.justify for column in shown.columns][:2] == ["left", "right"]
    assert str(next(iter(shown.columns[1].cells))) == table.rows[0][1].text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_everything(path / "results.sqlite")
    (path / "text.sqlite").write_text("not a database, but long enough to be looked at" * 30)
    return path


def test_the_command(folder: Path) -> None:
    words = ["export", str(folder / "results.sqlite"), "--format"]
    printed = CliRunner().invoke(command_line.app, [*words, "csv"])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == export(everything(), "csv")
    target = folder / "tables.md"
    assert command_line.run([*words, "markdown", "--to", str(target)]) == 0
    assert target.read_text() == export(everything(), "markdown")


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.csv", "csv"), ("a.JSON", "json"), ("a.tex", "latex"), ("a.md", "markdown")],
)
def test_the_name_of_a_file_says_its_format(name: str, form: str, folder: Path) -> None:
    words = ["export", str(folder / "results.sqlite"), "--to", str(folder / name)]
    assert command_line.run(words) == 0
    assert (folder / name).read_text() == export(everything(), form)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("export {here}/none.sqlite", 2, "no file of results"),
        ("report {here}/none.sqlite", 2, "no file of results"),
        ("report {here}/text.sqlite", 1, "must be a whole file of results"),
        ("export {here}/results.sqlite --format xml", 2, "found 'xml'"),
        ("report {here}/results.sqlite --to {here}/text.sqlite/r", 2, "no {here}/text"),
        ("report {here}/results.sqlite --to {here}/new/r", 2, "there is no {here}/new"),
        ("export {here}/results.sqlite --to {here}/new/x", 2, "there is no {here}/new"),
        ("figure {here}/results.sqlite rank --to {here}/new/x", 2, "no {here}/new"),
        ("export {here}/results.sqlite --to {here}", 2, "{here} is a folder"),
    ],
)
def test_bad_calls(
    words: str, code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run(words.format(here=folder).split()) == code
    assert message.format(here=folder) in capsys.readouterr().err
    assert not (folder / "new").exists()
