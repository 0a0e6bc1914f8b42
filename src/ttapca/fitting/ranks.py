"""A fit in a job of several ranks (`torchrun`): each reads its own data, all get one filter.

What the ranks collect is merged as a tree: in each round half of those that still have something
send it to a neighbour, so that a thousand ranks take ten rounds. Rank 0 then finds the filter and
sends it to all. A rank that fails tells the others, so that nobody waits for it: all of them raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ttapca.errors import EngineError, OptionError, ShapeError
from ttapca.fitting.activations import SourceActivations
from ttapca.fitting.collected import Collected, Reading
from ttapca.fitting.fit_plan import FitPlan, RouteChoice
from ttapca.fitting.fitted_filter import FittedFilter, filter_of
from ttapca.fitting.part_reader import PartedData, PartReader, placed
from ttapca.fitting.spread import Spread
from ttapca.fitting.store import filter_config, filter_tensors
from ttapca.spectral.even_sample import Positions
from ttapca.support.process_group import ProcessGroup

Found = TypeVar("Found")


class Ranks:
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

    def collected(
        self, source: SourceActivations, reading: Reading, plan: FitPlan
    ) -> Collected | None:
        """Read the data of this rank, and send to or merge those of others; None but in rank 0."""
        del plan  # there is one task for each rank
        own = self.each(lambda: self._read(source, reading))
        rank, count, step = self._group.rank, self._group.count, 1
        while step < count:
            if rank % (2 * step):
                self._group.send(own.tensors(), to=rank - step)
                return None
            if rank + step < count:
                received = self._group.receive(rank + step)
                own.merge(Collected.from_tensors(reading, received, source.inputs))
            step *= 2
        return own

    def _read(self, source: SourceActivations, reading: Reading) -> Collected:
        if self._exact and isinstance(self._data, PartedData):
            parts = placed(self._data.parts, self._positions.first)
            reader = PartReader.of(source, reading)
            return reader(source.watched(parts, "part", len(parts)))
        into = Collected.nothing(reading, source.device)
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
