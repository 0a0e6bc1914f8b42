"""Read small text files from anywhere, with bounds on size, depth and numbers."""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ttapca._checks import ErrorType, shown

LARGEST = 1_000_000  # bytes of a JSON file that a person could have written
LARGEST_TOML = 30_000  # a key of n parts takes tomllib n^2 time
DEEPEST = 32  # lists and tables inside each other
LONGEST_NUMBER = 20  # digits of a whole number; 2^63 has 19


def read_bounded(path: Path, error: ErrorType, largest: int = LARGEST) -> bytes:
    """Return the content of a file that must be small, or raise the error that `error` makes."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        # Python reserves as many bytes as it is asked to read.
        most = min(largest, found.st_size) if stat.S_ISREG(found.st_mode) else largest
        content = file.read(most + 1)
    if len(content) > largest:
        raise error(f"{path} must have at most {largest:,} bytes; it is larger, and not read.")
    return content


def check_plain(path: Path, error: ErrorType) -> None:
    """Raise the error that `error` makes if a path is there and no plain file: a pipe, say."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path} must be a plain file; it is a folder, a pipe or a device.")


def parse_json(
    text: bytes | str, where: str, error: ErrorType, *, largest: int = LARGEST, finite: bool = True
) -> Any:
    """Parse JSON with bounds on size, depth and numbers; `where` names the file in an error."""
    number = _finite if finite else float
    load = partial(
        json.loads,
        object_pairs_hook=_each_name_once,
        parse_int=_whole,
        parse_float=number,
        parse_constant=number,
    )
    return _parsed(text, load, largest, f"{where} is not JSON as we read it", error)


def parse_toml(text: bytes | str, where: str, error: ErrorType) -> dict[str, Any]:
    """Parse TOML with bounds on size and depth; the arguments are those of `parse_json`."""
    what = f"{where} is not readable TOML"
    content: dict[str, Any] = _parsed(text, tomllib.loads, LARGEST_TOML, what, error)
    return content


def _parsed(
    text: bytes | str, load: Callable[[str], Any], largest: int, what: str, error: ErrorType
) -> Any:
    try:
        if len(text) > largest:
            raise ValueError(f"it has more than {largest:,} characters")
        content = load(text.decode() if isinstance(text, bytes) else text)
        _check_depth(content)
    except RecursionError as fault:
        raise error(f"{what}: it is nested too deep.") from fault
    except ValueError as fault:
        raise error(f"{what}: {fault}.") from fault
    return content


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"the name `{shown(twice)[1:-1]}` occurs twice")
    return content


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"a whole number has {len(text):,} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it holds a number that is not finite ({text[:LONGEST_NUMBER]})")
    return number


def _check_depth(content: object) -> None:
    level = [content]
    for _ in range(DEEPEST):
        tables = (list(each.values()) if isinstance(each, dict) else each for each in level)
        level = [child for each in tables if isinstance(each, list) for child in each]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def finite(value: Any) -> Any:
    """Return a value with null in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
