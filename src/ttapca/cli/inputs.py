"""What the commands about networks take alike: a network, images, and how they are named."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttapca.cli.home import cache_root
from ttapca.data.loading import load

if TYPE_CHECKING:
    from torch import nn

    from ttapca.data import Images, Split
    from ttapca.models import EpochRecord

DataArgument = Annotated[
    str, typer.Argument(metavar="DATA", help="cifar10, cifar100, digits, or a path to images.")
]
DataOption = Annotated[
    str,
    typer.Option("--data", metavar="DATA", help="cifar10, cifar100, digits, or a path to images."),
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--in", metavar="DIR", help="Where data sets with a name lie, if not the cache."),
]
ImageSize = Annotated[
    int | None, typer.Option("--size", help="For folders of pictures: resize to this side.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def read_images(
    data: str,
    split: Split,
    folder: Path | None,
    *,
    corruption: str | None = None,
    severity: int | None = None,
    size: int | None = None,
) -> Images:
    """Labelled images by name, from the cache or the given folder, or by path."""
    root = (folder or cache_root()).expanduser()
    return load(data, split, root=root, corruption=corruption, severity=severity, size=size)


def users_factory(name: str) -> nn.Module:
    """Call `package.module:factory`; modules in the current directory can be named."""
    from ttapca.models.factories import make

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return make(name)


@contextmanager
def tensorboard_writer(
    folder: Path, wanted: bool | None
) -> Iterator[Callable[[EpochRecord], None]]:
    """Where TensorBoard's events of a run go: nowhere, when it is neither wanted nor there."""
    if wanted is None:
        wanted = importlib.util.find_spec("tensorboard") is not None
    if not wanted:
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:  # type: ignore[no-untyped-call]

        def write(record: EpochRecord) -> None:
            for name, value in dataclasses.asdict(record).items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, record.epoch)  # type: ignore[no-untyped-call]

        yield write
