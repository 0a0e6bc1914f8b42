"""`ttapca demo` and `ttapca reproduce`: whole comparisons, from data to a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from ttapca import benchmark
from ttapca.cli import arguments
from ttapca.cli.bench import exit_if_failed, failures, run_benchmark
from ttapca.cli.console import WORDS, print_tables
from ttapca.cli.data import get
from ttapca.cli.publish import write_report
from ttapca.datasets import DATA_SETS
from ttapca.engines import engine_of
from ttapca.errors import OptionError
from ttapca.support.disk import make_folder

OWN_NETWORK = {"cifar10": "cifar10-resnet20"}
QUICK_IMAGES = 1000
IN_BATCHES, ONE_BY_ONE = "demo", "demo-camera"  # presets


def demo(
    to: Annotated[Path | None, Option(metavar="DIR")] = None,
    digits: Annotated[bool, Option("--digits")] = False,
) -> None:
    """Corrupt 500 photographs in fifteen ways, and let six methods repair a small network."""
    start = time.perf_counter()  # torch takes seconds to import
    from ttapca.benchmark.measurement import one_thread

    with one_thread():
        if digits:
            session = benchmark.Benchmark(benchmark.read_preset("demo-digits"))
            _run_and_report(session, to or Path("ttapca-demo-digits"), lines=False)
        else:
            _photographs(to or Path("ttapca-demo"))
    typer.echo(f"done in {time.perf_counter() - start:.0f} s", err=True)


def _photographs(to: Path) -> None:
    """Run both comparisons of photographs, and report them with images that a method repaired."""
    import joblib

    from ttapca.benchmark.demo_report import demo_tables, line_to_remember, repaired_images
    from ttapca.benchmark.plan import RECOMMENDED

    make_folder(to)
    results, page = to / "results.sqlite", to / "report.html"
    # Each process computes on one thread, so that sums round alike on any machine.
    engine = engine_of("joblib:2" if joblib.cpu_count() > 1 else None)
    rows = []
    for preset in (IN_BATCHES, ONE_BY_ONE):
        session = benchmark.Benchmark(benchmark.read_preset(preset))
        found = run_benchmark(session, results, lines=False, engine=engine)
        order = {unit.cells[0]: number for number, unit in enumerate(session.units())}
        rows += sorted(found, key=lambda row: order[row.cell])  # two processes end in any order
    pictured = benchmark.Benchmark(benchmark.read_preset(IN_BATCHES))
    shown = [
        row.cell
        for row in rows
        if row.cell.setting in pictured.plan.settings and row.cell.method == RECOMMENDED
    ]
    repaired = repaired_images(shown, pictured.prepare(results))
    out = Console()
    for heading, table in zip(WORDS["headings"], demo_tables(rows), strict=True):
        out.print(f"\n{heading}", highlight=False)
        print_tables(out, [table])
    line = line_to_remember(rows)
    write_report(results, page, line, repaired)
    out.print(f"\n{line}\n", highlight=False)
    typer.echo(f"The report: {page.absolute()}")
    exit_if_failed(failures(rows))


def reproduce(
    data: arguments.DataArgument,
    network: arguments.NetworkOptions,
    to: Annotated[Path | None, Option(metavar="DIR")] = None,
    quick: Annotated[bool, Option("--quick")] = False,
    methods: arguments.MethodList = None,
    corrupted: Annotated[Path | None, Option(metavar="DIR")] = None,
    folder: arguments.DataFolder = None,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
) -> None:
    """Get the data, fit a filter, run tables 1 and 2 of the paper, write the report."""
    from ttapca.benchmark.paper import needed_for_the_papers_setting

    default = OWN_NETWORK.get(data)
    if not (network.model or network.model_option or default):
        raise OptionError(
            f"No network for `{data}` ships with ttapca: name one, `ttapca reproduce {data} MODEL`."
        )
    found, source = arguments.engine(jobs, engine), network.source(default)
    # A network that cannot be loaded is refused before anything is fetched.
    subject = source.load(doubt=False)
    cifar_c = corrupted or _place(f"{data}-c", folder)
    images = QUICK_IMAGES if quick else None
    for need in needed_for_the_papers_setting(data, subject, cifar_c, images):
        typer.echo(f"reproduce: {need}", err=True)
    if data in DATA_SETS and _place(data, folder) is None:
        get([data], folder)
    plan = benchmark.read_preset("paper-tables").changed(
        data=data,
        images=images,
        corrupted=None if cifar_c is None else str(cifar_c),
        methods=arguments.separated(methods),
    )
    session = benchmark.Benchmark(plan, source, root=arguments.cache_root(), folder=folder)
    place = to or Path(f"ttapca-{Path(data).name}")
    _run_and_report(session, place, engine=found)


def _place(name: str, folder: Path | None) -> Path | None:
    layouts = DATA_SETS[name].layouts if name in DATA_SETS else ()
    folders = ((folder or arguments.cache_root()) / each.folder for each in layouts)
    return next((each for each in folders if each.is_dir()), None)


def _run_and_report(session: benchmark.Benchmark, to: Path, **how: Any) -> None:
    """Run a benchmark in a folder as `run_benchmark` does, print its tables, write its report."""
    from ttapca.benchmark.tables import error_tables

    make_folder(to)
    results, page = to / "results.sqlite", to / "report.html"
    rows = run_benchmark(session, results, **how)
    out = Console()
    print_tables(out, error_tables(rows))
    write_report(results, page)
    typer.echo(f"The report: {page.absolute()}")
    exit_if_failed(failures(rows))
