"""`ttapca corrupt`: make CIFAR-C or ImageNet-C out of clean images.

The corruptions need packages that other commands do not. They are imported where they are used, so
that `ttapca --help` is quick and works without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from typer import Argument, Option

from ttapca.cli import arguments, completion
from ttapca.cli.console import ConsoleReporter
from ttapca.datasets import FROST, choose
from ttapca.errors import OptionError
from ttapca.support.disk import writing

DATASET = "cifar10, cifar100, or the path of an .npz file or of a folder."
CORRUPTIONS = "Names, all, standard (15), extra (4)."
TABLE = (
    "How strong severities are: cifar-c, imagenet-c, or the path of a TOML file. By default "
    "imagenet-c from a shorter side of 96 pixels on, cifar-c below."
)


def corrupt(
    to: Annotated[Path, Option(metavar="DIR", help="Folder for the .npy files.")],
    dataset: Annotated[
        str, Argument(help=DATASET, autocompletion=completion.data_sets)
    ] = "cifar10",
    corruptions: Annotated[
        str, Option(help=CORRUPTIONS, autocompletion=completion.corruption_list)
    ] = "all",
    severities: Annotated[str, Option(help="Such as 1-5, or 1,3,5.")] = "1-5",
    table: Annotated[str | None, Option(help=TABLE)] = None,
    seed: Annotated[int, Option(help="The same seed gives the same bytes.")] = 0,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    jobs: Annotated[int | None, Option(min=1, help="Processes (default: one per core).")] = None,
    limit: arguments.LimitOption = None,
) -> None:
    """Corrupt a data set into the layout of CIFAR-10-C.

    If the command was interrupted, run it again: finished files are kept.
    """
    import joblib  # knows the limits of containers

    from ttapca.corruptions.writing import Export

    names, chosen_severities = parse_corruptions(corruptions), parse_severities(severities)
    data = arguments.read_images(dataset, "test", None, size=size, shorter_side=shorter_side)
    chosen = choose(data.labels, limit, order="stored")
    if limit is not None:
        typer.echo(f"{chosen.selection} of `{dataset}`", err=True)
    data = chosen.of(data)
    photographs = arguments.cache_root() / FROST
    export = Export(
        # OpenCV needs one image after another; the official files store planes of colours.
        images=np.ascontiguousarray(data.images),
        labels=data.labels,
        to=to.absolute(),
        corruptions=names,
        severities=chosen_severities,
        seed=seed,
        table=table,
        textures=photographs if photographs.is_dir() else None,  # else the small ones that ship
    )
    with writing(export.to):
        export.check()
        height, width = export.shape[1:3]
        reason = "as asked" if table else f"the default for {height} x {width} pixels"
        typer.echo(f"severities of {export.severity_table.name}, {reason}", err=True)
        missing = export.missing()
        needed, free = export.bytes_needed() / 1e6, export.bytes_free() / 1e6
        typer.echo(
            f"{export.to}: {len(names) - len(missing)} of {len(names)} files are there; the rest "
            f"needs {needed:,.1f} MB, and {free:,.1f} MB are free",
            err=True,
        )
        done: dict[str, int] = {}
        with ConsoleReporter() as reporter:

            def tell(name: str, images: int, of: int) -> None:
                done[name] = images
                reporter.advance("corrupting", sum(done.values()), len(missing) * of, name)
                if images == of:
                    reporter.note(f"{name}: done")

            export.run(jobs or joblib.cpu_count(), tell)
    typer.echo(f"{export.to}")


def parse_corruptions(words: str) -> tuple[str, ...]:
    """Return the corruptions of a list of names and groups, each once and in order."""
    from ttapca.corruptions.catalogue import find_all

    names = find_all(arguments.separated(words) or ())
    if not names:
        raise OptionError("`--corruptions` takes at least one name; found none.")
    return names


def parse_severities(words: str) -> tuple[int, ...]:
    """Return the severities of a list of numbers and ranges, each once and ascending."""
    from ttapca.corruptions import SEVERITIES

    try:
        found = arguments.whole_numbers("--severities", words) or ()
    except OptionError:
        found = ()
    if not found or not set(found) <= set(SEVERITIES):
        raise OptionError(
            f"`--severities` takes numbers from {SEVERITIES[0]} to {SEVERITIES[-1]}, such as 1-5 "
            f"or 1,3,5; found `{words}`."
        )
    return tuple(sorted(set(found)))
