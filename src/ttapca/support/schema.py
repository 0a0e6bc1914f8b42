"""What may stand in a file: one declarative form for every description, config, manifest and plan.

A file comes from anywhere. It is read in three steps before anything is built from it: its size is
looked at, its text is parsed within bounds, and every value is compared with a rule. Rules are
plain objects that nest as the file does:

    Record({"layer": Text(), "shape": ListOf(Whole(1, 4096), 1, 8)}, {"note": Text()})

Whoever reads a file says which error it raises; the message names the file, the field by its path,
the rule, and what was found.
"""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ttapca.errors import TtapcaError, did_you_mean

LARGEST = 1_000_000  # bytes of a JSON file that a person could have written
LARGEST_TOML = 30_000  # a key of n parts takes tomllib n^2 time
DEEPEST = 32  # lists and tables inside each other
LONGEST_NUMBER = 20  # digits of a whole number; 2^63 has 19
WHOLE_LIMIT = 2**63 - 1
NUMBER_LIMIT = 1e300

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60

ErrorType = Callable[[str], TtapcaError]


class Broken(Exception):  # noqa: N818 - a signal inside this module and its rules
    """A value breaks a rule; `conform` turns this into the reader's own error.

    Args:
        at: The path of the field, such as `source.shape[2]`; empty for the whole.
        rule: What it must be.
        found: What it is, in words.
        hint: A sentence that starts with a space, or nothing.
    """

    def __init__(self, at: str, rule: str, found: str, hint: str = "") -> None:
        super().__init__(at, rule, found)
        self.at, self.rule, self.found, self.hint = at, rule, found, hint


class Rule(Protocol):
    """Anything that can check a value."""

    def check(self, value: object, at: str) -> None:
        """Raise `Broken` unless the value is as it must be."""


def conform(value: object, rule: Rule, where: str, error: ErrorType, at: str = "") -> None:
    """Compare a value with a rule.

    Args:
        value: Anything, as a parser gave it.
        rule: What it must be.
        where: The file, as the message shall name it.
        error: Makes the error that is raised.
        at: The path of the field, where the value is not the whole content.

    Raises:
        TtapcaError: The one that `error` makes.

    Example:
        >>> from ttapca.errors import DataFormatError
        >>> rule = Record({"sides": ListOf(Whole(1))})
        >>> conform({"sides": [3, 0]}, rule, "a.json", DataFormatError)
        Traceback (most recent call last):
        ttapca.errors.DataFormatError: a.json: `sides[1]` must be a whole number from 1 on; found 0.
    """
    try:
        rule.check(value, at)
    except Broken as broken:
        what = f"`{broken.at}`" if broken.at else "the content"
        raise error(
            f"{where}: {what} must be {broken.rule}; found {broken.found}.{broken.hint}"
        ) from None


def shown(value: object) -> str:
    """A value for a message: short, whatever it is.

    Example:
        >>> shown([[[[1]]]])
        '[[[...]]]'
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`; true and false are none."""

    low: int = 0
    high: int = WHOLE_LIMIT

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not self.low <= value <= self.high:  # type: ignore[operator]
            end = " on" if self.high == WHOLE_LIMIT else f" to {self.high:,}"
            raise Broken(at, f"a whole number from {self.low:,}{end}", shown(value))


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`."""

    low: float = -NUMBER_LIMIT
    high: float = NUMBER_LIMIT

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self.low <= value <= self.high:  # type: ignore[operator]
            bounds = (self.low > -NUMBER_LIMIT, self.high < NUMBER_LIMIT)
            words = {
                (False, False): "",
                (True, False): f" from {self.low:g} on",
                (False, True): f" up to {self.high:g}",
                (True, True): f" from {self.low:g} to {self.high:g}",
            }
            raise Broken(at, f"a finite number{words[bounds]}", shown(value))


@dataclass(frozen=True)
class Measured:
    """Any number, NaN and infinity as well: what a method that diverged leaves."""

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Broken(at, "a number", shown(value))


@dataclass(frozen=True)
class Text:
    """Text of at most so many characters, all of which UTF-8 can write."""

    longest: int = 1000

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, str):
            raise Broken(at, "text", shown(value))
        if len(value) > self.longest:
            raise Broken(at, f"text of at most {self.longest:,} characters", f"{len(value):,}")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Broken(at, "text that UTF-8 can write", shown(value))


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, bool):
            raise Broken(at, "true or false", shown(value))


@dataclass(frozen=True)
class Blob:
    """Bytes, at most so many."""

    longest: int

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, bytes) or len(value) > self.longest:
            raise Broken(at, f"at most {self.longest:,} bytes", shown(value))


@dataclass(frozen=True)
class OneOf:
    """One of some words; near ones are offered."""

    choices: Sequence[str]

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, str) or value not in self.choices:
            hint = did_you_mean(value, self.choices)
            raise Broken(at, f"one of {', '.join(self.choices)}", shown(value), hint)


@dataclass(frozen=True)
class Maybe:
    """Nothing, or what another rule says."""

    rule: Rule

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if value is not None:
            self.rule.check(value, at)


@dataclass(frozen=True)
class Either:
    """What one of several rules says; `words` says so, after "must be"."""

    rules: Sequence[Rule]
    words: str

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        for rule in self.rules:
            try:
                rule.check(value, at)
            except Broken:
                continue
            return
        raise Broken(at, self.words, shown(value))


@dataclass(frozen=True)
class ListOf:
    """A list of `shortest` to `longest` entries, each by one rule."""

    rule: Rule
    shortest: int = 0
    longest: int = 1000

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, list | tuple):
            raise Broken(at, "a list", shown(value))
        if not self.shortest <= len(value) <= self.longest:
            size = f"{self.shortest:,} to {self.longest:,}"
            raise Broken(
                at,
                f"a list of {self.longest if self.shortest == self.longest else size} entries",
                f"{len(value):,}",
            )
        for place, entry in enumerate(value):
            self.rule.check(entry, f"{at}[{place}]")


@dataclass(frozen=True)
class Record:
    """Names and values.

    Attributes:
        required: What must be there, by name.
        optional: What may be there.
        others: The rule for values under any other name; without, there are no others.
        most: How many names there may be.
    """

    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    others: Rule | None = None
    most: int = 1000

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, Mapping):
            raise Broken(at, "an object: names with values", shown(value))
        missing = [name for name in self.required if name not in value]
        if missing:
            raise Broken(at, f"an object with `{missing[0]}`", "none of that name")
        if len(value) > self.most:
            raise Broken(at, f"an object of at most {self.most:,} names", f"{len(value):,}")
        for name, entry in value.items():
            Text(200).check(name, f"{at}, a name" if at else "a name")
            self._rule(name, at).check(entry, f"{at}.{name}" if at else name)

    def _rule(self, name: str, at: str) -> Rule:
        known = {**self.required, **self.optional}
        rule = known.get(name, self.others)
        if rule is None:
            only = f"an object with no names but {', '.join(known)}"
            raise Broken(at, only, shown(name), did_you_mean(name, known))
        return rule


@dataclass(frozen=True)
class Such:
    """What another rule says, and one thing more.

    Attributes:
        rule: Checked first.
        holds: Whether the value, which fulfils the rule, is as it must be.
        words: Says so, after "must be".
    """

    rule: Rule
    holds: Callable[[Any], bool]
    words: str

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        self.rule.check(value, at)
        if not self.holds(value):
            raise Broken(at, self.words, shown(value))


@dataclass(frozen=True)
class Plain:
    """Any value that JSON or TOML can hold, of bounded size: for what is not known here."""

    deepest: int = 8

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, int):
            Whole(-WHOLE_LIMIT).check(value, at)
        elif isinstance(value, float):
            Number().check(value, at)
        elif isinstance(value, str):
            Text(100_000).check(value, at)
        elif isinstance(value, list | tuple | Mapping) and self.deepest > 0:
            inner = Plain(self.deepest - 1)
            rule = Record(others=inner) if isinstance(value, Mapping) else ListOf(inner, 0, 100_000)
            rule.check(value, at)
        else:
            raise Broken(at, "a plain value, not nested too deep", shown(value))


def read_bounded(path: Path, error: ErrorType, largest: int = LARGEST) -> bytes:
    """The content of a file that must be small.

    Raises:
        OSError: The operating system refuses.
        TtapcaError: By `error`, the file is larger.

    Example:
        >>> from ttapca.errors import DataFormatError
        >>> read_bounded(Path(__file__), DataFormatError, largest=10)
        Traceback (most recent call last):
        ttapca.errors.DataFormatError: ... must have at most 10 bytes; it is larger...
    """
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise error(f"{path} must have at most {largest:,} bytes; it is larger, and not read.")
    return content


def parse_json(
    text: bytes | str,
    where: str,
    error: ErrorType,
    *,
    largest: int = LARGEST,
    finite: bool = True,
) -> Any:
    """Parse JSON within bounds: of size, of depth, of numbers; no name twice in one object.

    Args:
        text: UTF-8 where it is bytes.
        where: The file, as the message shall name it.
        error: Makes the error that is raised.
        largest: Characters.
        finite: Whether NaN and infinity, which Python writes, are refused.

    Example:
        >>> from ttapca.errors import DataFormatError
        >>> parse_json('{"a": 1, "a": 2}', "a.json", DataFormatError)
        Traceback (most recent call last):
        ttapca.errors.DataFormatError: a.json is not JSON as we read it: the name `a` occurs twice.
    """
    try:
        if len(text) > largest:
            raise ValueError(f"it has more than {largest:,} characters")
        content = json.loads(
            text.decode() if isinstance(text, bytes) else text,
            object_pairs_hook=_each_name_once,
            parse_int=_whole,
            parse_float=_finite if finite else float,
            parse_constant=_finite if finite else float,
        )
        _check_depth(content)
    except (ValueError, RecursionError) as fault:
        raise error(f"{where} is not JSON as we read it: {_reason(fault)}.") from fault
    return content


def parse_toml(text: bytes | str, where: str, error: ErrorType) -> dict[str, Any]:
    """Parse TOML within bounds of size and depth.

    Args:
        text: UTF-8 where it is bytes.
        where: The file, as the message shall name it.
        error: Makes the error that is raised.

    Example:
        >>> from ttapca.errors import DataFormatError
        >>> parse_toml("a = [1, 2]", "a.toml", DataFormatError)
        {'a': [1, 2]}
    """
    try:
        if len(text) > LARGEST_TOML:
            raise ValueError(f"it has more than {LARGEST_TOML:,} characters")
        content = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
        _check_depth(content)
    except (ValueError, RecursionError) as fault:
        raise error(f"{where} is not readable TOML: {_reason(fault)}.") from fault
    return content


def _reason(fault: Exception) -> str:
    return "it is nested too deep" if isinstance(fault, RecursionError) else str(fault)


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
    if not abs(number) < float("inf"):
        raise ValueError(f"it holds a number that is not finite ({text[:LONGEST_NUMBER]})")
    return number


def _check_depth(content: object) -> None:
    level = [content]
    for _ in range(DEEPEST):
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} deep")


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
