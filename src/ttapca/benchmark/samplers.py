"""Which options a search tries next, and which of them it gives up early.

All samplers work in generations: they propose some trials, are told how these went, and propose
others. What they propose depends on the seed and on what was measured, never on how many processes
measured it, or on which of them was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from ttapca._checks import Maybe, OneOf, Whole, check_option
from ttapca.benchmark.search_space import Choices, Options, Range, SearchSpace
from ttapca.errors import OptionError

SamplerName = Literal["grid", "random", "tpe"]
PrunerName = Literal["median", "halving"]

TRIALS = 30
GENERATION = 5  # trials that are proposed before any of them is told
STARTUP = 2 * GENERATION  # trials that TPE draws at random before it models anything


@dataclass(frozen=True)
class Search:
    """How values are chosen.

    Attributes:
        sampler: `grid` for all combinations, `random`, or `tpe` (Optuna's tree of Parzen
            estimators); None for a grid where the space has one, else for `tpe`.
        trials: How many combinations are tried, 30 by default; a grid has all of them.
        prune: Whether trials that do badly are left early: `median` if the mean error so far is
            above the median of finished trials; `halving` for successive halving.
        seed: Of the sampler.

    Raises:
        OptionError: A value makes no sense.
    """

    sampler: SamplerName | None = None
    trials: int | None = None
    prune: PrunerName | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        check_option("sampler", self.sampler, Maybe(OneOf(get_args(SamplerName))))
        check_option("trials", self.trials, Maybe(Whole(1, 100_000)))
        check_option("prune", self.prune, Maybe(OneOf(get_args(PrunerName))))
        check_option("seed", self.seed, Whole(0, 2**32 - 1))

    def named(self, space: SearchSpace) -> SamplerName:
        """Return which sampler it is for a space."""
        if self.sampler is not None:
            return self.sampler
        ranges = [each for each in space.options.values() if isinstance(each, Range)]
        return "tpe" if any(each.points is None for each in ranges) else "grid"

    def sampler_of(self, space: SearchSpace) -> Sampler:
        """Return the sampler for a space.

        Raises:
            OptionError: The space has no grid, or `trials` would have no effect.
            ModuleNotFoundError: Optuna is needed for it and not installed (extra `tune`).
        """
        kind, trials = self.named(space), self.trials or TRIALS
        if kind == "grid" and self.trials is not None:
            raise OptionError(
                "`trials=` would have no effect: a grid tries all combinations. Leave it out, or "
                "take the sampler random or tpe."
            )
        if kind == "tpe":
            return OptunaSampler(space, trials, self.seed, self.prune)
        listed = space.grid() if kind == "grid" else space.drawn(trials, self.seed)
        if self.prune is not None:
            return OptunaSampler(space, len(listed), self.seed, self.prune, listed)
        return ListedSampler(listed)


@dataclass(frozen=True)
class Proposal:
    """A trial that a sampler proposes.

    Attributes:
        number: Counts from 0.
        options: Of the method.
    """

    number: int
    options: Options


class Sampler(Protocol):
    """Proposes options, in generations."""

    @property
    def total(self) -> int:
        """How many trials there are going to be."""

    @property
    def prunes(self) -> bool:
        """Whether it may leave trials early."""

    def ask(self) -> list[Proposal]:
        """Return the next generation; an empty list when all trials were proposed."""

    def leaves(self, proposal: Proposal, stage: int, mean: float) -> bool:
        """Return whether to leave a trial after a stage, given its mean error so far."""

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Receive the score of a trial that ended; None if it failed."""


class ListedSampler:
    """Tries what is in a list.

    Example:
        >>> sampler = ListedSampler([{"lr": 0.1}])
        >>> sampler.ask(), sampler.ask()
        ([Proposal(number=0, options={'lr': 0.1})], [])
    """

    prunes = False

    def __init__(self, listed: Sequence[Options]) -> None:
        self.total = len(listed)
        self._waiting = [Proposal(number, options) for number, options in enumerate(listed)]

    def ask(self) -> list[Proposal]:
        """Return all trials, once."""
        proposed, self._waiting = self._waiting, []
        return proposed

    def leaves(self, proposal: Proposal, stage: int, mean: float) -> bool:
        """Return False: every trial is finished."""
        del proposal, stage, mean
        return False

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Ignore the score."""


class OptunaSampler:
    """Asks Optuna what to try, and what to leave early.

    Args:
        space: What may be tried.
        trials: How many.
        seed: For TPE.
        prune: The rule by which trials are left.
        listed: What to try; by default TPE proposes it. Within a generation, it takes what it has
            proposed but not yet been told about for bad (a constant liar), so that trials differ.
    """

    def __init__(
        self,
        space: SearchSpace,
        trials: int,
        seed: int,
        prune: PrunerName | None = None,
        listed: Sequence[Options] | None = None,
    ) -> None:
        optuna = _optuna()
        self.total, self.prunes = trials, prune is not None
        self._optuna, self._space, self._listed = optuna, space, listed
        pruners = optuna.pruners
        pruner = pruners.NopPruner()
        if prune == "median":
            pruner = pruners.MedianPruner(n_startup_trials=GENERATION)
        elif prune == "halving":
            pruner = pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
        )
        self._study = optuna.create_study(sampler=sampler, pruner=pruner)
        self._distributions = {
            name: _distribution(optuna, each) for name, each in space.options.items()
        }
        self._trials: dict[int, Any] = {}

    def ask(self) -> list[Proposal]:
        """Return the next few trials."""
        first = len(self._trials)
        return [self._next(number) for number in range(first, min(first + GENERATION, self.total))]

    def _next(self, number: int) -> Proposal:
        if self._listed is not None:
            options = self._listed[number]
            self._trials[number] = self._study.ask()
            return Proposal(number, options)
        trial = self._study.ask(self._distributions)
        self._trials[number] = trial
        options = {name: self._value(name, trial.params[name]) for name in self._distributions}
        return Proposal(number, options)

    def _value(self, name: str, found: Any) -> Any:
        each = self._space.options[name]
        return each.rounded(found) if isinstance(each, Range) else each.values[found]

    def leaves(self, proposal: Proposal, stage: int, mean: float) -> bool:
        """Return what the rule for pruning says."""
        trial = self._trials[proposal.number]
        trial.report(mean, stage)
        if not trial.should_prune():
            return False
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        return True

    def tell(self, proposal: Proposal, score: float | None) -> None:
        """Tell Optuna."""
        trial, states = self._trials[proposal.number], self._optuna.trial.TrialState
        if score is None:
            self._study.tell(trial, state=states.FAIL)
        else:
            self._study.tell(trial, score)


def _distribution(optuna: Any, each: Choices | Range) -> Any:
    kinds = optuna.distributions
    if isinstance(each, Choices):  # by their places: values may be lists
        return kinds.CategoricalDistribution(range(len(each.values)))
    if each.whole:
        return kinds.IntDistribution(int(each.low), int(each.high), log=each.log)
    return kinds.FloatDistribution(each.low, each.high, log=each.log)


def _optuna() -> Any:
    """Return the module, which says nothing but warnings."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
