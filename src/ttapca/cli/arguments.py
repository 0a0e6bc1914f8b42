"""Options that several commands share, how their values are read, and how Tab completes them.

A person waits for each Tab, so nothing here imports torch, and OpenCV is imported for corruptions
only. If a value may also be a path and no name fits, the shell offers files.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Argument, Option

from ttapca import benchmark, datasets, networks
from ttapca.cli.console import ConsoleReporter
from ttapca.engines import Engine, engine_of
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

MOST_NUMBERS = 10_000
# One number, or the ends of a range. Python refuses to read numbers of thousands of digits.
WHOLE_NUMBERS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
SIDE = re.compile(r"0*[1-9]\d{0,8}", re.ASCII)  # of an image, or its channels


def completes_list(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last name of a list such as `tent,bn`."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name not in before.split(",")]

    return complete


def method_names() -> list[str]:
    """Return the names of all methods, read from their files: to import them takes torch."""
    sources = files("ttapca").joinpath("methods").iterdir()
    texts = [each.read_text("utf-8") for each in sources if each.name.endswith(".py")]
    return [name for text in texts for name in re.findall(r'@register\(\s*"([^"]+)"', text)]


def network_names() -> list[str]:
    """Return the names of networks that come with the package, and of the one of the demo."""
    weights = files("ttapca").joinpath("networks", "weights").iterdir()
    names = (each.name for each in weights)
    return sorted({datasets.DIGITS, *(name[:-5] for name in names if name.endswith(".json"))})


def data_sets() -> tuple[str, ...]:
    """Return the names of data sets that can be read."""
    return (datasets.DIGITS, datasets.CIFAR10_500, *datasets.DATA_SETS)


def corruption_names() -> Iterable[str]:
    """Return the names of all corruptions; none if the extra that makes them is not installed."""
    try:
        from ttapca.corruptions import CORRUPTIONS
    except ImportError:
        return ()
    return CORRUPTIONS


COMPLETE_METHODS = completes_list(method_names)
COMPLETE_CORRUPTIONS = completes_list(
    lambda: ("standard", "extra", "all", "clean", *corruption_names())
)

MODEL_NAME = {"metavar": "MODEL", "autocompletion": network_names}
COMPLETED_DATA = {"metavar": "DATA", "autocompletion": data_sets}

DataArgument = Annotated[str, Argument(**COMPLETED_DATA)]
DataOption = Annotated[str | None, Option(**COMPLETED_DATA)]
DataFolder = Annotated[Path | None, Option("--in", metavar="DIR")]
ImageSize = Annotated[int | None, Option("--size", min=1)]
ShorterSide = Annotated[int | None, Option(min=1)]
LimitOption = Annotated[int | None, Option("--limit", min=1)]
Jobs = Annotated[int | None, Option(min=1)]
EngineOption = Annotated[str | None, Option("--engine", metavar="ENGINE")]
ResultsFile = Annotated[Path, Option(metavar="FILE")]
RetryFailed = Annotated[bool, Option("--retry-failed")]
AsJson = Annotated[bool, Option("--json")]
InputShape = Annotated[str | None, Option("--input", metavar="CxHxW")]
Settings = Annotated[str | None, Option()]
MethodList = Annotated[str | None, Option(autocompletion=COMPLETE_METHODS)]
BatchSizes = Annotated[str | None, Option()]
Components = Annotated[str | None, Option()]
LayerOption = Annotated[str | None, Option(metavar="NAME")]
RouteOption = Annotated[str | None, Option(metavar="NAME")]
OutputsOption = Annotated[str | None, Option("--outputs", metavar="KIND")]
TableOption = Annotated[str | None, Option(metavar="NAME")]
FilterOption = Annotated[Path | None, Option(metavar="DIR", exists=True, file_okay=False)]


@dataclass(kw_only=True)
class ModelOptions:
    """Options that name a network."""

    model: Annotated[str | None, Argument(**MODEL_NAME)] = None
    model_option: Annotated[str | None, Option("--model", **MODEL_NAME)] = None
    weights: Annotated[Path | None, Option(metavar="FILE", exists=True, dir_okay=False)] = None
    architecture: Annotated[str | None, Option(metavar="NAME")] = None

    def source(self, default: str | None = None) -> benchmark.NetworkSource:
        """Return the named network, or else the default; its module may be in this directory."""
        name = self.model or self.model_option or default
        both = self.model is not None and self.model_option is not None
        if both or name is None:
            found = "both" if both else "neither"
            raise OptionError(f"Name one network, as MODEL or with --model; found {found}.")
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        return benchmark.NetworkSource(name, self.weights, self.architecture)


@dataclass(kw_only=True)
class NetworkOptions(ModelOptions):
    """Options that name a network and the normalisation of the images that it takes."""

    normalise: Annotated[str | None, Option(metavar="NAME")] = None
    mean: Annotated[str | None, Option(metavar="M[,M,M]")] = None
    std: Annotated[str | None, Option(metavar="S[,S,S]")] = None
    eps: Annotated[float | None, Option(metavar="NUMBER")] = None
    any_size: Annotated[bool, Option("--any-size")] = False

    def source(self, default: str | None = None) -> benchmark.NetworkSource:
        """Return the named network, or else the default, with all that is said about it."""
        return dataclasses.replace(
            super().source(default),
            normalisation=self._normalisation(),
            eps=self.eps,
            any_size=self.any_size,
        )

    def _normalisation(self) -> str | networks.Normalisation | None:
        if self.mean is None and self.std is None:
            return self.normalise
        if self.normalise is not None or self.mean is None or self.std is None:
            raise OptionError("Give --normalise NAME, or both --mean and --std.")
        numbers = []
        for option, text in (("--mean", self.mean), ("--std", self.std)):
            try:
                numbers.append(tuple(float(part) for part in text.split(",")))
            except ValueError:
                raise OptionError(
                    f"{option} takes numbers with commas, such as 0.49,0.48,0.45; found `{text}`."
                ) from None
        return networks.Normalisation(*numbers)


@dataclass(kw_only=True)
class ImageOptions:
    """Options that say which images are read, and in which order."""

    data: Annotated[str, Option(**COMPLETED_DATA)]
    folder: DataFolder = None
    size: ImageSize = None
    shorter_side: ShorterSide = None
    limit: LimitOption = None
    order: str = "auto"
    seed: Annotated[int, Option(min=0)] = 0

    def read(
        self, split: datasets.Split, **options: Any
    ) -> tuple[datasets.Images, datasets.Choice]:
        """Return the images of a split, and the choice of them that was asked for."""
        sizes = {"size": self.size, "shorter_side": self.shorter_side}
        images = read_images(self.data, split, self.folder, **sizes, **options)
        order = cast(datasets.Order, self.order)
        return images, datasets.choose(images.labels, self.limit, order=order, seed=self.seed)

    def shards(self) -> datasets.Shards:
        """Return the shards that DATA names, all of their images in stored order."""
        given = {
            "--in": self.folder is not None,
            "--limit": self.limit is not None,
            "--order": self.order not in ("auto", "stored"),
            "--seed": self.seed != 0,
        }
        refuse(
            given,
            "is for data that are read as a whole; shards are read in stored order, all of them. "
            f"Leave it out, or name fewer shards than `{self.data}`.",
        )
        with ConsoleReporter() as reporter:
            reporter.advance(f"counting the images of {self.data}", 0, None)
            return datasets.open_shards(self.data, size=self.size, shorter_side=self.shorter_side)


def cache_root() -> Path:
    """Return the folder for data sets; an empty variable counts as unset."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TTAPCA_HOME") or f"{shared}/ttapca"
    return Path(home).expanduser().absolute()


def read_images(
    data: str, split: datasets.Split, folder: Path | None, **options: Any
) -> datasets.Images:
    """Return labelled images by path, or by name from the cache or the given folder."""
    with ConsoleReporter() as reporter:
        reporter.advance(f"reading {data}", 0, None)
        return datasets.load(data, split, root=folder or cache_root(), **options)


def engine(jobs: int | None, words: str | None) -> Engine:
    """Return the engine that two options name; without them, this process."""
    if jobs is not None and words is not None:
        raise OptionError(
            "Give --jobs N, for processes of this machine, or --engine ENGINE; found both."
        )
    return engine_of(f"joblib:{jobs}" if jobs is not None and jobs > 1 else words)


def input_shape(words: str | None, network: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of an image from words such as `3x32x32`, or else that of the network."""
    if words is None:
        return network.input_shape if isinstance(network, networks.ImageNetwork) else None
    parts = words.lower().split("x")
    if not all(map(SIDE.fullmatch, parts)):
        raise OptionError(f"--input takes a shape such as 3x32x32; found `{words}`.")
    return tuple(int(part) for part in parts)


def separated(text: str | None) -> tuple[str, ...] | None:
    """Return the words of a list with commas; None if the option is not given."""
    if text is None:
        return None
    return tuple(word.strip() for word in text.split(",") if word.strip())


def whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the whole numbers and ranges of a list; None if the option is not given."""
    if text is None:
        return None
    found: list[int] = []
    for word in separated(text) or ():
        ends = WHOLE_NUMBERS.fullmatch(word)
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not numbers:  # also a range from a higher number to a lower one
            raise OptionError(f"{option} takes whole numbers, such as 1,3 or 0-2; found `{text}`.")
        if len(found) + len(numbers) > MOST_NUMBERS:
            raise OptionError(f"{option} takes at most {MOST_NUMBERS:,} numbers; found `{text}`.")
        found.extend(numbers)
    return tuple(found)


def value_of(text: str) -> Any:
    """Return the value of a method's option: read as TOML if it is TOML, else the text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number of thousands of digits
        return text.strip()


def method_options(words: Iterable[str] | None, form: str) -> dict[str, str]:
    """Return the texts of NAME=VALUE by name; a name that is given twice is refused."""
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, text = (part.strip() for part in word.partition("="))
        if not (name and equals):
            raise OptionError(f"--option takes {form}; found `{word}`.")
        if name in found:
            raise OptionError(
                f"`{name}` is given twice; the first of the two would be lost. Leave one out."
            )
        found[name] = text
    return found


def refuse(given: Mapping[str, bool], reason: str) -> None:
    """Refuse the first of these options that is given."""
    for option, is_given in given.items():
        if is_given:
            raise OptionError(f"{option} {reason}")


def check_place(to: Path, option: str = "--to") -> None:
    """Refuse a file in a folder that does not exist: most often it is a typing mistake."""
    folder = to.absolute().parent
    if not folder.is_dir():
        raise OptionError(f"{option} names a file in a folder that exists; there is no {folder}.")
    if to.is_dir():
        raise OptionError(f"{option} names a file; {to} is a folder.")
