"""`ttapca figure`: one figure as a file, for documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttapca.cli.terminal_tables import ResultsArgument, write_text
from ttapca.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ttapca.benchmark.plots import Plot


def figure(
    results: ResultsArgument,
    name: Annotated[
        str | None,
        typer.Argument(help="Which figure, such as `rank`; without it, all are listed."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Where to write (default: NAME.svg)."),
    ] = None,
) -> None:
    """Write one figure of the report as an SVG file, for light and dark pages."""
    from ttapca.benchmark import Results
    from ttapca.benchmark.drawing import draw_file
    from ttapca.benchmark.figures import figures

    with Results(results, readonly=True) as file:
        plots = figures(file.rows(), file.observations())
    if name is None:
        for plot in plots:
            typer.echo(f"{plot.name}: {plot.title}. {plot.caption}")
        return
    target = to or Path(f"{name}.svg")
    write_text(target, draw_file(_chosen(plots, name, results)))
    typer.echo(str(target))


def _chosen(plots: Sequence[Plot], name: str, results: Path) -> Plot:
    names = [plot.name for plot in plots]
    if name not in names:
        found = ", ".join(names) or "none"
        raise OptionError(
            f"A figure is drawn when the rows carry it; {results} has {found}, and not `{name}`."
            f"{did_you_mean(name, names)}"
        )
    return plots[names.index(name)]
