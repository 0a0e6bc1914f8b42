"""What several commands take alike: a network, images, folders, lists of values."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ttapca.cli.console import ConsoleReporter
from ttapca.datasets import load
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.benchmark.session import NetworkSource
    from ttapca.datasets import Images, Split
    from ttapca.networks import Normalisation

PAPERS_COMPONENTS = 2000
PAPERS_BATCH = 200
MOST_NUMBERS = 10_000

DATA = "cifar10, cifar100, digits, or a path to images."
DataArgument = Annotated[str, Argument(metavar="DATA", help=DATA)]
DataOption = Annotated[str, Option("--data", metavar="DATA", help=DATA)]
DataFolder = Annotated[
    Path | None,
    Option("--in", metavar="DIR", help="Where data sets with a name lie, if not the cache."),
]
ImageSize = Annotated[
    int | None, Option("--size", min=1, help="For folders of pictures: resize to this side.")
]
LimitOption = Annotated[
    int | None,
    Option(
        "--limit", min=1, help="Use only this many images, equally of each class (default: all)."
    ),
]
OrderOption = Annotated[
    str,
    Option(
        "--order", help="auto: shuffled where they lie class by class; or shuffled, sorted, stored."
    ),
]
SeedOption = Annotated[int, Option("--seed", min=0, help="Of the choice and the shuffle.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
LayerOption = Annotated[
    str | None,
    Option(metavar="NAME", help="Of the filter (default: what `ttapca layers` recommends)."),
]
FilterOption = Annotated[
    Path | None,
    Option(
        "--filter", metavar="DIR", exists=True, file_okay=False, help="What `ttapca fit` saved."
    ),
]
ModelArgument = Annotated[
    str | None,
    Argument(
        metavar="MODEL", help="A packaged network, a file of weights, or package.module:factory."
    ),
]
ModelOption = Annotated[
    str | None, Option("--model", metavar="MODULE:FACTORY", help="The same as MODEL, by option.")
]
WeightsOption = Annotated[
    Path | None,
    Option(
        "--weights",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Weights for a network of your own.",
    ),
]
ArchitectureOption = Annotated[
    str | None,
    Option("--architecture", metavar="NAME", help="Of the file; else found out from it."),
]
NormalisationOption = Annotated[
    str | None,
    Option(
        "--normalise",
        metavar="NAME",
        help="What the network of a foreign file expects: none, half, cifar10 or cifar100.",
    ),
]
MeanOption = Annotated[str | None, Option("--mean", metavar="M[,M,M]", help="The same by numbers.")]
StdOption = Annotated[str | None, Option("--std", metavar="S[,S,S]", help="Beside --mean.")]


def cache_root() -> Path:
    """The folder for data sets and other things that can be fetched again.

    Returns:
        `TTAPCA_HOME`, else `$XDG_CACHE_HOME/ttapca`, else `~/.cache/ttapca`. An empty variable
        counts as unset.

    Example:
        >>> cache_root().is_absolute()
        True
    """
    own = os.environ.get("TTAPCA_HOME")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base.absolute() / "ttapca"


def network_source(
    argument: str | None,
    option: str | None = None,
    weights: Path | None = None,
    architecture: str | None = None,
    normalise: str | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> NetworkSource:
    """The network that the options name; modules in the current directory can be named.

    Raises:
        OptionError: None or two were named, or its normalisation is given by halves.
    """
    from ttapca.benchmark.session import NetworkSource

    if (argument is None) == (option is None):
        found = "neither" if argument is None else "both"
        raise OptionError(f"Name one network, as MODEL or with --model; found {found}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    stated = _normalisation(normalise, mean, std)
    return NetworkSource(str(argument or option), weights, architecture, stated)


def _normalisation(
    name: str | None, mean: str | None, std: str | None
) -> str | Normalisation | None:
    from ttapca.networks import Normalisation

    if mean is None and std is None:
        return name
    if name is not None or mean is None or std is None:
        raise OptionError("Give --normalise NAME, or both --mean and --std.")
    numbers = []
    for option, text in (("--mean", mean), ("--std", std)):
        try:
            numbers.append(tuple(float(part) for part in text.split(",")))
        except ValueError:
            raise OptionError(
                f"{option} takes numbers with commas, such as 0.49,0.48,0.45; found `{text}`."
            ) from None
    return Normalisation(*numbers)


def read_images(data: str, split: Split, folder: Path | None, **options: Any) -> Images:
    """Labelled images by name, from the cache or the given folder, or by path."""
    with ConsoleReporter() as reporter:
        reporter.advance(f"reading {data}", 0, None)
        return load(data, split, root=(folder or cache_root()).expanduser(), **options)


def separated(text: str | None) -> tuple[str, ...] | None:
    """The words of an option that takes several, with commas between; None where it is not given.

    Example:
        >>> separated("bn, tent")
        ('bn', 'tent')
    """
    if text is None:
        return None
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers and ranges of them, with commas between; None where they are not given.

    Raises:
        OptionError: They are no whole numbers, or too many.

    Example:
        >>> whole_numbers("--seeds", "5,1-3")
        (5, 1, 2, 3)
    """
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


def value_of(text: str) -> Any:
    """The value of a method's option: read as TOML, and as text where it is none.

    Example:
        >>> value_of("0.5"), value_of("true"), value_of("layer2")
        (0.5, True, 'layer2')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number of thousands of digits
        return text.strip()


def check_place(to: Path, option: str = "--to") -> None:
    """Refuse a file in a folder that does not exist: most often it is a typing mistake.

    Raises:
        OptionError: There is no such folder.

    Example:
        >>> check_place(Path("results.sqlite"))
    """
    folder = to.expanduser().absolute().parent
    if not folder.is_dir():
        raise OptionError(f"{option} names a file in a folder that exists; there is no {folder}.")
    if to.is_dir():
        raise OptionError(f"{option} names a file; {to} is a folder.")
