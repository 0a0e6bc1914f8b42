"""`Tuning`: choose the options of a method on conditions that are held out of every report.

Trials are measured by the units of a benchmark, into the same kind of file; so a search that was
stopped goes on where it was. `docs/tuning.md` says which conditions are held out, and why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from ttapca._checks import Number, OneOf, check_option
from ttapca.benchmark import paper
from ttapca.benchmark.plan import Unit, units_of
from ttapca.benchmark.results import Results
from ttapca.benchmark.rows import CLEAN, JOINT, Cell, Outcome, Row
from ttapca.benchmark.running import run
from ttapca.benchmark.search import Options, Proposal, Sampler, Search, SearchSpace
from ttapca.benchmark.session import Benchmark, toml_value
from ttapca.benchmark.subject import Condition, Subject
from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD
from ttapca.corruptions.catalogue import find_all
from ttapca.datasets import Images, Split
from ttapca.engines import Engine, engine_of
from ttapca.errors import DataNotFoundError, OptionError, did_you_mean

SEED = 1  # of corrupted images; the reported ones have 0
CONDITIONS: tuple[Condition, ...] = (
    ("speckle_noise", 5), ("fog", 4), ("gaussian_blur", 5), ("jpeg_compression", 4),
    ("impulse_noise", 4), ("contrast", 4), ("glass_blur", 4), ("saturate", 5),
    ("gaussian_noise", 4), ("frost", 4), ("defocus_blur", 4), ("pixelate", 4),
    ("spatter", 5), ("snow", 4), ("zoom_blur", 4), ("elastic_transform", 4),
)  # fmt: skip
SOURCE = "source"
CLEAN_CONDITION: Condition = (CLEAN, 0)
AS_IT_IS = Proposal(-1, {})  # the network without a method


@dataclass(frozen=True)
class Trial:
    """How one combination of options did.

    Attributes:
        number: Counts from 0, in the order in which trials were proposed; -1 for the source.
        options: Of the method; others have their defaults.
        status: `done` or `failed`.
        errors: By condition, in percent: the mean over settings and sizes of batches.
        clean: Error on clean images; None if it failed.
        score: Mean error over conditions, with the cost on clean images if that is asked for.
        reason: Why it failed; empty when done.
    """

    number: int
    options: Options
    status: Literal["done", "failed"]
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
    """The result of a search.

    Attributes:
        method: That was tuned.
        trials: All of them, the best first, and at the end the ones that failed.
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


@dataclass(eq=False)
class Tuning:
    """A search for the best options of a method, on held-out conditions.

    Attributes:
        benchmark: Network, images, settings and batch sizes; its methods and corruptions do not
            count.
        space: The values that may be tried.
        search: How it is searched.
        conditions: Corruptions and severities; `OptionError` if one of them is reported.
        clean_weight: Points of the score for each point of error on clean images above the
            source's; the rest of the score is the mean error over conditions.

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
        """Refuse wrong values before any work is done."""
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
        """Make the measurements that are not in a file of results yet, and compare all trials.

        Args:
            to: The file; it is made if there is none.
            engine: Where to measure; see `Benchmark.run`. The trials are the same anywhere.
            retry_failed: Whether to repeat measurements that failed before.
        """
        engine = engine_of(engine) if engine is None or isinstance(engine, str) else engine
        bench, to = self.benchmark, Path(to)
        sampler = Sampler(self.space, self.search)
        _ = bench.named_network  # first: a mistyped name must not ask for images
        check_split(bench.plan.data, bench.split, bench.images)
        subject = bench.prepare(to)
        with Results(to) as results:
            return _TuningRun(self, subject, results, engine, retry_failed).of(sampler)


@dataclass(eq=False)
class _TuningRun:
    """One search as it goes on: measures the proposals of a sampler."""

    tuning: Tuning
    subject: Subject
    results: Results
    engine: Engine
    retry_failed: bool
    _units: dict[tuple[int, Condition], list[Unit]] = field(default_factory=dict)
    _options: dict[Unit, Options] = field(default_factory=dict)
    _outcomes: dict[Cell, Outcome] = field(default_factory=dict)  # as they are in the file

    def of(self, sampler: Sampler) -> Tuned:
        """Measure all trials."""
        tuning, note = self.tuning, self.tuning.benchmark.reporter.note
        trials: list[Trial] = []
        while generation := sampler.ask():
            single = len(generation) == sampler.total
            if not single:
                first, last = (generation[at].number + 1 for at in (0, -1))
                note(f"trials {first} to {last:,} of {sampler.total:,}")
            self._measure([*([] if trials else [AS_IT_IS]), *generation], announce=single)
            source = self._ended(AS_IT_IS)
            for one in generation:
                trial = self._scored(self._ended(one), source)
                sampler.tell(one, trial.score)
                trials.append(trial)
            if not single and (best := ranked(trials)[0]).score is not None:
                options = " ".join(words_of(best.options))
                note(f"best so far: {options}  error {best.mean:.2f} %")
        cells = {cell for units in self._units.values() for unit in units for cell in unit.cells}
        rows = tuple(row for row in self.results.rows() if row.cell in cells)
        images, seed = len(self.subject.source.clean), tuning.search.seed
        facts = (tuning.conditions, images, seed, rows)
        return Tuned(tuning.space.method, ranked(trials), self._ended(AS_IT_IS), *facts)

    def _measure(self, proposals: Sequence[Proposal], *, announce: bool) -> None:
        # All proposals under one condition, then under the next: its images are made once.
        pairs = product((*self.tuning.conditions, CLEAN_CONDITION), proposals)
        units = [unit for condition, one in pairs for unit in self._units_of(one, condition)]
        run(
            list(dict.fromkeys(units)),
            self.subject,
            self.results,
            reporter=self.tuning.benchmark.reporter,
            retry_failed=self.retry_failed,
            command=self._command,
            engine=self.engine,
            announce=announce,
        )
        self._outcomes = {row.cell: row.outcome for row in self.results.rows()}

    def _units_of(self, one: Proposal, condition: Condition) -> list[Unit]:
        key = one.number, condition
        if key not in self._units:
            plan = self.tuning.benchmark.plan
            method = plan.methods[0] if one is not AS_IT_IS else SOURCE
            plan = replace(plan, methods=(method,), method={method: one.options})
            found = units_of(plan, self.subject, plan.settings, [condition])
            title = " ".join(words_of(one.options))
            self._units[key] = [replace(unit, note=title) for unit in found]
            self._options |= dict.fromkeys(self._units[key], one.options)
        return self._units[key]

    def _ended(self, one: Proposal) -> Trial:
        """Return how a trial did, without a score."""
        errors: dict[Condition, float] = {}
        for condition in (*self.tuning.conditions, CLEAN_CONDITION):
            units = self._units_of(one, condition)
            outcomes = [self._outcomes[cell] for unit in units for cell in unit.cells]
            measured = [each.error for each in outcomes if each.error is not None]
            if len(measured) < len(outcomes):
                reason = next(each.reason for each in outcomes if each.error is None)
                return Trial(one.number, one.options, "failed", errors, reason=reason)
            errors[condition] = statistics.fmean(measured)
        return Trial(one.number, one.options, "done", errors, errors.pop(CLEAN_CONDITION))

    def _scored(self, trial: Trial, source: Trial) -> Trial:
        """Add the score; the source may have failed, and then clean images do not count."""
        if trial.clean is None or trial.mean is None:
            return trial
        harm = 0.0 if source.clean is None else max(0.0, trial.clean - source.clean)
        return replace(trial, score=trial.mean + self.tuning.clean_weight * harm)

    def _command(self, unit: Unit) -> list[str]:
        """Return the words of a search that measures a unit; of what all have, any will do."""
        bench, cell = self.tuning.benchmark, unit.cells[0]
        options = self._options[unit] or self.tuning.space.first()
        name, severity = unit.conditions[0]
        if name == CLEAN:
            name, severity = self.tuning.conditions[0]
        own = {
            "--conditions": f"{name}:{severity}",
            "--seed": cell.seed,
            "--split": bench.split if bench.split != "train" else None,
        }
        return bench.command_again(
            "tune", [self.tuning.space.method], own, options, cell, self.results.path
        )


def ranked(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return trials, the best first; the ones that failed have no score, and are last."""

    def place(one: Trial) -> tuple[float, ...]:
        return (math.inf if one.score is None else one.score, one.number)

    return tuple(sorted(trials, key=place))


def words_of(options: Options, before: str = "") -> list[str]:
    """Return options as `--option` takes them, such as `tent.lr=0.01`."""
    return [f"{before}{name}={toml_value(value)}" for name, value in options.items()]


# Held-out conditions -----------------------------------------------------------------------------


def check_held_out(conditions: Sequence[Condition]) -> None:
    """Refuse conditions that are reported, other words, and an empty list."""
    if not conditions:
        raise OptionError("A search needs at least one condition, such as fog:4; found none.")
    for name, severity in conditions:
        if name not in CORRUPTIONS or severity not in SEVERITIES:
            raise OptionError(
                f"A condition is a corruption and its severity, from {SEVERITIES[0]} to "
                f"{SEVERITIES[-1]}; found {name}:{severity}.{did_you_mean(name, CORRUPTIONS)}"
            )
    reported = [
        f"{name}:{severity}"
        for name, severity in conditions
        if name in STANDARD and severity == paper.SEVERITY
    ]
    if reported:
        raise OptionError(
            "Options are chosen on conditions that are not reported, and severity "
            f"{paper.SEVERITY} of the fifteen standard corruptions is; found {', '.join(reported)}."
            f" Take a severity below {paper.SEVERITY}, or {', '.join(EXTRA)}."
        )


def read_conditions(words: Sequence[str]) -> tuple[Condition, ...]:
    """Return the conditions of words such as `fog:4` or `extra:5`; refuse reported ones."""
    found: list[Condition] = []
    for word in words:
        name, _, severity = word.partition(":")
        if not severity.isdecimal():
            raise OptionError(f"A condition is NAME:SEVERITY, such as fog:4; found `{word}`.")
        found += [(each, int(severity)) for each in find_all([name])]
    conditions = tuple(dict.fromkeys(found))
    check_held_out(conditions)
    return conditions


def check_split(data: str, split: Split, read: Callable[[Split], Images]) -> None:
    """Refuse test images if there are training images, and training images that are the same."""
    try:
        training = read("train")
    except (DataNotFoundError, OptionError):
        if split == "train":
            raise
        return
    # A file, or a folder without splits, gives the same images for both.
    single = Path(data).exists() and training.fingerprint() == read("test").fingerprint()
    if single and split == "train":
        raise OptionError(
            f"Options are chosen on training images; {data} holds one set of images, which `bench` "
            "takes for testing. Name data with a `train` folder. If there is none, say --split "
            "test, and report on other images."
        )
    if not single and split == "test":
        raise OptionError(
            f"Options are chosen on training images if there are any; `{data}` has "
            f"{len(training):,}, and the test images were asked for. Leave --split out."
        )
