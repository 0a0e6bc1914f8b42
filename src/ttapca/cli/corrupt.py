"""`ttapca corrupt`: make CIFAR-C or ImageNet-C out of clean images, or a contact sheet.

The corruptions need packages that other commands do not. They are imported where they are used, so
that `ttapca --help` is quick and works without them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from typer import Argument, Option

from ttapca.cli import arguments, completion
from ttapca.cli.console import ConsoleReporter
from ttapca.datasets import FROST, Images, choose
from ttapca.errors import OptionError
from ttapca.support.disk import replace_file, writing

if TYPE_CHECKING:
    from ttapca.corruptions.pixels import Pixels

DATASET = "cifar10, cifar100, or the path of an .npz file or of a folder."
CORRUPTIONS = "Names, all, standard (15), extra (4)."
TABLE = (
    "How strong severities are: cifar-c, imagenet-c, or the path of a TOML file. By default "
    "imagenet-c from a shorter side of 96 pixels on, cifar-c below."
)


@dataclass(kw_only=True)
class CorruptionOptions:
    """Options for the images, and for how they are corrupted."""

    dataset: Annotated[str, Argument(help=DATASET, autocompletion=completion.data_sets)] = "cifar10"
    corruptions: Annotated[
        str, Option(help=CORRUPTIONS, autocompletion=completion.corruption_list)
    ] = ""
    severities: Annotated[
        str | None, Option(help="Such as 1-5, or 1,3,5 (default: 1-5; on a sheet 5).")
    ] = None
    table: Annotated[str | None, Option(help=TABLE)] = None
    seed: Annotated[int, Option(help="The same seed gives the same bytes.")] = 0
    size: arguments.ImageSize = None
    shorter_side: arguments.ShorterSide = None

    def images(self) -> Images:
        """Load the test images."""
        sizes = {"size": self.size, "shorter_side": self.shorter_side}
        data = arguments.read_images(self.dataset, "test", None, **sizes)
        # OpenCV needs one image after another; the official files store planes of colours.
        return Images(np.ascontiguousarray(data.images), data.labels, data.class_names)

    def tell_strength(self, images: Pixels) -> None:
        """Say which table of severities images get, and why."""
        from ttapca.corruptions import default_table, load_table

        height, width = images.shape[1:3]
        name = load_table(self.table or default_table(height, width)).name
        reason = "as asked" if self.table else f"the default for {height} x {width} pixels"
        typer.echo(f"severities of {name}, {reason}", err=True)


def corrupt(
    options: CorruptionOptions,
    to: Annotated[Path | None, Option(help="Folder for the .npy files.")] = None,
    jobs: Annotated[int | None, Option(min=1, help="Processes (default: one per core).")] = None,
    limit: arguments.LimitOption = None,
    sheet: Annotated[Path | None, Option(help="Draw a contact sheet (PNG) instead.")] = None,
    image: Annotated[
        int | None, Option(min=0, help="Number of the image on the sheet (default: 0).")
    ] = None,
) -> None:
    """Corrupt a data set into the layout of CIFAR-10-C, or draw a contact sheet.

    If the command was interrupted, run it again: finished files are kept.
    """
    if (to is None) == (sheet is None):
        found = "neither" if to is None else "both"
        raise OptionError(f"`ttapca corrupt` takes either --to DIR or --sheet FILE; found {found}.")
    no_effect = "would have no effect with {}. Leave it out."
    if to is not None:
        arguments.refuse({"--image": image is not None}, no_effect.format("--to DIR"))
        _write_data_set(options, to, limit, jobs)
    elif sheet is not None:
        given = {"--limit": limit is not None, "--jobs": jobs is not None}
        arguments.refuse(given, no_effect.format("--sheet FILE"))
        arguments.check_place(sheet, "--sheet")
        _draw_sheet(options, sheet, image or 0)


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


def _photographs() -> Path | None:
    """Return the folder with the photographs of frost; None for the small ones that ship."""
    folder = arguments.cache_root() / FROST
    return folder if folder.is_dir() else None


def _write_data_set(
    options: CorruptionOptions, to: Path, limit: int | None, jobs: int | None
) -> None:
    import joblib  # knows the limits of containers

    from ttapca.corruptions.writing import Export

    names = parse_corruptions(options.corruptions or "all")
    severities = parse_severities("1-5" if options.severities is None else options.severities)
    data = options.images()
    chosen = choose(data.labels, limit, order="stored")
    if limit is not None:
        typer.echo(f"{chosen.selection} of `{options.dataset}`", err=True)
    data = chosen.of(data)
    export = Export(
        images=data.images,
        labels=data.labels,
        to=to.absolute(),
        corruptions=names,
        severities=severities,
        seed=options.seed,
        table=options.table,
        textures=_photographs(),
    )
    with writing(export.to):
        export.check()
        options.tell_strength(export.images)
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


def _draw_sheet(options: CorruptionOptions, sheet: Path, image: int) -> None:
    from ttapca.corruptions.apply import contact_sheet

    names = parse_corruptions(options.corruptions or "standard")
    severities = parse_severities("5" if options.severities is None else options.severities)
    data = options.images()
    if image >= len(data):
        raise OptionError(
            f"`--image` must be below the number of images, {len(data)}; found {image}."
        )
    options.tell_strength(data.images)
    drawn = contact_sheet(
        data.images[image],
        index=image,
        corruptions=names,
        severities=severities,
        seed=options.seed,
        table=options.table,
        textures=_photographs(),
    )
    png = io.BytesIO()
    drawn.save(png, format="PNG")
    replace_file(sheet, png.getvalue())
    typer.echo(f"{sheet}")
