"""The names that the shell offers on Tab; typer keeps the names that begin as typed.

`ttapca --install-completion` teaches it to the shell. A person waits for each answer, so nothing
here imports torch, and OpenCV is imported for corruptions only. If a value may also be a path and
no name fits, the shell offers files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib.resources import files

from ttapca.datasets import CIFAR10_500, DATA_SETS, DIGITS, FROST

GROUPS = ("standard", "extra", "all", "clean")


def listed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last name of a list such as `tent,bn`."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name not in before.split(",")]

    return complete


def methods() -> list[str]:
    """Return the names of all methods, read from their files: to import them takes torch."""
    sources = files("ttapca").joinpath("methods").iterdir()
    texts = [each.read_text("utf-8") for each in sources if each.name.endswith(".py")]
    return [name for text in texts for name in re.findall(r'@register\(\s*"([^"]+)"', text)]


def networks() -> list[str]:
    """Return the names of networks that come with the package, and of the one of the demo."""
    weights = files("ttapca").joinpath("networks", "weights").iterdir()
    names = (each.name for each in weights)
    return sorted({DIGITS, *(name[:-5] for name in names if name.endswith(".json"))})


def corruptions() -> Iterable[str]:
    """Return the names of all corruptions; none if the extra that makes them is not installed."""
    try:
        from ttapca.corruptions.catalogue import CORRUPTIONS
    except ImportError:
        return ()
    return CORRUPTIONS


def data_sets() -> tuple[str, ...]:
    """Return the names of data sets that can be read."""
    return (DIGITS, CIFAR10_500, *DATA_SETS)


def to_fetch() -> tuple[str, ...]:
    """Return the names of data that `ttapca data get` can get."""
    return (*DATA_SETS, FROST)


method_list = listed(methods)
corruption_list = listed(lambda: (*GROUPS, *corruptions()))
