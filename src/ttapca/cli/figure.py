"""`ttapca figure`: one figure as a file, for documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttapca.cli.terminal_tables import ResultsArgument, write_text
from ttapca.errors import OptionError, did_you_mean


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
    from ttapca.benchmark.figures import figures
    from ttapca.benchmark.svg import file_svg

    with Results(results, readonly=True) as file:
        found = {each.name: each for each in figures(file.rows(), file.observations())}
    if name is None:
        for each in found.values():
            typer.echo(f"{each.name}: {each.title}. {each.caption}")
        return
    if name not in found:
        raise OptionError(
            "A figure is drawn where there are results for it. The figures of "
            f"{results} are: {', '.join(found) or 'none'}; found `{name}`."
            f"{did_you_mean(name, found)}"
        )
    target = to or Path(f"{name}.svg")
    write_text(target, file_svg(found[name]))
    typer.echo(str(target))
