"""`ttapca reproduce`: the paper's tables, from data to report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from ttapca.cli import arguments, completion
from ttapca.cli.bench import exit_if_failed, run_benchmark
from ttapca.errors import OptionError
from ttapca.support.disk import make_folder

if TYPE_CHECKING:
    from ttapca.benchmark.session import Benchmark
    from ttapca.engines import Engine

OWN_NETWORK = {"cifar10": "cifar10-resnet20"}
QUICK_IMAGES = 1000


def reproduce(
    data: arguments.DataArgument,
    network: arguments.NetworkOptions,
    to: Annotated[
        Path | None, Option(metavar="DIR", help="Folder for results (default: ttapca-DATA).")
    ] = None,
    quick: Annotated[bool, Option("--quick", help=f"Use {QUICK_IMAGES:,} test images.")] = False,
    methods: Annotated[
        str | None,
        Option(help="Names (default: the paper's, and wiener).", autocompletion=completion.methods),
    ] = None,
    corrupted: Annotated[
        Path | None, Option(metavar="DIR", help="A folder of CIFAR-C (default: found, else made).")
    ] = None,
    folder: arguments.DataFolder = None,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
) -> None:
    """Get the data, fit a filter, run tables 1 and 2 of the paper, write the report.

    It says first what differs from the paper's own setting, and how to get that. You can stop it at
    any time: the same command continues.
    """
    from ttapca.benchmark.paper import needed_for_the_papers_setting
    from ttapca.benchmark.plan import read_preset
    from ttapca.benchmark.session import Benchmark

    default = OWN_NETWORK.get(data)
    if not (network.model or network.model_option or default):
        raise OptionError(
            f"No network for `{data}` ships with ttapca: name one, as in `ttapca reproduce {data} "
            "MODEL`."
        )
    where, source = arguments.engine(jobs, engine), network.source(default)
    # A network that cannot be loaded is refused before anything is fetched.
    subject = source.load(doubt=False)
    found = corrupted or _place(f"{data}-c", folder)
    images = QUICK_IMAGES if quick else None
    for need in needed_for_the_papers_setting(data, subject, found, images):
        typer.echo(f"reproduce: {need}", err=True)
    _get(data, folder)
    plan = read_preset("paper-tables").changed(
        data=data,
        images=images,
        corrupted=None if found is None else str(found),
        methods=arguments.separated(methods),
    )
    benchmark = Benchmark(plan, source, root=arguments.cache_root(), folder=folder)
    place = to or Path(f"ttapca-{Path(data).name}")
    run_and_report(benchmark, place, estimate=True, engine=where)


def run_and_report(
    benchmark: Benchmark,
    to: Path,
    *,
    lines: bool = True,
    estimate: bool = False,
    engine: Engine | None = None,
) -> None:
    """Run a benchmark in a folder, print its tables and write its report there.

    If a measurement failed, the report says why, and the exit code is 1.
    """
    from ttapca.benchmark.tables import error_tables
    from ttapca.cli.publish import write_report
    from ttapca.cli.terminal_tables import print_table

    make_folder(to)
    results, page = to / "results.sqlite", to / "report.html"
    rows = run_benchmark(benchmark, results, lines=lines, estimate=estimate, engine=engine)
    out = Console()
    for table in error_tables(rows):
        print_table(out, table)
    write_report(results, page)
    typer.echo(f"The report: {page.absolute()}")
    exit_if_failed(rows)


def _get(data: str, folder: Path | None) -> None:
    """Fetch a named data set that is not there; a path is left alone."""
    from ttapca.cli.data import get
    from ttapca.datasets import DATA_SETS

    if data in DATA_SETS and _place(data, folder) is None:
        get([data], folder)


def _place(name: str, folder: Path | None) -> Path | None:
    """Return the folder of a data set, or None if there is none."""
    from ttapca.datasets.catalog import DATA_SETS

    root = folder or arguments.cache_root()
    layouts = DATA_SETS[name].layouts if name in DATA_SETS else ()
    return next((root / one.folder for one in layouts if (root / one.folder).is_dir()), None)
