"""Rules for values: what an option may be, and what may stand in a file.

Rules are plain objects that nest as the values do:

    Record({"layer": Text(), "shape": ListOf(Whole(1, 4096), 1, 8)}, {"note": Text()})

`check_option` compares an option with a rule, `conform` the content of a file; whoever reads
the file says which error it raises. The message names the option or the field, the rule, and what
was found.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ttapca.errors import OptionError, TtapcaError, did_you_mean

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


def check_option(name: str, value: object, rule: Rule) -> None:
    """Compare an option with a rule.

    Args:
        name: Of the option.
        value: What the caller gave.
        rule: What it must be.

    Raises:
        OptionError: It is something else.

    Example:
        >>> check_option("steps", 0, Whole(1))
        Traceback (most recent call last):
        ttapca.errors.OptionError: `steps` must be a whole number from 1 on; found 0.
    """
    try:
        rule.check(value, name)
    except Broken as broken:
        raise OptionError(
            f"`{broken.at}` must be {broken.rule}; found {broken.found}.{broken.hint}"
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
    """A finite number from `low` to `high`; `above` and `below` leave the ends out.

    Example:
        >>> check_option("lr", 0.0, Number(above=0))
        Traceback (most recent call last):
        ttapca.errors.OptionError: `lr` must be a finite number above 0; found 0.0.
    """

    low: float = -NUMBER_LIMIT
    high: float = NUMBER_LIMIT
    above: float | None = None
    below: float | None = None

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not self._holds(value):  # type: ignore[arg-type]
            raise Broken(at, f"a finite number{self._words()}", shown(value))

    def _holds(self, value: float) -> bool:
        inside = self.low <= value <= self.high
        return (
            inside
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _words(self) -> str:
        parts = []
        if self.above is not None:
            parts.append(f"above {self.above:g}")
        elif self.low > -NUMBER_LIMIT:
            parts.append(f"from {self.low:g}")
        if self.below is not None:
            parts.append(f"below {self.below:g}")
        elif self.high < NUMBER_LIMIT:
            parts.append(f"{'to' if parts else 'up to'} {self.high:g}")
        elif parts and self.above is None:
            parts.append("on")
        return "".join(f" {part}" for part in parts)


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
    """What one of several rules says; `words`, after "must be", says it shorter than all of them.

    Example:
        >>> check_option("n_components", "many", Either((Whole(1), Number(0, below=1))))
        Traceback (most recent call last):
        ttapca.errors.OptionError: `n_components` must be a whole number from 1 on, or a finite \
number from 0 below 1; found 'many'.
    """

    rules: Sequence[Rule]
    words: str = ""

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        broken = []
        for rule in self.rules:
            try:
                rule.check(value, at)
            except Broken as error:
                broken.append(error.rule)
            else:
                return
        raise Broken(at, self.words or ", or ".join(broken), shown(value))


@dataclass(frozen=True)
class InstanceOf:
    """An object of a class."""

    kind: type

    def check(self, value: object, at: str) -> None:
        """See `Rule`."""
        if not isinstance(value, self.kind):
            raise Broken(at, f"a {self.kind.__name__}", shown(value))


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
