"""What `ttapca bench` does once its options are read: run, list, and say how it went."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from ttapca.benchmark.cells import CLEAN, Cell, Row, Setting
from ttapca.benchmark.estimate import estimate_seconds
from ttapca.benchmark.grid import Unit, expand
from ttapca.benchmark.results import Results
from ttapca.benchmark.running import run
from ttapca.benchmark.subject import Subject
from ttapca.cli.bench_inputs import Inputs
from ttapca.cli.bench_view import RunView, title
from ttapca.cli.inputs import check_place

# What tells the rows of one method apart, where a plan has several values of it.
VARIED = ("batch_size", "components", "steps", "options")


def list_cells(inputs: Inputs) -> None:
    """Print what would be run."""
    units = expand(inputs.plan, inputs.subject(fit=False))
    for unit in units:
        typer.echo(title(unit))
    cells = sum(len(unit.cells) for unit in units)
    images = sum(unit.images for unit in units)
    typer.echo(f"{cells:,} cells, {images:,} images", err=True)


def run_cells(
    inputs: Inputs, *, retry_failed: bool = False, lines: bool = True, estimate: bool = False
) -> list[Row]:
    """Run what is not in the file yet; returns the rows of all cells of the plan.

    Args:
        inputs: What to run, on what, and where to.
        retry_failed: Whether to run cells again that have failed.
        lines: Whether each finished unit leaves a line.
        estimate: Whether to try each method first, and say how long it will take.
    """
    check_place(inputs.to)
    with Results(inputs.to) as results:  # a file of something else is refused before any work
        subject = inputs.subject(fit=True)
        units = expand(inputs.plan, subject)
        with RunView(lines=lines) as view:
            if inputs.plan.images is not None:
                view.note(f"{inputs.chosen.selection} of `{inputs.plan.data}`")
            if estimate:
                _say_how_long(units, subject, results, view)
            try:
                run(
                    units,
                    subject,
                    results,
                    watcher=view,
                    retry_failed=retry_failed,
                    command=inputs.command,
                )
            except KeyboardInterrupt:
                view.note("stopped; the same command goes on after the last finished cell")
                raise
        wanted = {cell for unit in units for cell in unit.cells}
        return [row for row in results.rows() if row.cell in wanted]


def _say_how_long(units: Sequence[Unit], subject: Subject, results: Results, view: RunView) -> None:
    finished = results.statuses()
    todo = [unit for unit in units if not all(cell in finished for cell in unit.cells)]
    view.note("trying each method on one batch, to say how long the run will take")
    seconds = estimate_seconds(todo, subject)
    view.note(
        f"about {timedelta(seconds=round(seconds))} on this machine; cut it off whenever you like, "
        "the same command goes on"
    )


def print_summary(rows: Sequence[Row], to: Path) -> None:
    """Print the mean error of each method in each setting."""
    settings = list(dict.fromkeys(row.cell.setting for row in rows))
    clean = any(row.cell.corruption == CLEAN for row in rows)
    table = Table(title="Mean classification error [%] over corruptions", title_justify="left")
    table.add_column("method", no_wrap=True)
    for setting in settings:
        table.add_column(setting, justify="right")
        if clean:
            table.add_column(f"{setting}, clean", justify="right")
    for label in dict.fromkeys(_label(row.cell, rows) for row in rows):
        own = [row for row in rows if _label(row.cell, rows) == label]
        means = []
        for setting in settings:
            means.append(_mean(own, setting, clean=False))
            if clean:
                means.append(_mean(own, setting, clean=True))
        table.add_row(label, *means)
    Console().print(table)
    failed = sum(row.outcome.status == "failed" for row in rows)
    lost = f", {failed:,} of them failed" if failed else ""
    typer.echo(f"{to}: {len(rows):,} cells{lost}")


def _label(cell: Cell, rows: Sequence[Row]) -> str:
    """The method, and what tells its rows apart."""
    parts = [cell.method]
    own = [row.cell for row in rows if row.cell.method == cell.method]
    for name in VARIED:
        if len({getattr(other, name) for other in own}) > 1:
            parts.append(f"{name.replace('_', ' ')} {getattr(cell, name)}")
    severities = {other.severity for other in own if other.corruption != CLEAN}
    if len(severities) > 1:  # clean images have none, and a row of their own
        parts.append(f"severity {cell.severity}" if cell.severity else CLEAN)
    return ", ".join(parts)


def _mean(rows: Sequence[Row], setting: Setting, *, clean: bool) -> str:
    chosen = [
        row.outcome
        for row in rows
        if row.cell.setting == setting and (row.cell.corruption == CLEAN) == clean
    ]
    errors = [outcome.error for outcome in chosen if outcome.error is not None]
    if not errors:
        return "failed" if chosen else ""
    text = f"{sum(errors) / len(errors):.2f}"
    return text if len(errors) == len(chosen) else f"{text} ({len(errors)} of {len(chosen)})"
