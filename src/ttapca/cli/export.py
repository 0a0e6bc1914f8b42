"""`ttapca export`: results for other programs, and for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttapca.cli.arguments import check_place
from ttapca.cli.terminal_tables import ResultsArgument, write_text


def export(
    results: ResultsArgument,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="`csv` or `json`: every measurement. `markdown` or `latex`: the tables.",
        ),
    ] = "markdown",
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Where to write (default: standard output)."),
    ] = None,
) -> None:
    """Write what `ttapca bench` measured as CSV, JSON, Markdown or LaTeX."""
    from ttapca.benchmark import Results
    from ttapca.benchmark.tables import export as exported

    if to is not None:
        check_place(to)
    with Results(results, readonly=True) as file:
        text = exported(file.rows(), form)
    if to is None:
        typer.echo(text, nl=False)
    else:
        write_text(to, text)
