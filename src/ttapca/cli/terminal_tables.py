"""Show results: tables on a terminal, texts in files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ttapca.cli.inputs import check_place
from ttapca.support.disk import replace_file

if TYPE_CHECKING:
    from ttapca.benchmark.tables import ResultTable, Value

ResultsArgument = Annotated[
    Path,
    typer.Argument(metavar="RESULTS", help="A file that `ttapca bench` wrote."),
]

UNBOUNDED = 10_000  # letters
STYLES = {"failed": "red", "missing": "dim"}


def print_table(console: Console, table: ResultTable) -> None:
    """Print a table; where it is too wide, with rows as columns, and then without lines."""
    shown = rich_table(table)
    if not _fits(shown, console):
        shown = rich_table(_turned(table))
    if not _fits(shown, console):
        shown.box, shown.collapse_padding, shown.pad_edge = box.SIMPLE_HEAD, True, False
    console.print(shown)


def _fits(shown: RichTable, console: Console) -> bool:
    unbounded = console.options.update(max_width=UNBOUNDED)
    return console.measure(shown, options=unbounded).maximum <= console.width


def _turned(table: ResultTable) -> ResultTable:
    """The same with rows and columns exchanged; the first column gives the headings."""
    from ttapca.benchmark.tables import Value

    lines = zip(table.columns[1:], *(row[1:] for row in table.rows), strict=True)
    return dataclasses.replace(
        table,
        columns=("", *(row[0].text.replace("-", "-\n") for row in table.rows)),
        rows=tuple((Value(name), *values) for name, *values in lines),
    )


def rich_table(table: ResultTable) -> RichTable:
    """A table for a terminal: numbers to the right, the best in bold, notes below."""
    shown = RichTable(
        title=Text(table.title),
        title_justify="left",
        caption=Text("\n".join(table.notes)) if table.notes else None,
        caption_justify="left",
    )
    for name, words in zip(table.columns, table.wordy, strict=True):
        shown.add_column(Text(name), justify="left" if words else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(_entry(value) for value in row))
    return shown


def _entry(value: Value) -> Text:
    return Text(value.text, style="bold" if value.best else STYLES.get(value.kind, ""))


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step.

    Raises:
        OptionError: Its folder does not exist.
        StorageError: The operating system refuses.
    """
    check_place(path)
    replace_file(path, text.encode())
