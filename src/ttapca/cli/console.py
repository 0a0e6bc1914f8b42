"""The output of commands: JSON and tables to standard output, progress to standard error.

Messages of the library are put into words of the command line.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import typer
from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ttapca.support.parsing import finite
from ttapca.support.progress import Reporter

if TYPE_CHECKING:
    from ttapca.benchmark.tables import ResultTable, Value

STYLES = {"failed": "red", "missing": "dim"}  # of values in a table of results


def print_json(content: object) -> None:
    """Print JSON; numbers that are not finite, which it does not have, become null."""
    typer.echo(json.dumps(finite(content), indent=2, allow_nan=False))


class ConsoleReporter(Reporter):
    """A `Reporter` for people: bars on a terminal, cleared at the end, and notes everywhere.

    Each note starts with `title`. With `lines`, a finished task with facts leaves a line. After
    Ctrl-C it says where the same command `goes_on`. It writes to standard error by default.
    """

    def __init__(
        self,
        title: str = "",
        counted: Literal["steps", "bytes"] = "steps",
        *,
        lines: bool = False,
        goes_on: str = "",
        console: Console | None = None,
    ) -> None:
        self._title, self._lines, self._goes_on = title, lines, goes_on
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn() if counted == "steps" else progress.DownloadColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[facts]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, progress.TaskID] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Clear the bars, also after an error."""
        self._progress.stop()
        if kind is KeyboardInterrupt and self._goes_on:
            self.note(f"stopped; the same command goes on {self._goes_on}")

    def note(self, text: str) -> None:
        """Write one sentence above the bars."""
        self._print(f"{self._title}: {text}" if self._title else text)

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Move the bar of a task, and remove it when the task is finished."""
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total, facts=facts)
        number = self._tasks[task]
        self._progress.update(number, completed=done, total=total, facts=facts)
        if total is None:  # `update` would ignore it
            self._progress.tasks[self._progress.task_ids.index(number)].total = None
        elif done >= total:
            self._progress.remove_task(self._tasks.pop(task))
            if self._lines and facts:
                self._print(f"{task}  {facts}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)


def print_tables(console: Console, tables: Sequence[ResultTable]) -> None:
    """Print tables one below the other; notes that the next one has too are printed once."""
    for table, following in zip_longest(tables, tables[1:]):
        print_table(console, table)
        for note in table.notes:
            if following is None or note not in following.notes:
                console.print(Text(note, "dim"))
        console.print()


def print_table(console: Console, table: ResultTable) -> None:
    """Print a table; if it is too wide, exchange rows and columns, then leave out its lines."""
    console.print(Text(table.title, "bold"))
    shown = rich_table(table)
    if not _fits(shown, console):
        shown = rich_table(_transposed(table))
    if not _fits(shown, console):
        shown.box, shown.collapse_padding, shown.pad_edge = box.SIMPLE_HEAD, True, False
    console.print(shown)


def _fits(shown: Table, console: Console) -> bool:
    unbounded = console.options.update(max_width=10_000)
    return console.measure(shown, options=unbounded).maximum <= console.width


def _transposed(table: ResultTable) -> ResultTable:
    from ttapca.benchmark.tables import Value

    def narrow(value: Value) -> Value:  # the half-width of an interval below its mean
        return dataclasses.replace(value, text=value.text.replace(" ±", "\n±"))

    values = [map(narrow, row[1:]) for row in table.rows]
    lines = zip(table.columns[1:], *values, strict=True)
    return dataclasses.replace(
        table,
        columns=("", *(row[0].text.replace("-", "-\n") for row in table.rows)),
        rows=tuple((Value(name), *values) for name, *values in lines),
    )


def rich_table(table: ResultTable) -> Table:
    """Return a table for a terminal, without title and notes: the best in bold."""
    shown = Table()
    for name, words in zip(table.columns, table.wordy, strict=True):
        shown.add_column(Text(name), justify="left" if words else "right", no_wrap=True)
    for row in table.rows:
        styles = ("bold" if value.best else STYLES.get(value.kind, "") for value in row)
        shown.add_row(*(Text(value.text, style) for value, style in zip(row, styles, strict=True)))
    return shown


def plain_table(*headings: str) -> Table:
    """Return an empty table without lines; a heading with `>` has its column at the right."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        table.add_column(Text(heading.removeprefix(">")), justify=justify, no_wrap=True)
    return table


WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
HELP: dict[str, dict[str, str]] = WORDS["help"]  # by command and parameter
QUOTE = '"'
ARGUMENT = re.compile(r"`(\w+)=([^`]*)`|\b(n_components|size)=(\d+)")


def on_the_command_line(text: str) -> str:
    """Return a message of the library with options of the command line instead of arguments."""
    for phrase in WORDS["phrases"]:
        text = re.sub(phrase["found"], phrase["said"], text)
    return ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found[1] or found[3], found[2] or found[4]
    if name == "outputs":  # the value makes the meaning clear
        return f"--outputs {(value or '').strip(QUOTE) or 'KIND'}"
    if option := WORDS["options"].get(name):
        return f"{option} {value}" if found[4] else str(option)
    return f"--option {name}={value or 'VALUE'}"
