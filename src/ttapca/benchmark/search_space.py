"""`SearchSpace`: which values of a method's options a search may try."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ttapca.benchmark.plan import check_method_options
from ttapca.errors import OptionError
from ttapca.methods.method import registration

Options = dict[str, Any]  # of a method, by name

MOST_COMBINATIONS = 10_000
DIGITS = 4  # of a number that was drawn: more would say nothing, and nobody could read it
MOST_DRAWS = 100  # for each trial, until all of them differ
NOT_PLAIN = ("filter", "source", "head", "split", "seed")  # objects, or what the plan says


@dataclass(frozen=True)
class Choices:
    """Some values.

    Example:
        >>> Choices((1, 2, 4)).grid("steps")
        (1, 2, 4)
    """

    values: tuple[Any, ...]

    @property
    def count(self) -> int | None:
        """How many values there are."""
        return len(self.values)

    def grid(self, name: str) -> tuple[Any, ...]:
        """Return all values."""
        del name
        return self.values

    def draw(self, random: np.random.Generator) -> Any:
        """Return one of the values, each equally likely."""
        return self.values[int(random.integers(len(self.values)))]


@dataclass(frozen=True)
class Range:
    """All numbers from one to another.

    Attributes:
        low: The lowest.
        high: The highest.
        log: Whether numbers are spaced evenly by their logarithm.
        points: How many of them a grid has; None if it is not for a grid. Whole numbers that are
            not spaced by their logarithm need none.
        whole: Whether only whole numbers are meant; `SearchSpace` sets it by the method's rule.

    Example:
        >>> Range(0.001, 0.1, log=True, points=3).grid("lr")
        (0.001, 0.01, 0.1)
        >>> Range(1, 4, whole=True).grid("steps")
        (1, 2, 3, 4)
    """

    low: float
    high: float
    log: bool = False
    points: int | None = None
    whole: bool = False

    @property
    def count(self) -> int | None:
        """How many numbers there are; None if they cannot be counted."""
        return int(self.high - self.low) + 1 if self.whole else None

    def grid(self, name: str) -> tuple[Any, ...]:
        """Return numbers from one end to the other.

        Raises:
            OptionError: It is not known how many.
        """
        points = self.points
        if points is None and self.whole and not self.log:
            points = self.count
        if points is None:
            log = ":log" if self.log else ""
            raise OptionError(
                f"A grid needs the values of `{name}`; found a range. Say how many points it has, "
                f"such as {name}={self.low:g}..{self.high:g}{log}:5, or take the sampler tpe."
            )
        shares = np.linspace(0, 1, points) if points > 1 else np.zeros(1)
        return tuple(dict.fromkeys(self.at(float(share)) for share in shares))

    def draw(self, random: np.random.Generator) -> float:
        """Return one of the numbers."""
        return self.at(float(random.random()))

    def at(self, share: float) -> float:
        """Return the number that is this share of the way from one end to the other."""
        if self.log:
            return self.rounded(self.low * (self.high / self.low) ** share)
        return self.rounded(self.low + (self.high - self.low) * share)

    def rounded(self, value: float) -> float:
        """Return a number that people can read, within the range."""
        short: float = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return min(max(short, self.low), self.high)


@dataclass(frozen=True)
class SearchSpace:
    """Values of some options of a method.

    Args:
        method: Its name.
        options: For each option the values that may be tried; others keep their defaults.

    Raises:
        OptionError: The method has no such option, or none at all; a value breaks the option's
            rule; or there are no values.

    Example:
        >>> space = SearchSpace("tent", {"lr": Range(1e-4, 1e-2, log=True, points=3),
        ...                              "steps": Choices((1, 2))})
        >>> len(space.grid()), space.grid()[1]
        (6, {'lr': 0.0001, 'steps': 2})
        >>> SearchSpace("tent", {"steps": Choices((0,))})
        Traceback (most recent call last):
        ttapca.errors.OptionError: A search: `method.tent.steps` must be a whole number from 1 on...
    """

    method: str
    options: Mapping[str, Choices | Range]

    def __post_init__(self) -> None:
        """Compare the values with the rules that the method declares."""
        found = registration(self.method)
        known = [name for name in found.options if name not in NOT_PLAIN]
        if not known:
            raise OptionError(
                f"A search chooses options of a method; `{self.method}` has none that are plain "
                "values. Name another method; `ttapca methods` lists them."
            )
        if not self.options:
            raise OptionError(
                f"A search needs at least one option to choose; found none. `{self.method}` has "
                f"{', '.join(known)}: give values, such as {known[-1]}=VALUE,VALUE or LOW..HIGH."
            )
        checked = {name: self._checked(name, each) for name, each in self.options.items()}
        object.__setattr__(self, "options", checked)

    def _checked(self, name: str, values: Choices | Range) -> Choices | Range:
        if isinstance(values, Choices):
            for value in values.values:
                self._check(name, value)
            if not values.values:
                raise OptionError(f"`{name}` needs at least one value to try; found none.")
            return values
        if not values.low < values.high or (values.log and values.low <= 0):
            rule = "from a number above 0, if it is logarithmic, to a higher one"
            raise OptionError(
                f"A range goes {rule}; that of `{name}` goes from {values.low:g} to "
                f"{values.high:g}."
            )
        if values.points is not None and values.points < 1:
            raise OptionError(
                f"A grid of `{name}` must have at least one point; found {values.points}."
            )
        for end in (values.low, values.high):
            self._check(name, end)
        return replace(values, whole=self._whole_only(name, values))

    def _check(self, name: str, value: Any) -> None:
        if name == "seed":
            raise OptionError(
                "A search chooses what makes a method better, not what chance makes of it; found "
                "`seed` among the options. Leave it out."
            )
        check_method_options(self.method, {name: value}, "A search")

    def _whole_only(self, name: str, values: Range) -> bool:
        """Return whether the rule of an option refuses what lies between whole numbers."""
        try:
            self._check(name, math.nextafter(values.high, values.low))
        except OptionError:
            return True
        return False

    @property
    def size(self) -> int | None:
        """How many combinations there are; None if they cannot be counted."""
        counts = [each.count for each in self.options.values()]
        known = [count for count in counts if count is not None]
        return math.prod(known) if len(known) == len(counts) else None

    def grid(self) -> list[Options]:
        """Return all combinations; those of the last option are next to one another.

        Raises:
            OptionError: There are more than 10,000 of them, or a range does not say its points.
        """
        values = {name: each.grid(name) for name, each in self.options.items()}
        count = math.prod(map(len, values.values()))
        if count > MOST_COMBINATIONS:
            raise OptionError(
                f"A grid has at most {MOST_COMBINATIONS:,} combinations; found {count:,}. Give "
                "fewer values, or take the sampler random or tpe."
            )
        return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def drawn(self, count: int, seed: int) -> list[Options]:
        """Return combinations that are drawn at random, each of them once.

        Raises:
            OptionError: There are not so many.
        """
        if self.size is not None and self.size < count:
            raise OptionError(
                f"{count:,} trials cannot all differ: there are {self.size:,} combinations. Ask "
                "for fewer, or take the sampler grid, which tries all of them."
            )
        random = np.random.default_rng(seed)
        found: dict[str, Options] = {}
        for _ in range(MOST_DRAWS * count):
            one = {name: each.draw(random) for name, each in self.options.items()}
            found.setdefault(repr(one), one)
            if len(found) == count:
                break
        return list(found.values())

    def first(self) -> Options:
        """Return the first value of every option."""
        return {
            name: each.low if isinstance(each, Range) else each.values[0]
            for name, each in self.options.items()
        }
