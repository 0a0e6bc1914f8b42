"""`ttapca report`: one page of everything that was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttapca.cli.inputs import check_place
from ttapca.cli.terminal_tables import ResultsArgument, write_text


def report(
    results: ResultsArgument,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The page.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a page to open and to send: tables, figures, images, costs. It needs no network."""
    count = write_report(results, to)
    typer.echo(f"{to}: {count:,} measurement{'s' if count != 1 else ''}")


def write_report(results: Path, to: Path) -> int:
    """Write the page of a file of results; returns how many measurements it shows."""
    from ttapca.benchmark import Results
    from ttapca.benchmark.report_page import report as page

    check_place(to)  # before the work, so that a wrong place is reported at once
    with Results(results, readonly=True) as file:
        rows, observations = file.rows(), file.observations()
    write_text(to, page(rows, observations))
    return len(rows)
