"""`Tuning`: choose the options of a method on conditions that are not reported.

    space = SearchSpace("tent", {"lr": Range(1e-4, 1e-1, log=True)})
    tuned = Tuning(Benchmark(plan, split="train"), space).run("tuning.sqlite")
    tuned.best.options

Every trial is measured by the same units as a benchmark, which go into the same kind of file. So a
search that was stopped goes on where it was, and nothing is measured twice.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from ttapca._checks import Number, OneOf, check_option
from ttapca.benchmark.cells import CLEAN, JOINT, Cell, Outcome, Row
from ttapca.benchmark.held_out import CONDITIONS, SEED, check_held_out, check_split
from ttapca.benchmark.measurement import not_measured
from ttapca.benchmark.plan import Unit, units_of
from ttapca.benchmark.results import Results
from ttapca.benchmark.running import run
from ttapca.benchmark.samplers import Proposal, Sampler, Search
from ttapca.benchmark.search_space import Options, SearchSpace
from ttapca.benchmark.session import Benchmark, toml_value
from ttapca.benchmark.subject import Condition, Subject
from ttapca.datasets import Split
from ttapca.engines import Engine, engine_of
from ttapca.errors import OptionError

SOURCE = "source"
CLEAN_CONDITION: Condition = (CLEAN, 0)
AS_IT_IS = Proposal(-1, {})  # the network without a method


@dataclass(frozen=True)
class Trial:
    """How one combination of options did.

    Attributes:
        number: Counts from 0, in the order in which trials were proposed; -1 for the source.
        options: Of the method; others have their defaults.
        status: `done`; `pruned` if it was left before all conditions were measured; or `failed`.
        errors: By condition, in percent: the mean over settings and sizes of batches.
        clean: Error on clean images; None if it was not measured.
        score: What is chosen by, the lower the better: the mean error over conditions, and what the
            options cost on clean images if that is asked for. None if it failed.
        reason: Why it was left or failed; empty when done.
    """

    number: int
    options: Options
    status: Literal["done", "failed", "pruned"]
    errors: dict[Condition, float]
    clean: float | None = None
    score: float | None = None
    reason: str = ""

    @property
    def mean(self) -> float | None:
        """The mean error over the conditions that were measured."""
        return statistics.fmean(self.errors.values()) if self.errors else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of the error over these conditions."""
        return statistics.pstdev(self.errors.values()) if self.errors else None


@dataclass(frozen=True)
class Tuned:
    """What a search found.

    Attributes:
        method: That was tuned.
        trials: All of them, the best first; those that were left or failed at the end.
        source: The network as it is, without a method.
        conditions: On which the options were chosen.
        images: How many of each.
        seed: Of the sampler, and of the order of the images.
        rows: All measurements, as they are in the file.
    """

    method: str
    trials: tuple[Trial, ...]
    source: Trial
    conditions: tuple[Condition, ...]
    images: int
    seed: int
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def best(self) -> Trial | None:
        """The best trial; None if none was finished."""
        return self.trials[0] if self.trials and self.trials[0].status == "done" else None


@dataclass(frozen=True)
class TrialUnit(Unit):
    """A unit of a trial, which its title tells from those of others.

    Attributes:
        said: The options, for people.
    """

    said: str = ""

    @property
    def title(self) -> str:
        """The unit in a few words."""
        return f"{super().title}  {self.said}".rstrip()


@dataclass(eq=False)
class Tuning:
    """A search for the best options of a method, on held-out conditions.

    Attributes:
        benchmark: Network, images, settings and sizes of batches; the methods and corruptions of
            its plan do not count.
        space: What may be tried.
        search: How it is searched.
        conditions: Corruptions and severities, in the order in which pruning looks at them.
        clean_weight: What each point of error on clean images above the source's adds to the score,
            beside the mean error over conditions.

    Raises:
        OptionError: A condition is one that is reported; or a setting joins conditions, which are
            judged one by one here.

    Example:
        >>> import tempfile
        >>> from ttapca.benchmark import Choices, Plan
        >>> plan = Plan("digits", "digits", settings=("online",), images=40)
        >>> space = SearchSpace("bn", {"prior": Choices((0, 16))})
        >>> tuning = Tuning(Benchmark(plan, split="train"), space, conditions=(("fog", 4),))
        >>> tuned = tuning.run(Path(tempfile.mkdtemp()) / "tuning.sqlite")
        >>> len(tuned.trials), tuned.images, tuned.best.status
        (2, 40, 'done')
    """

    benchmark: Benchmark
    space: SearchSpace
    search: Search = field(default_factory=Search)
    conditions: tuple[Condition, ...] = CONDITIONS
    clean_weight: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense before any work is done."""
        check_held_out(self.conditions)
        check_option("split", self.benchmark.split, OneOf(get_args(Split)))
        check_option("clean_weight", self.clean_weight, Number(0))
        plan = self.benchmark.plan
        joined = [setting for setting in plan.settings if setting in JOINT]
        if joined:
            raise OptionError(
                "A search judges every condition by a stream of its own; found the setting "
                f"{joined[0]}, which joins them. Take online, correlated or episodic."
            )
        if plan.corrupted is not None:
            raise OptionError(
                "Options are chosen on training images; found a folder of corrupted test images "
                "(`corrupted`). Leave it out: they are made in memory."
            )
        needs = self.space.options.get("filter")
        own = {"filter": True} if needs is not None and True in needs.grid("filter") else {}
        self.benchmark.plan = replace(
            plan,
            methods=(self.space.method,),
            method={self.space.method: own},
            seeds=(self.search.seed,),
            corruption_seed=SEED,
        )

    def run(
        self, to: Path | str, *, engine: Engine | str | None = None, retry_failed: bool = False
    ) -> Tuned:
        """Measure what is not in a file of results yet, and compare all trials.

        Args:
            to: The file; it is made if there is none.
            engine: Where to measure; see `Benchmark.run`. The trials are the same anywhere.
            retry_failed: Whether to measure again what has failed before.

        Raises:
            TtapcaError: Network, images or filter cannot be had, the file cannot be written, or an
                option makes no sense beside the others.
        """
        engine = engine_of(engine) if engine is None or isinstance(engine, str) else engine
        bench, to = self.benchmark, Path(to)
        sampler = self.search.sampler_of(self.space)
        bench.load_network()  # first: a mistyped name must not ask for images
        check_split(bench.plan.data, bench.split, bench.images)
        subject = bench.prepare(to, engine)
        with Results(to) as results:
            return _TuningRun(self, subject, results, engine, retry_failed).of(sampler)

    def stages(self, prunes: bool) -> list[tuple[Condition, ...]]:
        """Return the conditions in parts; after each of them a trial may be left.

        The parts end after a quarter, half and all of the conditions. One condition says little
        about the others, and to stop after each would leave processes waiting for one another.
        Clean images come last.
        """
        count = len(self.conditions)
        ends = {math.ceil(count / 4), math.ceil(count / 2)} if prunes else set()
        parts = pairwise(sorted({0, *ends, count}))
        stages = [self.conditions[start:end] for start, end in parts]
        return [*stages[:-1], (*stages[-1], CLEAN_CONDITION)]


class _TuningRun:
    """One search as it goes on: measures what a sampler proposes."""

    def __init__(
        self,
        tuning: Tuning,
        subject: Subject,
        results: Results,
        engine: Engine,
        retry_failed: bool,
    ) -> None:
        self._tuning, self._subject, self._results = tuning, subject, results
        self._engine, self._retry_failed = engine, retry_failed
        self._reporter = tuning.benchmark.reporter
        self._units: dict[tuple[int, Condition], list[TrialUnit]] = {}
        self._options: dict[Unit, Options] = {}
        self._outcomes: dict[Cell, Outcome] = {}  # as they are in the file

    def of(self, sampler: Sampler) -> Tuned:
        """Measure all trials."""
        tuning = self._tuning
        stages = tuning.stages(sampler.prunes)
        every = [condition for stage in stages for condition in stage]
        at_first = [(AS_IT_IS, condition) for condition in every]
        trials: list[Trial] = []
        while generation := sampler.ask():
            single = len(generation) == sampler.total and not sampler.prunes
            if not single:
                last = generation[-1].number + 1
                self._reporter.note(
                    f"trials {generation[0].number + 1} to {last:,} of {sampler.total:,}"
                )
            trials += self._generation(sampler, generation, stages, at_first, announce=single)
            at_first = []
            if not single and (best := ranked(trials)[0]).score is not None:
                self._reporter.note(f"best so far: {said(best.options)}  error {best.mean:.2f} %")
        cells = {cell for units in self._units.values() for unit in units for cell in unit.cells}
        rows = tuple(row for row in self._results.rows() if row.cell in cells)
        source = self._ended(AS_IT_IS, every, None)
        images, seed = len(self._subject.source.clean), tuning.search.seed
        facts = (tuning.conditions, images, seed, rows)
        return Tuned(tuning.space.method, ranked(trials), source, *facts)

    def _generation(
        self,
        sampler: Sampler,
        living: list[Proposal],
        stages: Sequence[Sequence[Condition]],
        at_first: Sequence[tuple[Proposal, Condition]],
        *,
        announce: bool,
    ) -> list[Trial]:
        """Measure some trials, stage by stage, and return how they ended."""
        seen: list[Condition] = []
        ended: list[Trial] = []
        for number, stage in enumerate(stages, start=1):
            seen += stage
            pairs = [(one, condition) for condition in stage for one in living]
            self._measure([*at_first, *pairs], announce=announce)
            at_first = []
            rest = [each for later in stages for each in later if each not in seen]
            still = []
            for one in living:
                trial = self._ended(one, seen, self._source_clean if not rest else None)
                if trial.status == "done" and rest and trial.mean is not None:
                    if not sampler.leaves(one, number, trial.mean):
                        still.append(one)
                        continue
                    ended.append(self._left(trial, rest, len(seen)))
                else:
                    sampler.tell(one, trial.score)
                    ended.append(trial)
            living = still
        return ended

    @property
    def _source_clean(self) -> float:
        clean = self._ended(AS_IT_IS, [CLEAN_CONDITION], None).clean
        return math.inf if clean is None else clean

    def _measure(self, pairs: Sequence[tuple[Proposal, Condition]], *, announce: bool) -> None:
        # All options for one condition, then for the next: its images are made once.
        order = {condition: number for number, (_, condition) in enumerate(reversed(pairs))}
        pairs = sorted(pairs, key=lambda pair: -order[pair[1]])
        units = dict.fromkeys(unit for pair in pairs for unit in self._units_of(*pair))
        run(
            list(units),
            self._subject,
            self._results,
            reporter=self._reporter,
            retry_failed=self._retry_failed,
            command=self._command,
            engine=self._engine,
            announce=announce,
        )
        self._outcomes = {row.cell: row.outcome for row in self._results.rows()}

    def _units_of(self, one: Proposal, condition: Condition) -> list[TrialUnit]:
        place = one.number, condition
        if place not in self._units:
            plan = self._tuning.benchmark.plan
            method = plan.methods[0] if one is not AS_IT_IS else SOURCE
            plan = replace(plan, methods=(method,), method={method: one.options})
            found = units_of(plan, self._subject, plan.settings, [condition])
            self._units[place] = [TrialUnit(unit.cells, said(one.options)) for unit in found]
            self._options |= dict.fromkeys(self._units[place], one.options)
        return self._units[place]

    def _ended(
        self, one: Proposal, conditions: Sequence[Condition], source_clean: float | None
    ) -> Trial:
        """Return how a trial did on some conditions.

        It has a score where clean images are among them, and the source's error on these is given.
        """
        errors: dict[Condition, float] = {}
        for condition in conditions:
            units = self._units_of(one, condition)
            outcomes = [self._outcomes[cell] for unit in units for cell in unit.cells]
            measured = [each.error for each in outcomes if each.error is not None]
            if len(measured) < len(outcomes):
                reason = next(each.reason for each in outcomes if each.error is None)
                return Trial(one.number, one.options, "failed", errors, reason=reason)
            errors[condition] = statistics.fmean(measured)
        clean = errors.pop(CLEAN_CONDITION, None)
        trial = Trial(one.number, one.options, "done", errors, clean)
        if source_clean is None or clean is None or trial.mean is None:
            return trial
        harm = max(0.0, clean - source_clean)
        return replace(trial, score=trial.mean + self._tuning.clean_weight * harm)

    def _left(self, trial: Trial, rest: Sequence[Condition], seen: int) -> Trial:
        """Write down what is not measured of a trial, and return the trial."""
        reason = (
            f"mean error {trial.mean:.2f} % after {seen} of {len(self._tuning.conditions)} "
            f"conditions; left by the rule {self._tuning.search.prune}"
        )
        one = Proposal(trial.number, trial.options)
        for condition in rest:
            for unit in self._units_of(one, condition):
                if not any(cell in self._outcomes for cell in unit.cells):
                    command = shlex.join(self._command(unit))
                    self._results.add(not_measured(unit, "pruned", reason, command))
        return replace(trial, status="pruned", reason=reason)

    def _command(self, unit: Unit) -> list[str]:
        """Return the words of a search that measures a unit.

        Every search measures clean images and the source, so that any condition and any options of
        the method will do for these.
        """
        bench, cell = self._tuning.benchmark, unit.cells[0]
        options = self._options[unit] or self._tuning.space.first()
        name, severity = unit.conditions[0]
        if name == CLEAN:
            name, severity = self._tuning.conditions[0]
        own = {
            "--conditions": f"{name}:{severity}",
            "--seed": cell.seed,
            "--split": bench.split if bench.split != "train" else None,
        }
        return bench.command_again(
            "tune", [self._tuning.space.method], own, [*words_of(options)], cell, self._results.path
        )


def ranked(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return trials, the best first; then those that were left, and those that failed."""
    order = ("done", "pruned", "failed")
    nothing = math.inf
    return tuple(
        sorted(
            trials,
            key=lambda one: (
                order.index(one.status),
                -len(one.errors) if one.status == "pruned" else 0,
                nothing if one.score is None else one.score,
                nothing if one.mean is None else one.mean,
                one.number,
            ),
        )
    )


def words_of(options: Options, before: str = "") -> list[str]:
    """Return options as `--option` takes them.

    Example:
        >>> words_of({"lr": 0.01, "logits": "after"}, "tent.")
        ['tent.lr=0.01', 'tent.logits="after"']
    """
    return [f"{before}{name}={toml_value(value)}" for name, value in options.items()]


def said(options: Options) -> str:
    """Return options for people.

    Example:
        >>> said({"lr": 0.01, "steps": 2})
        'lr=0.01 steps=2'
    """
    return " ".join(words_of(options))
