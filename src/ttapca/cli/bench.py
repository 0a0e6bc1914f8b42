"""`ttapca bench`: compare methods on corrupted images; what is finished is never run twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from ttapca.benchmark.cells import CLEAN, Cell, Row, Setting
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter
from ttapca.datasets import DIGITS
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.benchmark.plan import Plan
    from ttapca.benchmark.session import Benchmark

LIST = "with commas between"
# What tells the rows of one method apart, where a plan has several values of it.
VARIED = ("batch_size", "components", "steps", "options")


def bench(
    model: arguments.ModelArgument = None,
    *,
    to: Annotated[
        Path, Option(metavar="FILE", help="The file of results; one with results goes on.")
    ] = Path("results.sqlite"),
    plan: Annotated[
        Path | None, Option("--plan", metavar="FILE", help="A plan in TOML; options win over it.")
    ] = None,
    preset: Annotated[
        str | None, Option(help="paper-tables, paper-table1, paper-table2, paper-rank, ...")
    ] = None,
    data: Annotated[
        str | None, Option(metavar="DATA", help="cifar10, cifar100, digits, or a path.")
    ] = None,
    methods: Annotated[
        str | None, Option(help=f"Names that `ttapca methods` lists, {LIST}.")
    ] = None,
    corruptions: Annotated[
        str | None, Option(help=f"Names, standard, extra, all or clean, {LIST}.")
    ] = None,
    severities: Annotated[str | None, Option(help="Such as 5, 1-5 or 1,3,5.")] = None,
    settings: Annotated[
        str | None, Option(help=f"episodic, online, continual, mixed, correlated, {LIST}.")
    ] = None,
    batch_sizes: Annotated[
        str | None, Option(help=f"How many images make a batch, {LIST}.")
    ] = None,
    seeds: Annotated[str | None, Option(help="Such as 0 or 0-2.")] = None,
    steps: Annotated[
        str | None, Option(help=f"Gradient steps on each batch, for methods that take any, {LIST}.")
    ] = None,
    lr: Annotated[
        float | None, Option(help="Learning rate of all methods that take gradient steps.")
    ] = None,
    components: Annotated[str | None, Option(help=f"How many the filter has, {LIST}.")] = None,
    layer: arguments.LayerOption = None,
    images: Annotated[
        int | None, Option(help="How many test images, equally of each class (default: all).")
    ] = None,
    corrupted: Annotated[
        str | None,
        Option(metavar="DIR", help="A folder of CIFAR-C (default: the images are made in memory)."),
    ] = None,
    corruption_seed: Annotated[
        int | None, Option(help="Of the images that are made (default: 0).")
    ] = None,
    option: Annotated[
        list[str] | None,
        Option(
            metavar="METHOD.NAME=VALUE", help="An option of one method; may be given repeatedly."
        ),
    ] = None,
    filter: arguments.FilterOption = None,
    retry_failed: Annotated[
        bool, Option("--retry-failed", help="Run again what has failed.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List what would be run, and run nothing.")
    ] = False,
    model_option: arguments.ModelOption = None,
    weights: arguments.WeightsOption = None,
    architecture: arguments.ArchitectureOption = None,
    normalise: arguments.NormalisationOption = None,
    mean: arguments.MeanOption = None,
    std: arguments.StdOption = None,
    folder: arguments.DataFolder = None,
    size: arguments.ImageSize = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Compare methods x corruptions x settings on one network; a run that was cut off goes on.

    By default as in the paper: its methods, fifteen corruptions at severity 5, episodic and online,
    batches of 200, one step, 2,000 components.
    """
    from ttapca.benchmark.session import DIGITS_NETWORK, Benchmark

    chosen = _plan(plan, preset).changed(
        data=data,
        methods=arguments.separated(methods),
        corruptions=arguments.separated(corruptions),
        severities=arguments.whole_numbers("--severities", severities),
        settings=arguments.separated(settings),
        batch_sizes=arguments.whole_numbers("--batch-sizes", batch_sizes),
        seeds=arguments.whole_numbers("--seeds", seeds),
        steps=arguments.whole_numbers("--steps", steps),
        lr=lr,
        components=arguments.whole_numbers("--components", components),
        layer=layer,
        images=images,
        corrupted=corrupted,
        corruption_seed=corruption_seed,
        method=_method_options(option or []),
    )
    named = model if model or model_option else chosen.model
    if named in (DIGITS, DIGITS_NETWORK) and data is None and plan is None and preset is None:
        chosen = chosen.changed(data=DIGITS)  # this network can have no other data
    network = arguments.network_source(
        named, model_option, weights, architecture, normalise, mean, std
    )
    benchmark = Benchmark(chosen, network, filter, arguments.cache_root(), folder, size)
    if dry_run:
        _list_units(benchmark)
        return
    rows = run_benchmark(benchmark, to, retry_failed=retry_failed)
    if as_json:
        facts = [dataclasses.asdict(row.cell) | dataclasses.asdict(row.outcome) for row in rows]
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_summary(rows, to)
    if any(row.outcome.status == "failed" for row in rows):
        raise typer.Exit(1)


def run_benchmark(
    benchmark: Benchmark,
    to: Path,
    *,
    lines: bool = True,
    retry_failed: bool = False,
    estimate: bool = False,
) -> list[Row]:
    """Run a benchmark and show how it goes; `lines`: whether each finished run leaves a line."""
    arguments.check_place(to)
    with ConsoleReporter("bench", lines=lines) as reporter:
        benchmark.reporter = reporter
        try:
            return benchmark.run(to, retry_failed=retry_failed, estimate=estimate)
        except KeyboardInterrupt:
            reporter.note("stopped; the same command goes on after the last finished measurement")
            raise


def _list_units(benchmark: Benchmark) -> None:
    units = benchmark.units()
    for unit in units:
        typer.echo(unit.title)
    count = sum(len(unit.cells) for unit in units)
    images = sum(unit.images for unit in units)
    typer.echo(f"{count:,} measurements, {images:,} images", err=True)


def _plan(path: Path | None, preset: str | None) -> Plan:
    from ttapca.benchmark.plan import Plan, read_plan, read_preset

    if path is not None and preset is not None:
        raise OptionError("Give --plan FILE or --preset NAME; found both.")
    if preset is not None:
        return read_preset(preset)
    return Plan() if path is None else read_plan(path)


def _method_options(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The table that `tent.lr=0.01` and the like make."""
    table: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        method, dot, own = name.strip().rpartition(".")
        if not (equals and dot and method and own):
            raise OptionError(
                f"--option takes METHOD.NAME=VALUE, such as tent.lr=0.01; found `{word}`."
            )
        table.setdefault(method, {})[own] = arguments.value_of(text)
    return table


def _print_summary(rows: Sequence[Row], to: Path) -> None:
    """Print the mean error of each method in each setting."""
    clean = (False, True) if any(row.cell.corruption == CLEAN for row in rows) else (False,)
    columns = [
        (setting, kind) for setting in dict.fromkeys(row.cell.setting for row in rows)
        for kind in clean
    ]  # fmt: skip
    table = Table(title="Mean classification error [%] over corruptions", title_justify="left")
    table.add_column("method", no_wrap=True)
    for setting, kind in columns:
        table.add_column(f"{setting}, clean" if kind else setting, justify="right")
    labels = {row.cell: _label(row.cell, rows) for row in rows}
    for label in dict.fromkeys(labels.values()):
        own = [row for row in rows if labels[row.cell] == label]
        table.add_row(label, *(_mean(own, *column) for column in columns))
    Console().print(table)
    failed = sum(row.outcome.status == "failed" for row in rows)
    lost = f", {failed:,} of them failed" if failed else ""
    typer.echo(f"{to}: {len(rows):,} measurements{lost}")


def _label(cell: Cell, rows: Sequence[Row]) -> str:
    """The method, and what tells its rows apart."""
    parts = [cell.method]
    own = [row.cell for row in rows if row.cell.method == cell.method]
    for name in VARIED:
        if len({getattr(other, name) for other in own}) > 1:
            parts.append(f"{name.replace('_', ' ')} {getattr(cell, name)}")
    severities = {other.severity for other in own if other.corruption != CLEAN}
    if len(severities) > 1:  # clean images have none, and a row of their own
        parts.append(f"severity {cell.severity}" if cell.severity else CLEAN)
    return ", ".join(parts)


def _mean(rows: Sequence[Row], setting: Setting, clean: bool) -> str:
    chosen = [
        row.outcome
        for row in rows
        if row.cell.setting == setting and (row.cell.corruption == CLEAN) == clean
    ]
    errors = [outcome.error for outcome in chosen if outcome.error is not None]
    if not errors:
        return "failed" if chosen else ""
    text = f"{sum(errors) / len(errors):.2f}"
    return text if len(errors) == len(chosen) else f"{text} ({len(errors)} of {len(chosen)})"
