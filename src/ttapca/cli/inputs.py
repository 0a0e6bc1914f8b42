"""What the commands about networks take alike: a network, images, and how they are named."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttapca.cli.home import cache_root
from ttapca.cli.reporting import StepReporter, warn
from ttapca.datasets import DIGITS, load
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from ttapca.datasets import Images, Split
    from ttapca.networks import EpochRecord, Normalisation

# The network that is meant where the digits themselves are named as one.
DIGITS_NETWORK = "digits-small-cnn"

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
    int | None, typer.Option("--size", min=1, help="For folders of pictures: resize to this side.")
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit", min=1, help="Use so many images only, as many of each class (default: all)."
    ),
]
OrderOption = Annotated[
    str,
    typer.Option(
        "--order",
        help="auto: shuffled where they lie class by class; or shuffled, sorted, stored.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the choice and the shuffle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A packaged network, a file of weights, or package.module:factory.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODULE:FACTORY", help="The same as MODEL, by option."),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Weights for a network of your own.",
    ),
]
FilterOption = Annotated[
    Path | None,
    typer.Option(
        "--filter", metavar="DIR", exists=True, file_okay=False, help="What `ttapca fit` saved."
    ),
]
ArchitectureOption = Annotated[
    str | None,
    typer.Option("--architecture", metavar="NAME", help="Of the file; else found out from it."),
]
NormalisationOption = Annotated[
    str | None,
    typer.Option(
        "--normalise",
        metavar="NAME",
        help="What the network of a foreign file expects: none, half, cifar10 or cifar100.",
    ),
]
MeanOption = Annotated[
    str | None, typer.Option("--mean", metavar="M[,M,M]", help="The same by numbers.")
]
StdOption = Annotated[str | None, typer.Option("--std", metavar="S[,S,S]", help="Beside --mean.")]


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """Which network the user means: the words of the command line, not yet looked at."""

    argument: str | None
    option: str | None = None
    weights: Path | None = None
    architecture: str | None = None
    normalise: str | None = None
    mean: str | None = None
    std: str | None = None

    @property
    def name(self) -> str:
        """The one name given."""
        if (self.argument is None) == (self.option is None):
            found = "neither" if self.argument is None else "both"
            raise OptionError(f"Name one network, as MODEL or with --model; found {found}.")
        return str(self.argument or self.option)

    def load(self, *, assumed: str | None = None, doubt: bool = True) -> nn.Module:
        """Load the network, in evaluation mode.

        Args:
            assumed: The normalisation where neither the user nor the file says one.
            doubt: Whether to say so where the weights may be untrained.
        """
        network = self._loaded(assumed)
        if doubt:
            self._doubt(network)
        return network

    def _doubt(self, network: nn.Module) -> None:
        """Warn of weights that nobody gave, and of those that look as if nobody trained them."""
        from ttapca.networks.factories import is_factory
        from ttapca.networks.network import looks_untrained

        if looks_untrained(network):
            warn(
                f"the weights of `{self.name}` look UNTRAINED: the statistics of its BatchNorm "
                "layers are those of a new network. All numbers will be those of random weights. "
                "Give trained ones with --weights FILE."
            )
        elif is_factory(self.name) and self.weights is None:
            warn(
                f"no --weights were given, so `{self.name}` has those that the factory gives it. "
                "If it does not load any, they are UNTRAINED, and all numbers those of random "
                "weights."
            )

    def _loaded(self, assumed: str | None) -> nn.Module:
        from ttapca import networks
        from ttapca.networks.factories import is_factory

        if is_factory(self.name):
            self._refuse("architecture", "normalise", "mean", "std")
            network = users_factory(self.name)
            return networks.load_weights(network, self.weights) if self.weights else network.eval()
        self._refuse("weights")
        stated = self.normalisation() or assumed
        name = DIGITS_NETWORK if self.name == DIGITS else self.name
        return networks.load(name, self.architecture, normalisation=stated)

    def normalisation(self) -> str | Normalisation | None:
        """What was said about it, if anything."""
        from ttapca.networks import Normalisation

        if self.mean is None and self.std is None:
            return self.normalise
        if self.normalise is not None or self.mean is None or self.std is None:
            raise OptionError("Give --normalise NAME, or both --mean and --std.")
        return Normalisation(_numbers("--mean", self.mean), _numbers("--std", self.std))

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise OptionError(f"--{name} has no meaning for `{self.name}`.")


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise OptionError(
            f"{option} takes numbers with commas, such as 0.49,0.48,0.45; found `{text}`."
        ) from None


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
    with StepReporter(f"reading {data}"):
        return load(data, split, root=root, corruption=corruption, severity=severity, size=size)


def users_factory(name: str) -> nn.Module:
    """Call `package.module:factory`; modules in the current directory can be named."""
    from ttapca.networks.factories import make

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
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(record: EpochRecord) -> None:
            for name, value in dataclasses.asdict(record).items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, record.epoch)

        yield write


def separated(text: str | None) -> tuple[str, ...] | None:
    """The words of an option that takes several, with commas between; None where it is not given.

    Example:
        >>> separated("bn, tent")
        ('bn', 'tent')
    """
    if text is None:
        return None
    return tuple(word.strip() for word in text.split(",") if word.strip())


def value_of(text: str) -> Any:
    """The value of an option of a method: as in TOML, and what is none is text.

    Example:
        >>> value_of("0.5"), value_of("true"), value_of("layer2")
        (0.5, True, 'layer2')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number of thousands of digits
        return text.strip()


def check_place(to: Path, option: str = "--to") -> None:
    """Refuse a file in a folder that does not exist: it is a slip of the keyboard, as a rule.

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
