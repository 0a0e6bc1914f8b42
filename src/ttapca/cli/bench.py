"""`ttapca bench`: compare methods on corrupted images; what is finished is never run twice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttapca.cli.inputs import (
    DIGITS_NETWORK,
    ArchitectureOption,
    AsJson,
    DataFolder,
    ImageSize,
    MeanOption,
    ModelArgument,
    ModelChoice,
    ModelOption,
    NormalisationOption,
    StdOption,
    WeightsOption,
    separated,
    value_of,
)
from ttapca.datasets import DIGITS
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.benchmark.cells import Row
    from ttapca.benchmark.plan import Plan

OF_DIGITS = (DIGITS, DIGITS_NETWORK)  # networks that can have no other data
LIST = "with commas between"
MOST_NUMBERS = 10_000


def bench(
    model: ModelArgument = None,
    *,
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="The file of results; one with results goes on.")
    ] = Path("results.sqlite"),
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="A plan in TOML; options win."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="paper-tables, paper-table1, paper-table2, paper-rank, ..."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="cifar10, cifar100, digits, or a path.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help=f"Of `ttapca methods`, {LIST}.")] = None,
    corruptions: Annotated[
        str | None, typer.Option(help=f"Names, standard, extra, all or clean, {LIST}.")
    ] = None,
    severities: Annotated[str | None, typer.Option(help="Such as 5, 1-5 or 1,3,5.")] = None,
    settings: Annotated[
        str | None,
        typer.Option(help=f"episodic, online, continual, mixed, correlated, {LIST}."),
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(help=f"Images a batch, {LIST}.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Such as 0 or 0-2.")] = None,
    steps: Annotated[str | None, typer.Option(help=f"Gradient steps a batch, {LIST}.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of all methods.")] = None,
    components: Annotated[str | None, typer.Option(help=f"Of the filter, {LIST}.")] = None,
    layer: Annotated[
        str | None, typer.Option(help="Of the filter (default: what `ttapca layers` recommends).")
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Test images, as many of each class (default: all).")
    ] = None,
    corrupted: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="CIFAR-C (default: the images are made in memory)."),
    ] = None,
    corruption_seed: Annotated[
        int | None, typer.Option(help="Of the images that are made (default: 0).")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD.NAME=VALUE", help="Of one method; may be repeated."),
    ] = None,
    filter: Annotated[
        Path | None,
        typer.Option(
            "--filter",
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A fitted one (default: fitted and kept).",
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run cells again that have failed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, run none.")] = False,
    model_option: ModelOption = None,
    weights: WeightsOption = None,
    architecture: ArchitectureOption = None,
    normalise: NormalisationOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    folder: DataFolder = None,
    size: ImageSize = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods x corruptions x settings on one network; a run that was cut off goes on.

    By default as in the paper: its methods, fifteen corruptions at severity 5, episodic and online,
    batches of 200, one step, 2,000 components.
    """
    from ttapca.cli import benching
    from ttapca.cli.bench_inputs import Inputs

    chosen = _plan(plan, preset).changed(
        data=data,
        methods=separated(methods),
        corruptions=separated(corruptions),
        severities=_numbers("--severities", severities),
        settings=separated(settings),
        batch_sizes=_numbers("--batch-sizes", batch_sizes),
        seeds=_numbers("--seeds", seeds),
        steps=_numbers("--steps", steps),
        lr=lr,
        components=_numbers("--components", components),
        layer=layer,
        images=images,
        corrupted=corrupted,
        corruption_seed=corruption_seed,
        method=_method_options(option or []),
    )
    named = model if model or model_option else chosen.model
    if named in OF_DIGITS and data is None and plan is None and preset is None:
        chosen = chosen.changed(data=DIGITS)
    choice = ModelChoice(named, model_option, weights, architecture, normalise, mean, std)
    inputs = Inputs(choice, chosen, to, filter, folder, size)
    if dry_run:
        benching.list_cells(inputs)
        return
    rows = benching.run_cells(inputs, retry_failed=retry_failed)
    if as_json:
        typer.echo(json.dumps([_facts(row) for row in rows], indent=2))
    else:
        benching.print_summary(rows, to)
    if any(row.outcome.status == "failed" for row in rows):
        raise typer.Exit(1)


def _plan(path: Path | None, preset: str | None) -> Plan:
    from ttapca.benchmark.plan import Plan, read_plan, read_preset

    if path is not None and preset is not None:
        raise OptionError("Give --plan FILE or --preset NAME; found both.")
    if preset is not None:
        return read_preset(preset)
    return Plan() if path is None else read_plan(path)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers and ranges of them."""
    if text is None:
        return None
    found: list[int] = []
    for word in separated(text) or ():
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise OptionError(f"{option} takes whole numbers, such as 1,3 or 0-2; found `{text}`.")
        count = int(last or first) - int(first) + 1
        if len(found) + count > MOST_NUMBERS:
            raise OptionError(f"{option} takes at most {MOST_NUMBERS:,} numbers; found `{text}`.")
        found.extend(range(int(first), int(first) + count))
    return tuple(found)


def _method_options(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`tent.lr=0.01` as a table; values are those of TOML, and what is none is text."""
    table: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        method, dot, own = name.strip().rpartition(".")
        if not (equals and dot and method and own):
            raise OptionError(
                f"--option takes METHOD.NAME=VALUE, such as tent.lr=0.01; found `{word}`."
            )
        table.setdefault(method, {})[own] = value_of(text)
    return table


def _facts(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row.cell), **dataclasses.asdict(row.outcome)}
