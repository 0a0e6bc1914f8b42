"""`ttapca corrupt`: make CIFAR-10-C out of CIFAR-10, or a contact sheet of one image.

The corruptions need packages that other commands do not: they are imported where they are used, so
that `ttapca --help` is quick and works without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from ttapca.cli.home import cache_root
from ttapca.cli.inputs import LimitOption, check_place
from ttapca.cli.reporting import file_progress
from ttapca.datasets import FROST
from ttapca.errors import OptionError
from ttapca.support.disk import writing

if TYPE_CHECKING:
    from ttapca.datasets import Images

_GROUPS = ("all", "standard", "extra")


def corrupt(
    dataset: Annotated[
        str,
        typer.Argument(help="cifar10, cifar100, or the path of an .npz file or of a folder."),
    ] = "cifar10",
    to: Annotated[Path | None, typer.Option(help="Folder to write the .npy files to.")] = None,
    corruptions: Annotated[
        str, typer.Option(help="Names with commas between; or all, standard (15), extra (4).")
    ] = "",
    severities: Annotated[str, typer.Option(help="Such as 1-5, or 1,3,5.")] = "1-5",
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; one a core by default.", show_default=False),
    ] = None,
    limit: LimitOption = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Draw a contact sheet (PNG) instead; see --image.")
    ] = None,
    image: Annotated[int, typer.Option(min=0, help="Which image the sheet shows.")] = 0,
    all_severities: Annotated[
        bool, typer.Option("--all-severities", help="A row of severities a corruption.")
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
        check_place(sheet, "--sheet")
        names = parse_corruptions(corruptions or "standard")
        shown = levels if all_severities else levels[-1:]
        _draw_sheet(sheet, dataset, image, names, shown, seed)
    elif to is not None:
        names = parse_corruptions(corruptions or "all")
        _write_data_set(to, dataset, limit, names, levels, seed, jobs or _cores())


def parse_corruptions(words: str) -> tuple[str, ...]:
    """Read a list of corruptions.

    Args:
        words: Names and groups with commas between.

    Returns:
        Names, each once, in the order given.

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
    for word in _words(words):
        try:
            names.extend(groups.get(word) or [find(word).name])
        except OptionError:
            raise unknown(word, (*CORRUPTIONS, *_GROUPS)) from None
    if not names:
        raise OptionError("`--corruptions` takes at least one name; found none.")
    return tuple(dict.fromkeys(names))


def parse_severities(words: str) -> tuple[int, ...]:
    """Read a set of severities.

    Args:
        words: Numbers and ranges with commas between.

    Returns:
        Severities, each once, ascending.

    Raises:
        OptionError: They are not from 1 to 5.

    Example:
        >>> parse_severities("5,1-2")
        (1, 2, 5)
    """
    from ttapca.corruptions import SEVERITIES

    found: set[int] = set()
    for word in _words(words):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            found = set()
            break
        found.update(range(int(first), int(last or first) + 1) or [0])
    if not found or not found <= set(SEVERITIES):
        raise OptionError(
            f"`--severities` takes numbers from {SEVERITIES[0]} to {SEVERITIES[-1]}, such as 1-5 "
            f"or 1,3,5; found `{words}`."
        )
    return tuple(sorted(found))


def _words(text: str) -> Iterable[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_test_images(name: str) -> Images:
    """Load the images to corrupt: a data set of the cache by its name, or any layout by a path."""
    from ttapca.datasets import Images, load

    data = load(name, "test", root=cache_root())
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
        textures=cache_root() / FROST,
    )
    with writing(export.to):
        export.check()
        missing = export.missing()
        typer.echo(
            f"{export.to}: {len(names) - len(missing)} of {len(names)} files are there; the rest "
            f"needs {_megabytes(export.bytes_needed())}, and "
            f"{_megabytes(export.bytes_free())} are free",
            err=True,
        )
        with file_progress(total=len(missing) * export.shape[0]) as progress:
            export.run(jobs, progress)
    typer.echo(f"{export.to}")


def _draw_sheet(
    sheet: Path,
    dataset: str,
    image: int,
    names: tuple[str, ...],
    severities: tuple[int, ...],
    seed: int,
) -> None:
    from ttapca.corruptions.sheet import contact_sheet

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
        textures=cache_root() / FROST,
    )
    # Under another name first: a full disk leaves no half a picture, nor spoils one that was there.
    partial = sheet.with_name(f".{sheet.name}.partial")
    try:
        with writing(sheet):
            drawn.save(partial, format="PNG")
            partial.replace(sheet)
    finally:
        partial.unlink(missing_ok=True)
    typer.echo(f"{sheet}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
