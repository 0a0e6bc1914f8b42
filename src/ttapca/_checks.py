"""Rules for the values of options and the contents of files.

Rules nest as the values do: `Record({"shape": ListOf(Whole(1), 1, 8)}, {"note": Text()})`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from ttapca.errors import OptionError, TtapcaError, did_you_mean

WHOLE_LIMIT = 2**63 - 1
NUMBER_LIMIT = 1e300

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60

ErrorType = Callable[[str], TtapcaError]


class Broken(Exception):  # noqa: N818 - a signal inside this module
    """A value at a path, such as `source.shape[2]`, breaks a rule, which follows "must be"."""

    def __init__(self, at: str, rule: str, found: str, hint: str = "") -> None:
        what = f"`{at}`" if at else "the content"
        super().__init__(f"{what} must be {rule}; found {found}.{hint}")
        self.rule = rule


class Rule(Protocol):
    """Its `_check` raises `Broken` unless the value at a path follows the rule."""

    def _check(self, value: object, at: str) -> None: ...


def conform(value: object, rule: Rule, where: str, error: ErrorType, at: str = "") -> None:
    """Raise the reader's error unless a value from a file, or its field `at`, follows a rule."""
    try:
        rule._check(value, at)
    except Broken as broken:
        raise error(f"{where}: {broken}") from None


def check_option(name: str, value: object, rule: Rule) -> None:
    """Raise `OptionError` unless an option follows a rule."""
    try:
        rule._check(value, name)
    except Broken as broken:
        raise OptionError(str(broken)) from None


def shown(value: object) -> str:
    """Return any value for a message, shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`, not True or False."""

    low: int = 0
    high: int = WHOLE_LIMIT

    def _check(self, value: Any, at: str) -> None:
        if not _is_number(value, int) or not self.low <= value <= self.high:
            end = " on" if self.high == WHOLE_LIMIT else f" to {self.high:,}"
            raise Broken(at, f"a whole number from {self.low:,}{end}", shown(value))


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`; `above` and `below` exclude the ends."""

    low: float = -NUMBER_LIMIT
    high: float = NUMBER_LIMIT
    above: float | None = None
    below: float | None = None

    def _check(self, value: Any, at: str) -> None:
        if not _is_number(value) or not (
            self.low <= value <= self.high
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        ):
            raise Broken(at, f"a finite number{self._words()}", shown(value))

    def _words(self) -> str:
        words = ""
        if self.above is not None:
            words = f" above {self.above:g}"
        elif self.low > -NUMBER_LIMIT:
            words = f" from {self.low:g}"
        if self.below is not None:
            return f"{words} below {self.below:g}"
        if self.high < NUMBER_LIMIT:
            return f"{words} {'to' if words else 'up to'} {self.high:g}"
        return f"{words} on" if words and self.above is None else words


@dataclass(frozen=True)
class Text:
    """Text that UTF-8 can encode, with a limited number of characters."""

    longest: int = 1000

    def _check(self, value: object, at: str) -> None:
        if not isinstance(value, str):
            raise Broken(at, "text", shown(value))
        if len(value) > self.longest:
            raise Broken(at, f"text of at most {self.longest:,} characters", f"{len(value):,}")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Broken(at, "text that UTF-8 can write", shown(value))


@dataclass(frozen=True)
class OneOf:
    """One of some words; near ones are offered."""

    choices: Sequence[str]

    def _check(self, value: object, at: str) -> None:
        if not isinstance(value, str) or value not in self.choices:
            hint = did_you_mean(value, self.choices)
            raise Broken(at, f"one of {', '.join(self.choices)}", shown(value), hint)


@dataclass(frozen=True)
class Maybe:
    """None, or a value that follows another rule."""

    rule: Rule

    def _check(self, value: object, at: str) -> None:
        if value is not None:
            self.rule._check(value, at)


@dataclass(frozen=True)
class Either:
    """A value that follows one of several rules; `words` replace all of them in the message."""

    rules: Sequence[Rule]
    words: str = ""

    def _check(self, value: object, at: str) -> None:
        broken = []
        for rule in self.rules:
            try:
                rule._check(value, at)
                return
            except Broken as error:
                broken.append(error.rule)
        raise Broken(at, self.words or ", or ".join(broken), shown(value))


@dataclass(frozen=True)
class Such:
    """A value that follows another rule, if any, and for which `holds` is true; `words` say so."""

    rule: Rule | None
    holds: Callable[[Any], bool]
    words: str

    def _check(self, value: object, at: str) -> None:
        if self.rule is not None:
            self.rule._check(value, at)
        if not self.holds(value):
            raise Broken(at, self.words, shown(value))


FLAG = Such(None, lambda value: isinstance(value, bool), "true or false")
# Also NaN and infinity, which a method that diverged leaves.
MEASURED = Such(None, _is_number, "a number")


def blob(longest: int) -> Rule:
    """Return the rule for a limited number of bytes."""
    words = f"at most {longest:,} bytes"
    return Such(None, lambda value: isinstance(value, bytes) and len(value) <= longest, words)


def instance_of(kind: type) -> Rule:
    """Return the rule for an object of a class."""
    return Such(None, lambda value: isinstance(value, kind), f"a {kind.__name__}")


@dataclass(frozen=True)
class ListOf:
    """A list of `shortest` to `longest` entries that all follow one rule."""

    rule: Rule
    shortest: int = 0
    longest: int = 1000

    def _check(self, value: object, at: str) -> None:
        if not isinstance(value, list | tuple):
            raise Broken(at, "a list", shown(value))
        if not self.shortest <= len(value) <= self.longest:
            exact = self.shortest == self.longest
            size = self.longest if exact else f"{self.shortest:,} to {self.longest:,}"
            raise Broken(at, f"a list of {size} entries", f"{len(value):,}")
        for place, entry in enumerate(value):
            self.rule._check(entry, f"{at}[{place}]")


@dataclass(frozen=True)
class Record:
    """Names and values."""

    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    others: Rule | None = None  # for any other name; without it, there may be no others
    most: int = 1000

    def _check(self, value: object, at: str) -> None:
        if not isinstance(value, Mapping):
            raise Broken(at, "an object: names with values", shown(value))
        missing = [name for name in self.required if name not in value]
        if missing:
            raise Broken(at, f"an object with `{missing[0]}`", "none of that name")
        if len(value) > self.most:
            raise Broken(at, f"an object of at most {self.most:,} names", f"{len(value):,}")
        known = {**self.required, **self.optional}
        for name, entry in value.items():
            Text(200)._check(name, f"{at}, a name" if at else "a name")
            rule = known.get(name, self.others)
            if rule is None:
                only = f"an object with no names but {', '.join(known)}"
                raise Broken(at, only, shown(name), did_you_mean(name, known))
            rule._check(entry, f"{at}.{name}" if at else name)


@dataclass(frozen=True)
class Plain:
    """Any value that JSON or TOML can hold, of limited size: for fields of unknown meaning."""

    deepest: int = 8

    def _check(self, value: object, at: str) -> None:
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, int):
            Whole(-WHOLE_LIMIT)._check(value, at)
        elif isinstance(value, float):
            Number()._check(value, at)
        elif isinstance(value, str):
            Text(100_000)._check(value, at)
        elif isinstance(value, list | tuple | Mapping) and self.deepest > 0:
            inner = Plain(self.deepest - 1)
            rule = Record(others=inner) if isinstance(value, Mapping) else ListOf(inner, 0, 100_000)
            rule._check(value, at)
        else:
            raise Broken(at, "a plain value, not nested too deep", shown(value))


def check_fields(instance: Any) -> None:
    """Raise `OptionError` unless the fields of a dataclass follow the rules of their types."""
    for name, rule in rules_of(type(instance)).items():
        check_option(name, getattr(instance, name), rule)


def rules_of(cls: type[Any]) -> dict[str, Rule]:
    """Return the rule of each field of a dataclass: `Annotated` with it, or that of its type."""
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: _rule(hints[each.name]) for each in fields(cls)}


# Types of options, with the rules for their values.
Positive = Annotated[float, Number(above=0)]
NotNegative = Annotated[float, Number(0)]
Share = Annotated[float, Number(0, 1)]
BelowOne = Annotated[float, Number(0, below=1)]
Count = Annotated[int, Whole(1)]
Seed = Annotated[int, Whole(0)]
_PLAIN: dict[Any, Rule] = {bool: FLAG, int: Whole(), float: Number(), str: Text()}


def _rule(hint: Any) -> Rule:
    origin = get_origin(hint)
    if origin is Annotated:
        rule: Rule = hint.__metadata__[0]
        return rule
    if origin is Literal:
        return OneOf(get_args(hint))
    if origin in (Union, UnionType):
        kinds = [_rule(kind) for kind in get_args(hint) if kind is not NoneType]
        one = kinds[0] if len(kinds) == 1 else Either(kinds)
        return Maybe(one) if NoneType in get_args(hint) else one
    if hint == Sequence[str]:
        return ListOf(Text())
    return _PLAIN.get(hint) or instance_of(origin or hint)
