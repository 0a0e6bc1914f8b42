"""`ttapca report`, `export` and `figure`, and tables on a terminal."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmark.synthetic_rows import (
    METHODS,
    cell,
    everything,
    paper_grid,
    row,
    sweeps,
    with_bits,
    write_everything,
)
from ttapca.benchmark import Results
from ttapca.benchmark.figures import figures
from ttapca.benchmark.svg import file_svg
from ttapca.benchmark.tables import error_tables, export
from ttapca.cli import app as command_line
from ttapca.cli.console import print_table, print_tables, rich_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export")
    write_everything(path / "results.sqlite")
    (path / "text.sqlite").write_text("not a database, but long enough to be looked at" * 30)
    return path


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.sqlite"
    with Results(results) as file:
        file.add([row(cell("bn", "fog"))])
    page = tmp_path / "report.html"
    assert command_line.run(["report", str(results), "--to", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: 1 measurement\n"
    assert "</html>" in page.read_text()


def test_export(folder: Path) -> None:
    words = ["export", str(folder / "results.sqlite"), "--format"]
    printed = CliRunner().invoke(command_line.app, [*words, "csv"])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == export(everything(), "csv")
    target = folder / "tables.md"
    assert command_line.run([*words, "markdown", "--to", str(target)]) == 0
    assert target.read_text() == export(everything(), "markdown")


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.csv", "csv"), ("a.JSON", "json"), ("a.md", "markdown")],
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


def test_figure_writes_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.sqlite"
    with Results(results) as file:
        file.add(sweeps())
    found = {figure.name: figure for figure in figures(sweeps())}
    assert command_line.run(["figure", str(results)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == list(found)
    target = tmp_path / "rank.svg"
    assert command_line.run(["figure", str(results), "rank", "--to", str(target)]) == 0
    assert target.read_text() == file_svg(found["rank"])
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        other = target.with_suffix(suffix)
        assert command_line.run(["figure", str(results), "rank", "--to", str(other)]) == 0
        assert other.read_bytes().startswith(start)
    capsys.readouterr()
    wrong = ["figure", str(results), "rank", "--to", str(tmp_path / "rank.gif")]
    assert command_line.run(wrong) == 2
    assert "A figure ends with .svg, .png, .pdf; found `.gif`." in capsys.readouterr().err
    assert command_line.run(["figure", str(results), "rnak"]) == 2
    assert "found `rnak`. Did you mean `rank`?" in capsys.readouterr().err


def test_a_table_for_a_terminal() -> None:
    (table,) = error_tables(paper_grid())
    shown = rich_table(table)
    assert shown.row_count == len(table.rows)
    assert [str(column.header) for column in shown.columns] == list(table.columns)
    assert [column.justify for column in shown.columns][:2] == ["left", "right"]
    assert str(next(iter(shown.columns[1].cells))) == table.rows[0][1].text


def test_notes_of_several_tables_are_printed_once() -> None:
    (table,) = error_tables(with_bits(paper_grid()))
    console = Console(file=io.StringIO(), width=200)
    print_tables(console, [table, dataclasses.replace(table, title="Another one")])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines.index(table.title) < lines.index("Another one") < lines.index(table.notes[0])
    assert all(console.file.getvalue().count(note[:60]) == 1 for note in table.notes)  # type: ignore[attr-defined]


def test_a_narrow_terminal_puts_the_interval_below_the_mean() -> None:
    (table,) = error_tables(with_bits(paper_grid()))
    console = Console(file=io.StringIO(), width=70)
    print_table(console, table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (at,) = [number for number, line in enumerate(lines) if "Mean of 15" in line]
    assert (lines[at].count("±"), lines[at + 1].count("±")) == (0, len(METHODS))
