"""Who reads the data of a fit, and how what they collect comes together.

One process reads a loader as a whole. Data in parts (`PartedData`, such as
`ttapca.datasets.Shards`) can be read by the workers of an engine, each of which sends back what it
collected. In a job of several ranks, each reads its own data: see `ttapca.fitting.ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

from ttapca.engines import Engine, Finished, Lost, engine_of
from ttapca.engines.artifacts import write_artifact
from ttapca.engines.processes import JoblibEngine
from ttapca.errors import EngineError, OptionError
from ttapca.fitting.activations import ALL, SourceActivations
from ttapca.fitting.collected import Collected, Reading, merged
from ttapca.fitting.fit_plan import FitPlan, RouteChoice
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.part_reader import (
    PartedData,
    PartReader,
    PlacedPart,
    SentReader,
    placed,
    see_parts,
)
from ttapca.fitting.ranks import Ranks
from ttapca.fitting.spread import Spread
from ttapca.support.process_group import several_ranks

Found = TypeVar("Found")
NAMED = 5  # parts in a message
LOOKED_AT = 100  # parts, evenly spread, that a worker on another machine must see

MakePlan = Callable[[RouteChoice], FitPlan]


class Gathering(Protocol):
    """Who reads the data, and how what they collect comes together."""

    @property
    def spread(self) -> Spread | None:
        """How the reading is spread over processes; None where this one reads."""

    def each(self, step: Callable[[], Found]) -> Found:
        """Take a step in every process that fits; where one fails, all do."""

    def settle(self, source: SourceActivations) -> None:
        """Tell the source what is known about all of the data, once it was probed."""

    def plan(self, make: MakePlan, asked: RouteChoice) -> FitPlan:
        """Return a plan with the route that all processes take; `make` makes that of this one."""

    def collected(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> Collected | None:
        """Read all data once; None where another process has what was collected."""

    def shared(self, find: Callable[[], FittedFilter]) -> FittedFilter:
        """Find the filter in one process, and return it in all of them."""

    def close(self) -> None:
        """Give back what was needed to work together."""


class OneProcess:
    """This process fits, and reads the data as a whole."""

    spread: Spread | None = None

    def close(self) -> None:
        """Do nothing."""

    def each(self, step: Callable[[], Found]) -> Found:
        """Take a step."""
        return step()

    def settle(self, source: SourceActivations) -> None:
        """Leave everything as the source found it."""

    def plan(self, make: MakePlan, asked: RouteChoice) -> FitPlan:
        """Return the plan."""
        return make(asked)

    def collected(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> Collected | None:
        """Read all data once."""
        del plan  # there is one task
        into = Collected.nothing(reading, source.device)
        source.collect(into, ALL)
        return into

    def shared(self, find: Callable[[], FittedFilter]) -> FittedFilter:
        """Find the filter."""
        return find()


class PartsOnEngine(OneProcess):
    """This process fits, and the workers of an engine read the parts of the data."""

    def __init__(self, data: PartedData, engine: Engine) -> None:
        self._engine = engine
        self._batch_size = data.batch_size
        self._parts = placed(data.parts)
        if engine.elsewhere:
            parts, workers = len(self._parts), engine.workers
            words = f"in {parts:,} parts, read by {workers:,} workers"
            self.spread = Spread(parts, workers, isinstance(engine, JoblibEngine), words)

    def settle(self, source: SourceActivations) -> None:
        """Say how many samples all parts have, and how many are read at once."""
        source.samples = sum(len(part.data) for part in self._parts)
        source.batch_size = source.block = self._batch_size

    def collected(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> Collected | None:
        """Read all parts once, and merge what the workers send while it comes."""
        reader = PartReader.of(source, reading)
        if not self._engine.elsewhere:
            return reader(source.watched(self._parts, "part", len(self._parts)))
        tasks = _divided(self._parts, plan.tasks)
        see = partial(see_parts, self._parts[:: -(-len(self._parts) // LOOKED_AT)])
        with TemporaryDirectory(prefix="ttapca-fit-") as folder:
            work = SentReader(write_artifact(reader, Path(folder), "the network"))
            run = self._engine.run(tasks, work, needs=[work.reader], ready=see)
            with closing(run):
                return merged(source.watched(_results(run), "task", len(tasks)))


def _divided(parts: Sequence[PlacedPart], tasks: int) -> list[list[PlacedPart]]:
    """Divide parts into runs of about as many samples, so many at most."""
    samples = max(1, parts[-1].first + len(parts[-1].data))
    runs: list[list[PlacedPart]] = [[] for _ in range(tasks)]
    for part in parts:
        middle = part.first + len(part.data) / 2
        runs[min(tasks - 1, int(tasks * middle / samples))].append(part)
    return [run for run in runs if run]


def _results(
    endings: Iterable[Finished[list[PlacedPart], Collected] | Lost[list[PlacedPart]]],
) -> Iterator[Collected]:
    """Yield what workers found; raise where a task is lost, since its samples would be missing."""
    for ending in endings:
        if isinstance(ending, Lost):
            names = ", ".join(str(part.data) for part in ending.task[:NAMED])
            more = f" and {len(ending.task) - NAMED:,} more" if len(ending.task) > NAMED else ""
            raise EngineError(
                f"All parts of the data must be read; these were lost: {names}{more}. "
                f"{ending.reason}."
            )
        yield ending.result


def gathering_of(data: Any, engine: Engine | str | None) -> Gathering:
    """Return who reads data, given what was said about it.

    Raises:
        OptionError: The engine would have no effect, or there is no such engine.
    """
    chosen = engine_of(engine) if engine is None or isinstance(engine, str) else engine
    if several_ranks():
        if engine is None:
            return Ranks(data)
        if chosen.elsewhere:
            raise OptionError(
                "A process reads on an engine, or is one of several ranks; this is a rank. Leave "
                "`engine` out, and give each rank its own data."
            )
    if isinstance(data, PartedData):
        return PartsOnEngine(data, chosen)
    if chosen.elsewhere:
        raise OptionError(
            "An engine reads data in parts, such as `ttapca.datasets.Shards`; found "
            f"{type(data).__name__}, which this process reads as a whole. Leave `engine` out, or "
            "give the data as parts."
        )
    return OneProcess()
