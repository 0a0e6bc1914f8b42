"""`ttapca report`, `export` and `figure`: turn results into a page, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ttapca.benchmark.results import Results
from ttapca.cli.arguments import check_place
from ttapca.errors import OptionError, did_you_mean
from ttapca.support.disk import replace_file
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from ttapca.benchmark.demo_report import RepairedImage

SUFFIXES = {".csv": "csv", ".json": "json"}
ResultsArgument = Annotated[Path, Argument(metavar="RESULTS")]


def report(
    results: ResultsArgument, to: Annotated[Path, Option(metavar="FILE")] = Path("report.html")
) -> None:
    """Write one HTML page with all tables, figures, images and costs; it works offline."""
    typer.echo(f"{to}: {counted(write_report(results, to), 'measurement')}")


def write_report(
    results: Path, to: Path, remember: str = "", repaired: Sequence[RepairedImage] = ()
) -> int:
    """Write the page of a results file, and return how many measurements it shows."""
    from ttapca.benchmark.report_page import report as page

    check_place(to)  # before the work, so that a wrong place is reported at once
    with Results(results, readonly=True) as file:
        rows, observations = file.rows(), file.observations()
    replace_file(to, page(rows, observations, remember, repaired).encode())
    return sum(row.outcome.status != "pruned" for row in rows)


def export(
    results: ResultsArgument,
    form: Annotated[str | None, Option("--format")] = None,
    to: Annotated[Path | None, Option(metavar="FILE")] = None,
) -> None:
    """Write what `ttapca bench` measured as CSV, JSON or Markdown."""
    from ttapca.benchmark.tables import export as exported

    if to is not None:
        check_place(to)
    usual = SUFFIXES.get("" if to is None else to.suffix.lower(), "markdown")
    with Results(results, readonly=True) as file:
        text = exported(file.rows(), form or usual)
    if to is None:
        typer.echo(text, nl=False)
    else:
        replace_file(to, text.encode())


def figure(
    results: ResultsArgument,
    name: Annotated[str | None, Argument()] = None,
    to: Annotated[Path | None, Option(metavar="FILE")] = None,
) -> None:
    """Write one figure of the report as a file; SVG is for light and dark pages."""
    from ttapca.benchmark.figures import figures
    from ttapca.benchmark.svg import check_format, figure_file

    if to is not None:
        if name is None:
            raise OptionError(
                f"--to FILE is for one figure; found no NAME. `ttapca figure {results}` lists them."
            )
        check_place(to)
        check_format(to.suffix)
    with Results(results, readonly=True) as file:
        found = {each.name: each for each in figures(file.rows(), file.observations())}
    if name is None:
        for each in found.values():
            typer.echo(f"{each.name}: {each.title}. {each.caption}")
        return
    if name not in found:
        raise OptionError(
            "A figure is drawn if there are results for it. The figures of "
            f"{results} are: {', '.join(found) or 'none'}; found `{name}`."
            f"{did_you_mean(name, found)}"
        )
    target = to or Path(f"{name}.svg")
    replace_file(target, figure_file(found[name], target.suffix))
    typer.echo(str(target))
