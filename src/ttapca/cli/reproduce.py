"""`ttapca reproduce`: the paper's tables on real data, from nothing to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ttapca.cli.inputs import (
    ArchitectureOption,
    DataArgument,
    DataFolder,
    MeanOption,
    ModelArgument,
    ModelChoice,
    ModelOption,
    NormalisationOption,
    StdOption,
    WeightsOption,
    separated,
)
from ttapca.errors import OptionError
from ttapca.support.disk import make_folder

OWN_NETWORK = {"cifar10": "cifar10-resnet20"}
QUICK_IMAGES = 1000


def reproduce(
    data: DataArgument,
    model: ModelArgument = None,
    *,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For results and report (default: ttapca-DATA)."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_IMAGES:,} images a corruption, not all.")
    ] = False,
    methods: Annotated[
        str | None, typer.Option(help="With commas between (default: those of the paper).")
    ] = None,
    corrupted: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder of CIFAR-C (default: the published one if it is there, else made here).",
        ),
    ] = None,
    model_option: ModelOption = None,
    weights: WeightsOption = None,
    architecture: ArchitectureOption = None,
    normalise: NormalisationOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    folder: DataFolder = None,
) -> None:
    """Get the data, fit a filter, run tables 1 and 2 of the paper, write the report.

    Cut it off whenever you like: the same command goes on.
    """
    from ttapca.benchmark.plan import read_preset
    from ttapca.benchmark.tables import error_tables
    from ttapca.cli import benching
    from ttapca.cli.bench_inputs import Inputs
    from ttapca.cli.report import write_report
    from ttapca.cli.terminal_tables import print_table

    named = model if model or model_option else OWN_NETWORK.get(data)
    if named is None and model_option is None:
        raise OptionError(
            f"No network for `{data}` ships with ttapca: name one, as in `ttapca reproduce {data} "
            "MODEL`."
        )
    choice = ModelChoice(named, model_option, weights, architecture, normalise, mean, std)
    choice.load(doubt=False)  # a network that cannot be loaded is said before anything is fetched
    found = corrupted or _published(data, folder)
    _get(data, folder, frost=found is None)
    plan = read_preset("paper-tables").changed(
        data=data,
        images=QUICK_IMAGES if quick else None,
        corrupted=None if found is None else str(found),
        methods=separated(methods),
    )
    place = to or Path(f"ttapca-{Path(data).name}")
    make_folder(place)
    inputs = Inputs(choice, plan, place / "results.sqlite", folder=folder)
    rows = benching.run_cells(inputs, estimate=True)
    out = Console()
    for table in error_tables(rows):
        print_table(out, table)
    write_report(inputs.to, place / "report.html")
    out.print(f"The report: {(place / 'report.html').absolute()}", highlight=False, soft_wrap=True)


def _published(data: str, folder: Path | None) -> Path | None:
    """The published CIFAR-C, where somebody has put it in place."""
    return _place(f"{data}-c", folder)


def _get(data: str, folder: Path | None, *, frost: bool) -> None:
    """Fetch what is not there; data of the user's own are left alone."""
    from ttapca.cli.data import get
    from ttapca.cli.home import cache_root
    from ttapca.datasets import FROST, has_frost
    from ttapca.datasets.catalog import DATA_SETS

    if data not in DATA_SETS:
        return
    if _place(data, folder) is None:
        get([data], folder)
    if frost and not has_frost(cache_root()):
        get([FROST])


def _place(name: str, folder: Path | None) -> Path | None:
    """Where a data set lies, if it does."""
    from ttapca.cli.home import cache_root
    from ttapca.datasets.catalog import DATA_SETS

    root = (folder or cache_root()).expanduser()
    layouts = DATA_SETS[name].layouts if name in DATA_SETS else ()
    return next((root / one.folder for one in layouts if (root / one.folder).is_dir()), None)
