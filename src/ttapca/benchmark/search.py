"""The options that a search tries: their values, and the sampler that proposes them.

Proposals depend on the seed and on the scores, never on the number of processes or on their speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np

from ttapca._checks import Maybe, Whole, check_fields, check_option
from ttapca.benchmark.plan import check_method_options
from ttapca.errors import OptionError
from ttapca.methods.method import registration

Options = dict[str, Any]  # of a method, by name
SamplerName = Literal["grid", "random", "tpe"]

MOST_COMBINATIONS = 10_000
DIGITS = 4  # of a number that was drawn: more would say nothing, and be hard to read
NOT_PLAIN = ("filter", "source", "head", "split", "seed")  # objects, or values of the plan
TRIALS = 30
GENERATION = 5  # trials that are proposed before any of them is told
STARTUP = 2 * GENERATION  # trials that TPE draws at random before it models anything


@dataclass(frozen=True)
class Choices:
    """Some values.

    Example:
        >>> Choices((1, 2, 4)).grid("steps")
        (1, 2, 4)
    """

    values: tuple[Any, ...]

    def grid(self, _: str) -> tuple[Any, ...]:
        """Return all values."""
        return self.values


@dataclass(frozen=True)
class Range:
    """All numbers from one to another.

    Attributes:
        low: The lowest.
        high: The highest.
        log: Whether numbers are spaced evenly by their logarithm.
        points: How many of them a grid has; whole numbers need none.
        whole: Whether only whole numbers are meant; `SearchSpace` sets it by the method's rule.

    Example:
        >>> Range(0.001, 0.1, log=True, points=3).grid("lr")
        (0.001, 0.01, 0.1)
    """

    low: float
    high: float
    log: bool = False
    points: int | None = None
    whole: bool = False

    def grid(self, name: str) -> tuple[Any, ...]:
        """Return numbers from one end to the other; raise `OptionError` without `points`."""
        points = self.points
        if points is None and self.whole and not self.log:
            points = int(self.high - self.low) + 1
        if points is None:
            log = ":log" if self.log else ""
            raise OptionError(
                f"A grid needs the values of `{name}`; found a range. Say how many points it has, "
                f"such as {name}={self.low:g}..{self.high:g}{log}:5, or take the sampler tpe."
            )
        return tuple(dict.fromkeys(self.at(float(share)) for share in np.linspace(0, 1, points)))

    def at(self, share: float) -> float:
        """Return the number that is this share of the way from one end to the other."""
        if self.log:
            return self.rounded(self.low * (self.high / self.low) ** share)
        return self.rounded(self.low + (self.high - self.low) * share)

    def rounded(self, value: float) -> float:
        """Return a number with few digits, within the range."""
        short: float = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return min(max(short, self.low), self.high)


@dataclass(frozen=True)
class SearchSpace:
    """Values of some options of a method.

    Args:
        method: Its name.
        options: For each option the values that may be tried; others keep their defaults.

    Raises:
        OptionError: The method has no such option, or a value breaks its rule.

    Example:
        >>> space = SearchSpace("tent", {"lr": Range(1e-4, 1e-2, log=True, points=3),
        ...                              "steps": Choices((1, 2))})
        >>> len(space.grid()), space.grid()[1]
        (6, {'lr': 0.0001, 'steps': 2})
    """

    method: str
    options: Mapping[str, Choices | Range]

    def __post_init__(self) -> None:
        """Compare the values with the rules that the method declares."""
        known = [name for name in registration(self.method).options if name not in NOT_PLAIN]
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
        def check(value: Any) -> None:
            check_method_options(self.method, {name: value}, "A search")

        if isinstance(values, Choices):
            for value in values.values:
                check(value)
            if not values.values:
                raise OptionError(f"`{name}` needs at least one value to try; found none.")
            return values
        if not values.low < values.high or (values.log and values.low <= 0):
            raise OptionError(
                "A range goes from a number above 0, if it is logarithmic, to a higher one; that "
                f"of `{name}` goes from {values.low:g} to {values.high:g}."
            )
        check_option("points", values.points, Maybe(Whole(1)))
        check(values.low)
        check(values.high)
        try:
            check(math.nextafter(values.high, values.low))
        except OptionError:  # the option refuses numbers between whole ones
            return replace(values, whole=True)
        return replace(values, whole=False)

    def grid(self) -> list[Options]:
        """Return all combinations; the last option varies fastest."""
        values = {name: each.grid(name) for name, each in self.options.items()}
        count = math.prod(map(len, values.values()))
        if count > MOST_COMBINATIONS:
            raise OptionError(
                f"A grid has at most {MOST_COMBINATIONS:,} combinations; found {count:,}. Give "
                "fewer values, or take the sampler random or tpe."
            )
        return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]

    def first(self) -> Options:
        """Return the first value of every option."""
        return {
            name: each.low if isinstance(each, Range) else each.values[0]
            for name, each in self.options.items()
        }


@dataclass(frozen=True)
class Search:
    """How values are chosen; `docs/tuning.md` has a table of the samplers."""

    sampler: SamplerName | None = None  # by default a grid if the space has one, else `tpe`
    # 30 by default; a grid has all combinations.
    trials: Annotated[int, Whole(1, 100_000)] | None = None
    seed: Annotated[int, Whole(0, 2**32 - 1)] = 0

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)


@dataclass(frozen=True)
class Proposal:
    """A trial that a sampler proposes; trials are numbered from 0."""

    number: int
    options: Options
    trial: Any = None  # of Optuna


class Sampler:
    """Proposes options in generations: all combinations of a grid, or those Optuna draws."""

    def __init__(self, space: SearchSpace, search: Search) -> None:
        kind = search.sampler
        if kind is None:
            ranges = [each for each in space.options.values() if isinstance(each, Range)]
            kind = "tpe" if any(each.points is None for each in ranges) else "grid"
        if kind == "grid" and search.trials is not None:
            raise OptionError(
                "`trials=` would have no effect: a grid tries all combinations. Leave it out, or "
                "take the sampler random or tpe."
            )
        self._space = space
        self._grid = space.grid() if kind == "grid" else []
        self.total = len(self._grid) or search.trials or TRIALS
        # Trials that do not depend on others are proposed at once.
        self._generation = GENERATION if kind == "tpe" else self.total
        self._study: Any = None if self._grid else _study(kind, search.seed)
        self._asked = 0

    def ask(self) -> list[Proposal]:
        """Return the next generation; an empty list when all trials were proposed."""
        first = self._asked
        self._asked = min(first + self._generation, self.total)
        return [self._next(number) for number in range(first, self._asked)]

    def _next(self, number: int) -> Proposal:
        if self._grid:
            return Proposal(number, self._grid[number])
        trial, options = self._study.ask(_distributions(self._space)), {}
        for name, each in self._space.options.items():
            found = trial.params[name]
            options[name] = each.rounded(found) if isinstance(each, Range) else each.values[found]
        return Proposal(number, options, trial)

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Receive the score of a trial that ended; None if it failed."""
        if self._study:
            from optuna.trial import TrialState

            state = TrialState.FAIL if score is None else TrialState.COMPLETE
            self._study.tell(proposal.trial, score, state=state)


def _study(sampler: SamplerName, seed: int) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draws: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if sampler == "tpe":  # without a score yet, a proposal counts as bad, so that trials differ
        draws = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
        )
    return optuna.create_study(sampler=draws)


def _distributions(space: SearchSpace) -> dict[str, Any]:
    from optuna import distributions as kinds

    found: dict[str, Any] = {}
    for name, each in space.options.items():
        if isinstance(each, Choices):  # by their places: values may be lists
            found[name] = kinds.CategoricalDistribution(range(len(each.values)))
        elif each.whole:
            found[name] = kinds.IntDistribution(int(each.low), int(each.high), log=each.log)
        else:
            found[name] = kinds.FloatDistribution(each.low, each.high, log=each.log)
    return found
