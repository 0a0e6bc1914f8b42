"""Print tables of results on a terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from ttapca.benchmark.tables import ResultTable, Value

STYLES = {"failed": "red", "missing": "dim"}


def print_table(console: Console, table: ResultTable) -> None:
    """Print a table; if it is too wide, exchange rows and columns, then leave out its lines."""
    shown = rich_table(table)
    if not _fits(shown, console):
        shown = rich_table(_transposed(table))
    if not _fits(shown, console):
        shown.box, shown.collapse_padding, shown.pad_edge = box.SIMPLE_HEAD, True, False
    console.print(shown)


def _fits(shown: RichTable, console: Console) -> bool:
    unbounded = console.options.update(max_width=10_000)
    return console.measure(shown, options=unbounded).maximum <= console.width


def _transposed(table: ResultTable) -> ResultTable:
    from ttapca.benchmark.tables import Value

    values = [[_narrow(value) for value in row[1:]] for row in table.rows]
    lines = zip(table.columns[1:], *values, strict=True)
    return dataclasses.replace(
        table,
        columns=("", *(row[0].text.replace("-", "-\n") for row in table.rows)),
        rows=tuple((Value(name), *values) for name, *values in lines),
    )


def _narrow(value: Value) -> Value:
    """Put the half-width of an interval below its mean."""
    return dataclasses.replace(value, text=value.text.replace(" ±", "\n±"))


def rich_table(table: ResultTable) -> RichTable:
    """Return a table for a terminal: numbers to the right, the best in bold, notes below."""
    shown = RichTable(
        title=Text(table.title),
        title_justify="left",
        caption=Text("\n".join(table.notes)) if table.notes else None,
        caption_justify="left",
    )
    for name, words in zip(table.columns, table.wordy, strict=True):
        shown.add_column(Text(name), justify="left" if words else "right", no_wrap=True)
    for row in table.rows:
        styles = ("bold" if value.best else STYLES.get(value.kind, "") for value in row)
        shown.add_row(*(Text(value.text, style) for value, style in zip(row, styles, strict=True)))
    return shown
