"""Commands that reproduce results, put together: one for many cells where that says the same."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

LISTS = (
    "--corruptions",
    "--methods",
    "--settings",
    "--seeds",
    "--batch-sizes",
    "--components",
    "--steps",
    "--severities",
)
"""Options of `ttapca bench` that take several values with commas between."""

SHARED = ("continual", "mixed")
"""Settings in which corruptions share their adaptation: another list of them is another run."""


def condensed(commands: Iterable[str]) -> list[str]:
    """Put commands together that differ in one list only, again and again.

    `A x {b}` and `A x {c}` together are `A x {b, c}`: no cell is lost and none is added.

    Args:
        commands: One a cell.

    Returns:
        As few as this gives, in the order in which they first appear.

    Example:
        >>> condensed(["ttapca bench m --seeds 0", "ttapca bench m --seeds 1"])
        ['ttapca bench m --seeds 0,1']
    """
    found = [_words(command) for command in dict.fromkeys(commands)]
    for option in LISTS:
        found = _joined(found, option)
    return [shlex.join(words) if len(words) > 1 else words[0] for words in found]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command) or [command]
    except ValueError:  # quotes that do not close: not one of ours, so it stays as it is
        return [command]


def _joined(commands: Iterable[list[str]], option: str) -> list[list[str]]:
    values: dict[tuple[str, ...], dict[str, None]] = {}
    for words in commands:
        at = _value_of(words, option)
        rest = tuple(words) if at is None else (*words[:at], "", *words[at + 1 :])
        values.setdefault(rest, {}).update({} if at is None else {words[at]: None})
    return [_filled(rest, option, list(given)) for rest, given in values.items()]


def _value_of(words: list[str], option: str) -> int | None:
    """Where the value stands that may be joined with others, if there is one."""
    if option == "--corruptions" and any(each in SHARED for each in words):
        return None
    at = words.index(option) + 1 if option in words else len(words)
    return at if at < len(words) else None


def _filled(rest: tuple[str, ...], option: str, given: list[str]) -> list[str]:
    words = list(rest)
    if given:
        words[words.index(option) + 1] = ",".join(given)
    return words
