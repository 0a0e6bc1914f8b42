from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmark.synthetic_rows import cell, everything, paper_grid, row, write_everything
from ttapca.benchmark.table_formats import export, latex, markdown
from ttapca.benchmark.tables import ResultTable, Value, all_tables, error_tables
from ttapca.cli import app as command_line
from ttapca.cli.terminal_tables import rich_table
from ttapca.errors import OptionError

SPECIAL = "a_b & 50 % #1 {x} ~^\\ $y | *z* <b>"


def test_json_keeps_every_field_of_every_row() -> None:
    rows = [*everything(), row(cell(), entropy_stream=(1.0, math.nan, math.inf))]
    records = json.loads(export(rows, "json"))
    assert records[-1]["entropy_stream"] == [1.0, None, None]  # JSON has no word for these
    for record, each in zip(records[:-1], rows[:-1], strict=True):
        assert list(record) == [*vars(each.cell), *vars(each.outcome)]
        assert record["corruption"] == each.cell.corruption
        assert record["error"] == each.outcome.error
        assert record["entropy_stream"] == list(each.outcome.entropy_stream)
        assert record["versions"] == each.outcome.versions


def test_csv_reads_back() -> None:
    rows = [row(cell("bn", model='odd, "name"\n')), *paper_grid()]
    records = list(csv.DictReader(io.StringIO(export(rows, "csv"))))
    assert [record["method"] for record in records] == [each.cell.method for each in rows]
    assert [float(record["error"]) for record in records] == [each.outcome.error for each in rows]
    assert records[0]["model"] == 'odd, "name"\n'
    assert json.loads(records[0]["machine"])["cores"] == "2"


def test_markdown_has_as_many_entries_in_every_line() -> None:
    values = (Value(SPECIAL), Value("1", 1.0, "number", best=True))
    text = markdown(ResultTable(SPECIAL, ("method", "x|y"), (values,)))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}
    assert lines[-1].endswith("| **1** |")
    assert "<b>" not in text.replace("\\<b\\>", "")
    tables = export(paper_grid(), "markdown")  # with their notes, and the comparison
    assert tables.count("### ") == 2
    assert "1,000 images per corruption" in tables
    assert "| tent, paper | 20.42 (printed 19.96) |" in tables


def test_latex_escapes_what_latex_would_read() -> None:
    text = latex(ResultTable(SPECIAL, ("m",), ((Value(SPECIAL),), (Value("1 ±2"),))))
    assert (
        r"a\_b \& 50 \% \#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \$y" in text
    )
    assert r"1 $\pm$2 \\" in text


def test_latex_has_every_number_and_whole_lines() -> None:
    text = export(everything(), "latex")
    tables = all_tables(everything())
    shown = [value for table in tables for line in table.rows for value in line]
    bodies = re.findall(
        r"\\begin\{tabular\}\{([lr]+)\}\n\\toprule\n(.*?)\\bottomrule", text, flags=re.S
    )
    assert len(bodies) == text.count(r"\begin{table*}") == len(tables)
    found = []
    for layout, body in bodies:
        lines = [line for line in body.splitlines() if line != r"\midrule"]
        assert all(line.endswith(r" \\") for line in lines)
        entries = [line.removesuffix(r" \\").split(" & ") for line in lines]
        assert {len(line) for line in entries} == {len(layout)}
        found += [
            re.sub(r"\\textbf\{(.*)\}", r"\1", each) for line in entries[1:] for each in line[1:]
        ]
    written = [each.replace("$\\pm$", "±").replace("$-$", "−") for each in found]  # noqa: RUF001
    numbers = [value.text for value in shown if value.kind == "number"]
    assert [each for each in written if each not in ("failed", "--")] == numbers


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(OptionError, match=r"found 'latx'\. Did you mean `latex`"):
        export([], "latx")


def test_a_table_for_a_terminal() -> None:
    (table,) = error_tables(paper_grid())
    shown = rich_table(table)
    assert shown.row_count == len(table.rows)
    assert [str(column.header) for column in shown.columns] == list(table.columns)
    assert [column.justify for column in shown.columns][:2] == ["left", "right"]
    assert str(next(iter(shown.columns[1].cells))) == table.rows[0][1].text


def test_the_command(tmp_path: Path) -> None:
    results = write_everything(tmp_path / "results.sqlite")
    printed = CliRunner().invoke(command_line.app, ["export", str(results), "--format", "csv"])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == export(everything(), "csv")
    target = tmp_path / "tables.tex"
    arguments = ["export", str(results), "--format", "latex", "--to", str(target)]
    assert command_line.run(arguments) == 0
    assert target.read_text() == export(everything(), "latex")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["export", "{here}/none.sqlite"], 2, "no file of results"),
        (["report", "{here}/none.sqlite"], 2, "no file of results"),
        (["report", "{here}/text.sqlite"], 1, "must be a whole file of results"),
        (["export", "{here}/results.sqlite", "--format", "xml"], 2, "found 'xml'"),
        (["report", "{here}/results.sqlite", "--to", "{here}/text.sqlite/r"], 2, "no {here}/text"),
        (["report", "{here}/results.sqlite", "--to", "{here}/new/r"], 2, "there is no {here}/new"),
        (["export", "{here}/results.sqlite", "--to", "{here}/new/x"], 2, "there is no {here}/new"),
        (["figure", "{here}/results.sqlite", "rank", "--to", "{here}/new/x"], 2, "no {here}/new"),
        (["export", "{here}/results.sqlite", "--to", "{here}"], 2, "{here} is a folder"),
    ],
    ids=["missing", "missing-report", "foreign", "format", "target", "r", "e", "f", "folder"],
)  # fmt: skip
def test_bad_calls(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_everything(tmp_path / "results.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to be looked at" * 30)
    assert command_line.run([each.format(here=tmp_path) for each in arguments]) == code
    assert message.format(here=tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
