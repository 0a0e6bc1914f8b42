"""`ttapca demo`: a small network, corrupted photographs, and what each method makes of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from ttapca.cli import arguments
from ttapca.cli.bench import exit_if_failed, run_benchmark
from ttapca.cli.reproduce import run_and_report
from ttapca.support.disk import make_folder

if TYPE_CHECKING:
    from ttapca.benchmark.demo_report import RepairedImage
    from ttapca.benchmark.rows import Row

IN_BATCHES, ONE_BY_ONE = "demo", "demo-camera"  # presets
HEADINGS = (
    "1. In batches, the classes mixed; adaptation starts anew at each batch",
    "2. As a camera sees them: one at a time, class after class; adaptation goes on",
    "3. Clean photographs: what a method costs where nothing is wrong",
)


def demo(
    to: Annotated[
        Path | None,
        Option(
            metavar="DIR", help="Folder for results and report (default: ttapca-demo[-digits])."
        ),
    ] = None,
    digits: Annotated[
        bool, Option("--digits", help="Handwritten digits instead of photographs.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the order of the test images.")] = 0,
) -> None:
    """Corrupt 500 photographs in fifteen ways, and let six methods repair a small network.

    Network, photographs and filter ship with the package. `ttapca bench cifar10-resnet20 --data
    cifar10-500` compares other methods, corruptions or settings on them.
    """
    start = time.perf_counter()

    # imported here because torch takes seconds to import
    from ttapca.benchmark.measurement import one_thread
    from ttapca.benchmark.plan import read_preset
    from ttapca.benchmark.session import Benchmark

    with one_thread():
        if digits:
            plan = read_preset("demo-digits").changed(seeds=(seed,))
            run_and_report(Benchmark(plan), to or Path("ttapca-demo-digits"), lines=False)
        else:
            _photographs(to or Path("ttapca-demo"), seed)
    log = Console(stderr=True)
    log.print(f"done in {time.perf_counter() - start:.0f} s", style="dim", highlight=False)


def _photographs(to: Path, seed: int) -> None:
    from ttapca.benchmark.demo_report import demo_tables, line_to_remember
    from ttapca.cli.publish import write_report
    from ttapca.cli.terminal_tables import print_table

    make_folder(to)
    results, page = to / "results.sqlite", to / "report.html"
    rows, repaired = _measured(results, seed)
    out = Console()
    for heading, table in zip(HEADINGS, demo_tables(rows), strict=True):
        out.print(f"\n{heading}", highlight=False)
        print_table(out, table)
    line = line_to_remember(rows)
    write_report(results, page, line, repaired)
    out.print(f"\n{line}\n", highlight=False)
    typer.echo(f"The report: {page.absolute()}")
    exit_if_failed(rows)


def _measured(results: Path, seed: int) -> tuple[list[Row], list[RepairedImage]]:
    """Run both comparisons of photographs, and find images that they turn from wrong to right."""
    from ttapca.benchmark.demo_report import repaired_images
    from ttapca.benchmark.plan import RECOMMENDED, read_preset
    from ttapca.benchmark.session import Benchmark
    from ttapca.engines import SerialEngine, engine_of

    # Each process computes on one thread, so that sums round alike on any machine.
    engine = engine_of("joblib:2" if arguments.cores() > 1 else None)
    rows: list[Row] = []
    for preset in (IN_BATCHES, ONE_BY_ONE):
        benchmark = Benchmark(read_preset(preset).changed(seeds=(seed,)))
        found = run_benchmark(benchmark, results, lines=False, engine=engine)
        order = {unit.cells[0]: number for number, unit in enumerate(benchmark.units())}
        rows += sorted(found, key=lambda row: order[row.cell])  # two processes end in any order
    pictured = Benchmark(read_preset(IN_BATCHES))
    settings = pictured.plan.settings
    cells = [row.cell for row in rows if row.cell.setting in settings]
    shown = [cell for cell in cells if cell.method == RECOMMENDED]
    return rows, repaired_images(shown, pictured.prepare(results, SerialEngine()))
