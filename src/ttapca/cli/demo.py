"""`ttapca demo`: the whole idea on real data, in a minute and without a download."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttapca.cli.inputs import ModelChoice
from ttapca.support.disk import make_folder


def demo(
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the results and the report.")
    ] = Path("ttapca-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of the order of the test digits.")] = 0,
) -> None:
    """Corrupt handwritten digits in fifteen ways, and let every method repair a small network."""
    start = time.perf_counter()

    # torch takes seconds to import: only who needs it waits
    from ttapca.benchmark.machine import one_thread
    from ttapca.benchmark.plan import read_preset
    from ttapca.benchmark.tables import error_tables
    from ttapca.cli import benching
    from ttapca.cli.bench_inputs import Inputs
    from ttapca.cli.report import write_report
    from ttapca.cli.terminal_tables import print_table

    make_folder(to)
    plan = read_preset("demo").changed(seeds=(seed,))
    inputs = Inputs(ModelChoice(plan.model), plan, to / "results.sqlite")
    with one_thread():
        rows = benching.run_cells(inputs, lines=False)
    out = Console()
    for table in error_tables(rows):
        print_table(out, table)
    write_report(inputs.to, to / "report.html")
    out.print(f"The report: {(to / 'report.html').absolute()}", highlight=False, soft_wrap=True)
    log = Console(stderr=True)
    log.print(f"done in {time.perf_counter() - start:.0f} s", style="dim", highlight=False)
