"""`ttapca corrupt`: make CIFAR-10-C out of CIFAR-10, or a contact sheet of one image.

The corruptions need packages that other commands do not: they are imported where they are used, so
that `ttapca --help` is quick and works without them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from typer import Argument, Option

from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter
from ttapca.datasets import FROST
from ttapca.errors import OptionError
from ttapca.support.disk import replace_file, writing

if TYPE_CHECKING:
    from ttapca.datasets import Images

_GROUPS = ("all", "standard", "extra")


def corrupt(
    dataset: Annotated[
        str, Argument(help="cifar10, cifar100, or the path of an .npz file or of a folder.")
    ] = "cifar10",
    to: Annotated[Path | None, Option(help="Folder to write the .npy files to.")] = None,
    corruptions: Annotated[
        str, Option(help="Names with commas between; or all, standard (15), extra (4).")
    ] = "",
    severities: Annotated[str, Option(help="Such as 1-5, or 1,3,5.")] = "1-5",
    seed: Annotated[int, Option(help="Same seed, same bytes.")] = 0,
    jobs: Annotated[
        int | None,
        Option(min=1, help="Processes (default: one for each core).", show_default=False),
    ] = None,
    limit: arguments.LimitOption = None,
    sheet: Annotated[
        Path | None, Option(help="Draw a contact sheet (PNG) instead; see --image.")
    ] = None,
    image: Annotated[int, Option(min=0, help="Which image the sheet shows.")] = 0,
    all_severities: Annotated[
        bool, Option("--all-severities", help="Show all severities, in one row.")
    ] = False,
) -> None:
    """Corrupt a data set into the layout of CIFAR-10-C, or draw a contact sheet.

    Files that are finished are kept when the command is run again after an interruption.
    """
    if (to is None) == (sheet is None):
        found = "neither" if to is None else "both"
        raise OptionError(f"`ttapca corrupt` takes either --to DIR or --sheet FILE; found {found}.")
    levels = parse_severities(severities)
    if sheet is not None:
        arguments.check_place(sheet, "--sheet")
        names = parse_corruptions(corruptions or "standard")
        shown = levels if all_severities else levels[-1:]
        _draw_sheet(sheet, dataset, image, names, shown, seed)
    elif to is not None:
        names = parse_corruptions(corruptions or "all")
        _write_data_set(to, dataset, limit, names, levels, seed, jobs or _cores())


def parse_corruptions(words: str) -> tuple[str, ...]:
    """Names of corruptions and groups of them, with commas between: each once, as they come.

    Raises:
        OptionError: A name is unknown, or there is none.

    Example:
        >>> parse_corruptions("fog,extra")
        ('fog', 'speckle_noise', 'gaussian_blur', 'spatter', 'saturate')
    """
    from ttapca.corruptions import CORRUPTIONS, EXTRA, STANDARD
    from ttapca.corruptions.catalogue import find, unknown

    groups = dict(zip(_GROUPS, (CORRUPTIONS, STANDARD, EXTRA), strict=True))
    names: list[str] = []
    for word in arguments.separated(words) or ():
        try:
            names.extend(groups.get(word) or [find(word).name])
        except OptionError:
            raise unknown(word, (*CORRUPTIONS, *_GROUPS)) from None
    if not names:
        raise OptionError("`--corruptions` takes at least one name; found none.")
    return tuple(dict.fromkeys(names))


def parse_severities(words: str) -> tuple[int, ...]:
    """Severities and ranges of them, with commas between: each once, ascending.

    Raises:
        OptionError: They are not from 1 to 5.

    Example:
        >>> parse_severities("5,1-2")
        (1, 2, 5)
    """
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


def _cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_test_images(name: str) -> Images:
    """Load the images to corrupt: a data set of the cache by its name, or any layout by a path."""
    from ttapca.datasets import Images

    data = arguments.read_images(name, "test", None)
    # OpenCV wants one image after another; the official files have planes of colours.
    return Images(np.ascontiguousarray(data.images), data.labels, data.class_names)


def _write_data_set(
    to: Path,
    dataset: str,
    limit: int | None,
    names: tuple[str, ...],
    severities: tuple[int, ...],
    seed: int,
    jobs: int,
) -> None:
    from ttapca.corruptions.writing import Export
    from ttapca.datasets import choose

    data = _load_test_images(dataset)
    chosen = choose(data.labels, limit, order="stored")
    if limit is not None:
        typer.echo(f"{chosen.selection} of `{dataset}`", err=True)
    data = chosen.of(data)
    export = Export(
        images=data.images,
        labels=data.labels,
        to=to.expanduser().absolute(),
        corruptions=names,
        severities=severities,
        seed=seed,
        textures=arguments.cache_root() / FROST,
    )
    with writing(export.to):
        export.check()
        missing = export.missing()
        needed, free = export.bytes_needed() / 1e6, export.bytes_free() / 1e6
        typer.echo(
            f"{export.to}: {len(names) - len(missing)} of {len(names)} files are there; the rest "
            f"needs {needed:,.1f} MB, and {free:,.1f} MB are free",
            err=True,
        )
        with ConsoleReporter() as reporter:
            done: dict[str, int] = {}

            def tell(name: str, images: int, of: int) -> None:
                done[name] = images
                total = len(missing) * of
                reporter.advance("corrupting", sum(done.values()), total, name)
                if images == of:
                    reporter.note(f"{name}: done")

            export.run(jobs, tell)
    typer.echo(f"{export.to}")


def _draw_sheet(
    sheet: Path,
    dataset: str,
    image: int,
    names: tuple[str, ...],
    severities: tuple[int, ...],
    seed: int,
) -> None:
    from ttapca.corruptions.apply import contact_sheet

    data = _load_test_images(dataset)
    if image >= len(data):
        raise OptionError(
            f"`--image` must be below the number of images, {len(data)}; found {image}."
        )
    drawn = contact_sheet(
        data.images[image],
        index=image,
        corruptions=names,
        severities=severities,
        seed=seed,
        textures=arguments.cache_root() / FROST,
    )
    png = io.BytesIO()
    drawn.save(png, format="PNG")
    replace_file(sheet, png.getvalue())
    typer.echo(f"{sheet}")
