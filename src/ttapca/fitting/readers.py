"""Who reads the data of a fit, and how the statistics of several processes come together.

One process reads a loader as a whole. Data in parts (`PartedData`, such as
`ttapca.datasets.Shards`) can be read by the workers of an engine. In a job of several ranks
(`torchrun`), each rank reads its own data, and all get one filter: statistics are merged as a tree,
so that a thousand ranks take ten rounds, and rank 0 finds the filter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ttapca.engines import Engine, Finished, Lost, engine_of
from ttapca.engines.artifacts import write_artifact
from ttapca.engines.processes import JoblibEngine
from ttapca.errors import EngineError, OptionError, ShapeError
from ttapca.fitting.activations import ALL, SourceActivations
from ttapca.fitting.fitted_filter import FittedFilter, filter_of
from ttapca.fitting.parts import (
    PartedData,
    PartReader,
    PlacedPart,
    SentReader,
    placed,
    see_parts,
)
from ttapca.fitting.plan import FitPlan, RouteChoice, Spread
from ttapca.fitting.source_statistics import Reading, SourceStatistics, merged
from ttapca.fitting.store import filter_config, filter_tensors
from ttapca.spectral.position_sample import Positions
from ttapca.support.process_group import ProcessGroup, several_ranks

Found = TypeVar("Found")
NAMED = 5  # parts in a message
LOOKED_AT = 100  # parts, evenly spread, that a worker on another machine must see

MakePlan = Callable[[RouteChoice], FitPlan]


class DataReader(Protocol):
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

    def read(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> SourceStatistics | None:
        """Read all data once; None if another process has the statistics."""

    def shared(self, find: Callable[[], FittedFilter]) -> FittedFilter:
        """Find the filter in one process, and return it in all of them."""

    def close(self) -> None:
        """Give back what was needed to work together."""


class LocalReader:
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

    def read(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> SourceStatistics | None:
        """Read all data once."""
        del plan  # there is one task
        into = SourceStatistics.empty(reading, source.device)
        source.collect(into, ALL)
        return into

    def shared(self, find: Callable[[], FittedFilter]) -> FittedFilter:
        """Find the filter."""
        return find()


class EngineReader(LocalReader):
    """This process fits, and the workers of an engine read the parts of the data."""

    def __init__(self, data: PartedData, engine: Engine) -> None:
        self._engine = engine
        self._batch_size = data.batch_size
        self._parts = placed(data.parts)
        if engine.remote:
            parts, workers = len(self._parts), engine.workers
            words = f"in {parts:,} parts, read by {workers:,} workers"
            self.spread = Spread(parts, workers, isinstance(engine, JoblibEngine), words)

    def settle(self, source: SourceActivations) -> None:
        """Say how many samples all parts have, and how many are read at once."""
        source.samples = sum(len(part.data) for part in self._parts)
        source.batch_size = source.block = self._batch_size

    def read(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> SourceStatistics | None:
        """Read all parts once, and merge what the workers send while it comes."""
        reader = PartReader.of(source, reading)
        if not self._engine.remote:
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
    endings: Iterable[Finished[list[PlacedPart], SourceStatistics] | Lost[list[PlacedPart]]],
) -> Iterator[SourceStatistics]:
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


def reader_of(data: Any, engine: Engine | str | None) -> DataReader:
    """Return who reads data, given what was said about it.

    Raises:
        OptionError: The engine would have no effect, or there is no such engine.
    """
    chosen = engine_of(engine) if engine is None or isinstance(engine, str) else engine
    if several_ranks():
        if engine is None:
            return RankReader(data)
        if chosen.remote:
            raise OptionError(
                "A process reads on an engine, or is one of several ranks; this is a rank. Leave "
                "`engine` out, and give each rank its own data."
            )
    if isinstance(data, PartedData):
        return EngineReader(data, chosen)
    if chosen.remote:
        raise OptionError(
            "An engine reads data in parts, such as `ttapca.datasets.Shards`; found "
            f"{type(data).__name__}, which this process reads as a whole. Leave `engine` out, or "
            "give the data as parts."
        )
    return LocalReader()


class RankReader:
    """Every rank of the process group fits, together with all others.

    Args:
        data: What this rank was given.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._group = ProcessGroup()
        count = self._group.count
        words = f"of {count:,} ranks"
        self.spread: Spread | None = Spread(count, count, here=False, words=words, by_parts=False)
        # Unless all know how many samples they have, ranks take turns. With an odd step each of
        # them has as large a share of the positions that a power of two divides.
        self._exact = False
        self._positions = Positions(self._group.rank, count | 1)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def each(self, step: Callable[[], Found]) -> Found:
        """Take a step in every rank; where one fails, all do.

        Raises:
            EngineError: The step failed in another rank.
        """
        failure: Exception | None = None
        try:
            found = step()
        except Exception as error:
            failure = error
        said = "" if failure is None else f"{type(failure).__name__}: {failure}"
        messages = self._group.told(said)
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                raise EngineError(
                    f"All ranks fit together; rank {rank} could not. {message} Correct that, and "
                    "start all of them again."
                )
        return found

    def settle(self, source: SourceActivations) -> None:
        """Tell the source how many samples all ranks have, and find out where its own begin.

        Raises:
            OptionError: The ranks do not fit the same filter.
        """
        facts = {
            "layer": source.path,
            "weights": _digest(source.model),
            "shape of a sample": list(source.data_shape),
            "classes": source.classes,
        }
        counts = {"exact": _exact_count(self._data), "samples": source.samples}
        block = self._data.batch_size if isinstance(self._data, PartedData) else source.block
        told = self._group.told({**facts, **counts, "block": block})
        for name, fact in facts.items():
            others = [rank for rank, each in enumerate(told) if each[name] != told[0][name]]
            if others:
                raise OptionError(
                    f"All ranks fit one filter together; rank {others[0]} has other {name} than "
                    f"rank 0: {told[others[0]][name]} for {told[0][name]} (here {fact})."
                )
        exact = [each["exact"] for each in told]
        self._exact = None not in exact
        samples = exact if self._exact else [each["samples"] for each in told]
        if self._exact:
            self._positions = Positions(sum(exact[: self._group.rank]))
        source.samples = None if None in samples else sum(samples)
        source.block = max(each["block"] for each in told)

    def plan(self, make: Callable[[RouteChoice], FitPlan], asked: RouteChoice) -> FitPlan:
        """Return the plan of this rank, with the route that rank 0 would take."""
        plan = self.each(lambda: make(asked))
        route = self._group.told(plan.route)[0]
        return self.each(lambda: plan if plan.route == route else make(route))

    def read(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> SourceStatistics | None:
        """Read the data of this rank, and send to or merge those of others; None but in rank 0."""
        del plan  # there is one task for each rank
        own = self.each(lambda: self._read_own(source, reading))
        rank, count, step = self._group.rank, self._group.count, 1
        while step < count:
            if rank % (2 * step):
                self._group.send(own.tensors(), to=rank - step)
                return None
            if rank + step < count:
                received = self._group.receive(rank + step)
                own.merge(SourceStatistics.from_tensors(reading, received, source.inputs))
            step *= 2
        return own

    def _read_own(self, source: SourceActivations, reading: Reading) -> SourceStatistics:
        if self._exact and isinstance(self._data, PartedData):
            parts = placed(self._data.parts, self._positions.first)
            reader = PartReader.of(source, reading)
            return reader(source.watched(parts, "part", len(parts)))
        into = SourceStatistics.empty(reading, source.device)
        rows, said = source.collect(into, self._positions), _exact_count(self._data)
        if self._exact and rows != said:
            raise ShapeError(
                f"The layer must give one row for each sample; it gave {rows:,} for {said:,}. Give "
                "the data as a loader, which need not say how many samples it has."
            )
        return into

    def shared(self, find: Callable[[], FittedFilter]) -> FittedFilter:
        """Find the filter in rank 0, and return it in all of them."""
        root = self._group.rank == 0
        fitted = self.each(lambda: find() if root else None)
        if fitted is not None:
            config = filter_config(fitted, "float64")
            self._group.broadcast(filter_tensors(fitted, torch.float64), config)
            return fitted
        tensors, config = self._group.broadcast()
        return filter_of(config, tensors)


def _exact_count(data: Any) -> int | None:
    """Return how many samples there surely are; None where a loader says so only about."""
    if isinstance(data, PartedData):
        return sum(map(len, data.parts))
    if isinstance(data, (Tensor, np.ndarray)):
        return len(data)
    if isinstance(data, (tuple, list)) and all(isinstance(each, Tensor) for each in data):
        return sum(map(len, data))
    return None


def _digest(model: nn.Module) -> str:
    """Return a hash of all weights and buffers, since ranks could have different ones."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(tensor, Tensor):
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
