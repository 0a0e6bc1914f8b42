"""The readers of a fit's data: this process, the workers of an engine, or all ranks of a job.

In a job of several ranks (`torchrun`), each rank reads its own data, and all get one filter:
statistics are merged as a tree, so that a thousand ranks take ten rounds, and rank 0 finds the
filter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ttapca.engines import Engine, Finished, Lost, engine_of
from ttapca.engines.artifacts import Artifact, write_artifact
from ttapca.errors import DataFormatError, EngineError, OptionError, ShapeError
from ttapca.fitting.activations import SourceActivations
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import FitPlan, Parallelism, RouteChoice
from ttapca.fitting.source_statistics import PassConfig, SourceStatistics, merged
from ttapca.spectral.position_sample import Positions
from ttapca.support.modules import evaluation_mode

Found = TypeVar("Found")
Find = Callable[[SourceStatistics], FittedFilter]
NAMED = 5  # parts in a message
CHECKED_PARTS = 100  # evenly spaced ones, that a worker on another machine must find

# The layer of a network has one hook at a time; a worker of dask may have many threads.
_one_at_a_time = Lock()


@runtime_checkable
class PartedData(Protocol):
    """Data in parts that can be read independently; as a loader, all of them in order.

    Each part has a length, in samples, and yields batches as a loader does. Parts are pickled if an
    engine reads them in other processes. `str(part)` names a part in messages. A method `check`, if
    a part has one, raises in a process that does not see its data.
    """

    parts: Sequence[Any]
    batch_size: int  # except for the last batch of a part

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of all parts."""


PlacedPart = tuple[Any, int]  # a part, and the position of its first sample among all


def placed(parts: Sequence[Any], first: int = 0) -> list[PlacedPart]:
    """Place parts one after the other, the first one's samples at position `first` and on."""
    return list(zip(parts, itertools.accumulate(map(len, parts), initial=first), strict=False))


class PartReader:
    """Collects from parts of the data what a fit needs; pickled if an engine reads elsewhere."""

    def __init__(self, source: SourceActivations, config: PassConfig) -> None:
        self.model, self.layer, self.config = source.model, source.path, config
        self.prepare, self.logits = source.prepare, source.find_logits

    def __call__(self, parts: Iterable[PlacedPart]) -> SourceStatistics:
        """Read some parts, one after the other."""
        into: SourceStatistics | None = None
        with torch.inference_mode(False), torch.no_grad(), evaluation_mode(self.model):
            for part, first in parts:
                source = SourceActivations(
                    self.model, self.layer, part, None, self.prepare, self.logits
                )
                into = into or SourceStatistics(self.config, source.device)
                found = source.collect(into, Positions(first), str(part))
                if found != len(part):
                    raise DataFormatError(
                        "A part of the data has as many samples as it says, and the layer gives "
                        f"one row for each: {part} said {len(part):,}, and {found:,} "
                        "rows came. Leave its file alone while it is read."
                    )
        return into or SourceStatistics(self.config)


def _read_parts(reader: Artifact[PartReader], parts: Sequence[PlacedPart]) -> SourceStatistics:
    with _one_at_a_time:
        return reader.open()(parts)


def _check_parts(parts: Iterable[PlacedPart]) -> None:
    for part, _ in parts:
        if hasattr(part, "check"):
            part.check()


class DataReader:
    """Reads the data as a whole, in this process; other readers work with other processes."""

    # How the reading is divided over processes; None if this one reads.
    parallelism: Parallelism | None = None
    _parts: Sequence[PlacedPart] = ()
    _positions = Positions()  # of the samples among all

    def close(self) -> None:
        """Give back what was needed to work together."""

    def each(self, step: Callable[[], Found]) -> Found:
        """Take a step in every process that fits; if one fails, all do."""
        return step()

    def settle(self, source: SourceActivations) -> None:
        """Tell the source what is known about all of the data, once it was probed."""

    def plan(self, make: Callable[[RouteChoice], FitPlan], asked: RouteChoice) -> FitPlan:
        """Return a plan with the route that all processes take; `make` makes that of this one."""
        return make(asked)

    def read(
        self, source: SourceActivations, config: PassConfig, plan: FitPlan, find: Find
    ) -> FittedFilter:
        """Read all data once, find the filter in one process, and return it in all of them."""
        return find(self._statistics(source, config, plan))

    def _statistics(
        self, source: SourceActivations, config: PassConfig, plan: FitPlan
    ) -> SourceStatistics:
        del plan  # there is one task
        if self._parts:
            reader = PartReader(source, config)
            return reader(source.watched(self._parts, len(self._parts)))
        into = SourceStatistics(config, source.device)
        source.collect(into, self._positions)
        return into


class EngineReader(DataReader):
    """This process fits, and the workers of an engine read the parts of the data."""

    def __init__(self, data: PartedData, engine: Engine) -> None:
        self._engine = engine
        self._batch_size = data.batch_size
        self._parts = placed(data.parts)
        if engine.remote:
            parts, workers = len(self._parts), engine.workers
            words = f"in {parts:,} parts, read by {workers:,} workers"
            self.parallelism = Parallelism(parts, workers, words)

    def settle(self, source: SourceActivations) -> None:
        """Say how many samples all parts have, and how many are read at once."""
        source.samples = sum(len(part) for part, _ in self._parts)
        source.batch_size = source.block = self._batch_size

    def _statistics(
        self, source: SourceActivations, config: PassConfig, plan: FitPlan
    ) -> SourceStatistics:
        if not self._engine.remote:
            return super()._statistics(source, config, plan)
        tasks = _divided(self._parts, plan.tasks)
        check = partial(_check_parts, self._parts[:: -(-len(self._parts) // CHECKED_PARTS)])
        with TemporaryDirectory(prefix="ttapca-fit-") as folder:
            network = write_artifact(PartReader(source, config), Path(folder), "the network")
            work = partial(_read_parts, network)
            with closing(self._engine.run(tasks, work, needs=[network], ready=check)) as run:
                return merged(source.watched(_results(run), len(tasks)))


def _divided(parts: Sequence[PlacedPart], tasks: int) -> list[list[PlacedPart]]:
    """Divide parts into runs of about as many parts."""
    ends = [len(parts) * number // tasks for number in range(tasks + 1)]
    return [list(parts[a:b]) for a, b in itertools.pairwise(ends)]


def _results(
    endings: Iterable[Finished[list[PlacedPart], SourceStatistics] | Lost[list[PlacedPart]]],
) -> Iterator[SourceStatistics]:
    """Yield the results of workers; raise if a task is lost, since its samples would be missing."""
    for ending in endings:
        if isinstance(ending, Lost):
            names = ", ".join(str(part) for part, _ in ending.task[:NAMED])
            raise EngineError(
                f"All parts of the data must be read; {len(ending.task):,} were lost: {names}. "
                f"{ending.reason}."
            )
        yield ending.result


def several_ranks() -> bool:
    """Return whether this process is one of several in a `torch.distributed` job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def reader_of(
    data: Any, engine: Engine | str | None, groups: Sequence[Hashable] | None = None
) -> DataReader:
    """Return the reader for data, an engine and groups as `ttapca.fit` takes them."""
    ranks = several_ranks()
    if engine is None and ranks:
        if groups is not None:
            raise OptionError(
                "`groups` names a group for each sample in order of the data, and the samples of "
                "several ranks have no such order. Leave `groups` out, or fit in one rank alone "
                "with `engine=SerialEngine()`."
            )
        return RankReader(data)
    parted = isinstance(data, PartedData)
    if engine is None and not parted:
        return DataReader()
    chosen = engine_of(engine) if engine is None or isinstance(engine, str) else engine
    if ranks and chosen.remote:
        raise OptionError(
            "A process reads on an engine, or is one of several ranks; this is a rank. Leave "
            "`engine` out, and give each rank its own data."
        )
    if parted:
        return EngineReader(data, chosen)
    if chosen.remote:
        raise OptionError(
            "An engine reads data in parts, such as `ttapca.datasets.Shards`; found "
            f"{type(data).__name__}, which this process reads as a whole. Leave `engine` out, or "
            "give the data as parts."
        )
    return DataReader()


class ProcessGroup:
    """All ranks of the job, which send each other pickled objects."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        # Messages lie in the memory of the CPU, whatever the job's own backend is. One rank may
        # decompose a large matrix while the others wait.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1))

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def gather(self, own: Found) -> list[Found]:
        """Return the objects of all ranks, given that of this one."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, own, group=self._group)
        return found

    def send(self, found: object, *, to: int) -> None:
        """Send an object to another rank, which must receive it."""
        dist.send_object_list([found], to, group=self._group)

    def receive(self, sender: int) -> Any:
        """Return the object that another rank sends to this one."""
        found = [None]
        dist.recv_object_list(found, sender, group=self._group)
        return found[0]

    def broadcast(self, found: Any) -> Any:
        """Return the object of rank 0, in all ranks."""
        shared = [found]
        dist.broadcast_object_list(shared, 0, group=self._group)
        return shared[0]


class RankReader(DataReader):
    """Every rank of the process group reads data of its own, and fits together with all others."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._group = ProcessGroup()
        count = self._group.count
        self.parallelism = Parallelism(count, count, f"of {count:,} ranks")
        # Unless all know how many samples they have, ranks take turns. With an odd step each of
        # them has as large a share of the positions that a power of two divides.
        self._exact = False
        self._positions = Positions(self._group.rank, count | 1)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def each(self, step: Callable[[], Found]) -> Found:
        """Take a step in every rank; if one fails, all do."""
        try:
            found = step()
        except Exception as error:
            self._group.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, message in enumerate(self._group.gather("")):
            if message:
                raise EngineError(
                    f"All ranks fit together; rank {rank} could not. {message} Correct that, and "
                    "start all of them again."
                )
        return found

    def settle(self, source: SourceActivations) -> None:
        """Tell the source how many samples all ranks have, and find out where its own begin."""
        own = {
            "layer": source.path,
            "weights": _digest(source.model),
            "shape of a sample": list(source.data_shape),
            "classes": source.classes,
        }
        block = self._data.batch_size if isinstance(self._data, PartedData) else source.block
        everyone = self._group.gather((own, _exact_count(self._data), source.samples, block))
        facts, exact, samples, blocks = zip(*everyone, strict=True)
        for name, (rank, each) in itertools.product(own, enumerate(facts)):
            if each[name] != facts[0][name]:
                raise OptionError(
                    f"All ranks fit one filter together; rank {rank} has other {name} than rank 0: "
                    f"{each[name]} for {facts[0][name]}. Give all ranks the same arguments."
                )
        self._exact = None not in exact
        if self._exact:
            samples = exact
            self._positions = Positions(sum(exact[: self._group.rank]))
            if isinstance(self._data, PartedData):
                self._parts = placed(self._data.parts, self._positions.first)
        source.samples = None if None in samples else sum(samples)
        source.block = max(blocks)

    def plan(self, make: Callable[[RouteChoice], FitPlan], asked: RouteChoice) -> FitPlan:
        """Return the plan of this rank, with the route that rank 0 would take."""
        plan = self.each(lambda: make(asked))
        route = self._group.broadcast(plan.route)
        return self.each(lambda: plan if plan.route == route else make(route))

    def read(
        self, source: SourceActivations, config: PassConfig, plan: FitPlan, find: Find
    ) -> FittedFilter:
        """Read the data of this rank, merge those of all, and find the filter in rank 0."""
        own = self.each(lambda: self._statistics(source, config, plan))
        rank, count, step = self._group.rank, self._group.count, 1
        while step < count:
            if rank % (2 * step):
                self._group.send(own, to=rank - step)
                break
            if rank + step < count:
                own.merge(self._group.receive(rank + step))
            step *= 2
        fitted: FittedFilter = self._group.broadcast(self.each(lambda: None if rank else find(own)))
        return fitted

    def _statistics(
        self, source: SourceActivations, config: PassConfig, plan: FitPlan
    ) -> SourceStatistics:
        own = super()._statistics(source, config, plan)
        said = _exact_count(self._data)
        if self._exact and own.samples != said:
            raise ShapeError(
                f"The layer must give one row for each sample; it gave {own.samples:,} for "
                f"{said:,}. Give the data as a loader, which need not say how many samples it has."
            )
        return own


def _exact_count(data: Any) -> int | None:
    """Return how many samples there surely are; None for a loader, which says so only about."""
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
