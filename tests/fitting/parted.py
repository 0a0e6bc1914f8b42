"""Data in parts, engines that end tasks in any order; networks, and filters to compare."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from golden.record import with_weights
from oracles import small_convnet
from small_networks import TokenNet, group_norm_convnet
from ttapca import FittedFilter
from ttapca.engines import Finished, Lost
from ttapca.fitting.store import filter_config, filter_tensors, read_folder, write_folder

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": small_convnet,
    "GroupNorm": lambda: with_weights(group_norm_convnet().double()).eval(),
    "LayerNorm": lambda: with_weights(TokenNet().double()).eval(),
}


def rewrite(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Path:
    """Change a saved filter as a stranger would, with checksums that fit."""
    config, tensors = read_folder(folder)
    change(config, tensors)
    write_folder(folder, config, tensors, "")
    return folder


@dataclass(frozen=True, eq=False)
class TensorPart:
    """A part that is in memory."""

    samples: Tensor
    batch: int
    name: str = "a tensor"

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples.split(self.batch) if len(self) else ())

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Parts:
    """Some of them."""

    parts: Sequence[TensorPart]
    batch_size: int

    def __iter__(self) -> Iterator[Tensor]:
        return (batch for part in self.parts for batch in part)


def parts_of(samples: Tensor, cuts: Iterable[int], batch: int = 256) -> Parts:
    """Cut samples at these places."""
    ends = pairwise([0, *sorted(cuts), len(samples)])
    return Parts([TensorPart(samples[a:b], batch, f"part {a}-{b}") for a, b in ends], batch)


@dataclass
class ShuffledEngine:
    """Does all tasks in this process, and lets them end in a random order."""

    seed: int = 0
    workers: int = 3
    remote: bool = True
    lost: int = 0  # tasks that end so
    done: int = 0

    def run(
        self,
        tasks: Iterable[Any],
        work: Callable[[Any], Any],
        *,
        needs: Sequence[Any] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Generator[Any, None, None]:
        assert tell is None
        assert len(needs) == 1
        assert ready is not None
        ready()
        todo = list(tasks)
        Random(self.seed).shuffle(todo)
        for number, task in enumerate(todo):
            if number < self.lost:
                yield Lost(task, "WorkerDied")
                continue
            self.done += 1
            yield Finished(task, pickle.loads(pickle.dumps(work(task))))


def differences(one: FittedFilter, two: FittedFilter) -> dict[str, float]:
    """The largest relative difference of every tensor and number of two filters.

    What is kept as float32 may differ by its last digit, so it is compared with that taken off.
    """
    tensors = [filter_tensors(each, torch.float64) for each in (one, two)]
    configs = [filter_config(each, "float64") for each in (one, two)]
    facts = [config.pop("source") for config in configs]
    assert configs[0] == configs[1]
    assert tensors[0].keys() == tensors[1].keys()
    assert facts[0].keys() == facts[1].keys()
    found = {name: abs(facts[1][name] - fact) / (fact or 1.0) for name, fact in facts[0].items()}
    for name, first in tensors[0].items():
        second = tensors[1][name]
        assert (first.shape, first.dtype) == (second.shape, second.dtype), name
        scale = float(first.double().abs().max()) or 1.0
        away = float((first.double() - second.double()).abs().max()) / scale
        found[name] = max(0.0, away - 1.2e-7) if first.dtype == torch.float32 else away
    return found


def assert_same(one: FittedFilter, two: FittedFilter, tolerance: float = 1e-10) -> None:
    """Two filters are equal up to the rounding of sums."""
    worst = {name: away for name, away in differences(one, two).items() if away > tolerance}
    assert worst == {}
