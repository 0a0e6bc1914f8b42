"""The commands that measure results again: one for each run, and one for many put together."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttapca.benchmark.plan import Unit

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


def bench_command(
    model: str, unit: Unit, given: Mapping[str, object], options: Mapping[str, Any], to: Path
) -> list[str]:
    """The words of the command that runs one unit again.

    Args:
        model: The network's name.
        unit: What was run.
        given: Options of the command that the unit itself does not tell; None for those not given.
        options: Those of the method.
        to: The file of results.
    """
    cell = unit.cells[0]
    words = {
        "--data": given.get("--data"),
        "--methods": cell.method,
        "--corruptions": ",".join(dict.fromkeys(name for name, _ in unit.conditions)),
        "--severities": max(cell.severity for cell in unit.cells) or None,
        "--settings": cell.setting,
        "--batch-sizes": cell.batch_size,
        "--seeds": cell.seed,
        "--steps": cell.steps or None,
        "--lr": cell.lr or None,
        "--components": cell.components or None,
        "--layer": cell.layer or None if given.get("--filter") is None else None,
        "--images": cell.images,
        **given,
    }
    found = [str(part) for pair in words.items() if pair[1] is not None for part in pair]
    for name, value in options.items():
        if name not in ("steps", "lr"):
            found += ["--option", f"{cell.method}.{name}={_toml(value)}"]
    return ["ttapca", "bench", model, *found, "--to", str(to)]


def condensed(commands: Iterable[str]) -> list[str]:
    """Put commands together that differ in one list only, as often as that is possible.

    `--methods a --seeds 0` and `--methods a --seeds 1` are `--methods a --seeds 0,1`: no result is
    lost and none is added.

    Returns:
        As few commands as this gives, in the order in which they first appear.

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
    """Join the values of one option where all other words are the same."""
    values: dict[tuple[str, ...], dict[str, None]] = {}
    for words in commands:
        shared = option == "--corruptions" and any(word in SHARED for word in words)
        at = words.index(option) + 1 if option in words and not shared else len(words)
        rest = (*words[:at], "", *words[at + 1 :]) if at < len(words) else tuple(words)
        values.setdefault(rest, {}).update(dict.fromkeys(words[at : at + 1]))
    return [_filled(rest, option, list(given)) for rest, given in values.items()]


def _filled(rest: tuple[str, ...], option: str, given: list[str]) -> list[str]:
    words = list(rest)
    if given:
        words[words.index(option) + 1] = ",".join(given)
    return words


def _toml(value: object) -> str:
    """A value as `--option` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
