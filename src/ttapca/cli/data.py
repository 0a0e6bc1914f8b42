"""`ttapca data`: get data sets, and list what is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ttapca.cli import completion
from ttapca.cli.arguments import AsJson, DataFolder, cache_root
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import (
    CIFAR10_500,
    DATA_SETS,
    DIGITS,
    FROST,
    Holding,
    fetch,
    fetch_frost,
    find_data_set,
    has_frost,
    inventory,
)
from ttapca.datasets.layouts import shipped_size
from ttapca.datasets.sources import FROST_PACKAGE

STATE_COLOURS = {"verified": "green", "partial": "yellow", "generated": "cyan", "damaged": "red"}

CACHE = "Folder (default: $TTAPCA_HOME, else $XDG_CACHE_HOME/ttapca, else ~/.cache/ttapca)."


def get(
    names: Annotated[
        list[str],
        Argument(
            metavar="NAME",
            help=f"Any of: {', '.join((*DATA_SETS, FROST))}.",
            autocompletion=completion.to_fetch,
        ),
    ],
    to: Annotated[Path | None, Option(metavar="DIR", help=CACHE)] = None,
) -> None:
    """Download and verify data sets; an interrupted download is continued."""
    root = (to or cache_root()).absolute()
    data_sets = [find_data_set(name) for name in names if name != FROST]  # checks all names first
    if FROST in names:
        _get_frost(root)
    for data_set in data_sets:
        with ConsoleReporter(data_set.name, "bytes", goes_on="from here") as report:
            fetched = fetch(data_set, root, report)
            if fetched.kept is not None:
                report.note(f"the folder that was there is kept as {fetched.kept}")
        holding = fetched.holding
        typer.echo(
            f"{holding.name}  {holding.folder}  {_megabytes(holding)}  {holding.state}  "
            f"(source: {fetched.source})"
        )


def _get_frost(root: Path) -> None:
    with ConsoleReporter(FROST) as report:
        if has_frost(root):
            report.note("already there: verified")
        else:
            report.note(f"running `pip download {FROST_PACKAGE}`, which shows no progress")
        folder = fetch_frost(root)
    typer.echo(f"{FROST}  {folder}  verified  (photographs for the corruption `frost`)")


def list_(folder: DataFolder = None, as_json: AsJson = False) -> None:
    """Show which data sets are there, their size, and whether they verify (reads every byte)."""
    root = (folder or cache_root()).absolute()
    with ConsoleReporter("list", "bytes") as report:
        holdings = inventory(root, report)
    if as_json:
        print_json([_as_json(holding) for holding in holdings])
        return
    for line in _lines(root, holdings):
        typer.echo(line)


def _megabytes(holding: Holding) -> str:
    return f"{holding.size / 1e6:,.1f} MB"


def _as_json(holding: Holding) -> dict[str, str | int]:
    facts = dataclasses.asdict(holding)
    return facts | {"folder": str(holding.folder), "bytes": facts.pop("size")}


def _lines(root: Path, holdings: list[Holding]) -> Iterator[str]:
    yield f"Data sets in {root}"
    width = max(map(len, DATA_SETS))
    for name in DATA_SETS:
        found = [holding for holding in holdings if holding.name == name]
        for holding in found:
            state = typer.style(holding.state, fg=STATE_COLOURS[holding.state])
            facts = f"{state}: {holding.detail}  ({holding.folder.name})"
            yield f"  {name:{width}}  {_megabytes(holding):>10}  {facts}"
        if not found:
            yield f"  {name:{width}}  {'-':>10}  not there; get it with: ttapca data get {name}"
    state = "verified" if has_frost(root) else f"not there; get it with: ttapca data get {FROST}"
    yield f"  {FROST:{width}}  {'-':>10}  {state}"
    yield "Part of the package"
    yield f"  {CIFAR10_500:{width}}  {shipped_size() / 1e6:>7,.1f} MB  500 test images of cifar10"
    yield f"  {DIGITS:{width}}  {'-':>10}  1,797 handwritten digits of scikit-learn"
