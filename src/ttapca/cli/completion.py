"""What the shell offers on Tab for values of options: methods, data sets, corruptions, networks.

`ttapca --install-completion` teaches it to the shell. A person waits for each answer, so nothing
here imports torch, and OpenCV is imported for corruptions only. Where a value may also be a path
and no name fits, the shell offers files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.resources import files

from ttapca.datasets.catalog import DATA_SETS
from ttapca.datasets.layouts import CIFAR10_500, DIGITS
from ttapca.datasets.sources import FROST

GROUPS = ("standard", "extra", "all", "clean")

Complete = Callable[[str], list[str]]


def one_of(names: Callable[[], Iterable[str]]) -> Complete:
    """Return a function that completes one name.

    Example:
        >>> one_of(lambda: ("bn", "tent"))("t")
        ['tent']
    """

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def some_of(names: Callable[[], Iterable[str]]) -> Complete:
    """Return a function that completes the last name of a list with commas.

    Example:
        >>> some_of(lambda: ("bn", "tent"))("tent,b")
        ['tent,bn']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        taken = before.split(",")
        free = (name for name in names() if name not in taken)
        return [f"{before}{comma}{name}" for name in free if name.startswith(last)]

    return complete


def method_names() -> list[str]:
    """Return the names of all methods, read from their files: to import them takes torch.

    Example:
        >>> "tent" in method_names()
        True
    """
    sources = (
        each.read_text("utf-8")
        for each in files("ttapca").joinpath("methods").iterdir()
        if each.name.endswith(".py")
    )
    return [name for source in sources for name in re.findall(r'@register\(\s*"([^"]+)"', source)]


def packaged_networks() -> list[str]:
    """Return the names of networks that come with the package, and of the one of the demo.

    Example:
        >>> "cifar10-resnet20" in packaged_networks()
        True
    """
    weights = files("ttapca").joinpath("networks", "weights")
    names = (entry.name for entry in weights.iterdir())
    return sorted({DIGITS, *(name[:-5] for name in names if name.endswith(".json"))})


def corruption_names() -> Iterable[str]:
    """Return the names of all corruptions; none where the extra that makes them is not installed.

    Example:
        >>> "fog" in corruption_names()
        True
    """
    try:
        from ttapca.corruptions.catalogue import CORRUPTIONS
    except ImportError:
        return ()
    return CORRUPTIONS


method = one_of(method_names)
methods = some_of(method_names)
data_set = one_of(lambda: (DIGITS, CIFAR10_500, *DATA_SETS))
to_fetch = one_of(lambda: (*DATA_SETS, FROST))
corruption = one_of(corruption_names)
corruptions = some_of(lambda: (*GROUPS, *corruption_names()))
network = one_of(packaged_networks)
