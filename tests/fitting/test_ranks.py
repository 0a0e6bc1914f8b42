"""Several ranks fit together, and each gets the filter of all data."""

from __future__ import annotations

import copy
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import ttapca
from fitting.parted import assert_same, parts_of
from fitting.rank_job import CUT, DATA
from golden.record import with_weights
from oracles import small_convnet
from small_networks import group_norm_convnet
from ttapca.errors import EngineError, NonFiniteError, ShapeError
from ttapca.fitting import readers
from ttapca.fitting.readers import several_ranks
from ttapca.fitting.store import filter_arguments


def saved(file: Path) -> ttapca.FittedFilter:
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        config = json.loads(opened.metadata()["config"])
        return ttapca.FittedFilter(**filter_arguments(config, tensors))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks have left what they found."""
    folder = tmp_path_factory.mktemp("job")
    program = Path(__file__).with_name("rank_job.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, program, str(rank), "2", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(started):
            output, _ = process.communicate(timeout=1200)
            assert process.returncode == 0, f"rank {rank}: {output}"
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.mark.parametrize("case", ["tensors", "loader"])
def test_both_ranks_get_the_filter_of_all_data(job: Path, case: str) -> None:
    first, second = (saved(job / f"{case} {rank}.safetensors") for rank in range(2))
    assert_same(first, second, 0.0)
    whole = ttapca.fit(small_convnet(), "conv1", DATA, 12)
    if case == "tensors":
        assert_same(first, whole)
        return
    # Loaders take turns, with an odd step: samples are calibrated with in another order.
    assert first.n_samples_ == 420
    for name in ("singular_values_", "center_", "mean_"):
        found, expected = getattr(first, name), getattr(whole, name)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_one_rank_can_fit_alone(job: Path) -> None:
    for rank, samples in enumerate((DATA[:CUT], DATA[CUT:])):
        found = saved(job / f"alone {rank}.safetensors")
        assert_same(found, ttapca.fit(small_convnet(), "conv1", samples, 12))


def test_where_one_rank_fails_all_do(job: Path) -> None:
    first, second = (json.loads((job / f"{rank}.json").read_text()) for rank in range(2))
    failed = "NaN in rank 1"
    assert first[failed].startswith("EngineError: All ranks fit together; rank 1 could not. NonFin")
    assert second[failed].startswith("NonFiniteError: Fitting needs finite numbers")
    for messages in (first, second):
        assert "The gram route needs all samples in one process" in messages["gram"]
        assert "rank 1 has other weights than rank 0" in messages["other weights"]
    assert "reads on an engine, or is one of several ranks" in second["an engine"]
    assert first.keys() | {"an engine"} == second.keys()


class Meeting:
    """Ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mine = threading.local()
        self.barrier = threading.Barrier(count, timeout=300)
        self.table: list[Any] = [None] * count
        self.post: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(count) for b in range(count)
        }

    def group(self) -> Group:
        return Group(self, self.mine.rank)


class Group:
    """What `ProcessGroup` is for such ranks."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.count = meeting, rank, meeting.count

    def close(self) -> None: ...

    def gather(self, own: Any) -> list[Any]:
        self.meeting.table[self.rank] = pickle.dumps(own)
        self.meeting.barrier.wait()
        found = [pickle.loads(each) for each in self.meeting.table]
        self.meeting.barrier.wait()
        return found

    def send(self, found: object, *, to: int) -> None:
        self.meeting.post[self.rank, to].put(pickle.dumps(found))

    def receive(self, sender: int) -> Any:
        return pickle.loads(self.meeting.post[sender, self.rank].get(timeout=300))

    def broadcast(self, found: Any) -> Any:
        return self.gather(found)[0]


def network() -> nn.Module:
    """One that hesitates, so that what was kept to predict again makes a difference."""
    return with_weights(group_norm_convnet().double())


def together(
    count: int,
    data: Any,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module] = network,
    components: int = 12,
    **options: Any,
) -> list[Any]:
    """What each of several threads gets of a common fit, a filter or an error."""
    meeting = Meeting(count)
    monkeypatch.setattr("ttapca.fitting.readers.several_ranks", lambda: True)
    monkeypatch.setattr(readers, "ProcessGroup", meeting.group)

    def fit(rank: int) -> Any:
        meeting.mine.rank = rank
        try:
            return ttapca.fit(make(), "conv1", data[rank], components, **options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(fit, range(count)))


@pytest.mark.parametrize(
    ("count", "route", "in_parts"),
    [(2, "exact", False), (3, "dct", True), (5, "folded", False), (5, "exact", True)],
)
def test_any_number_of_ranks(
    count: int, route: Any, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = [60 * rank + 7 * rank**2 for rank in range(count)]
    ends = [*cuts[1:], len(DATA)]
    data: list[Any] = [DATA[a:b] for a, b in zip(cuts, ends, strict=True)]
    if in_parts:
        data = [parts_of(each, [20, 33]) for each in data]
    filters = together(count, data, monkeypatch, route=route)
    monkeypatch.undo()
    whole = ttapca.fit(network(), "conv1", DATA, 12, route=route)
    assert whole.mirror_agreement_ is not None
    assert 0 < whole.mirror_agreement_ < 1
    for each in filters:
        assert_same(each, whole)


def test_errors_reach_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [DATA[:100], DATA[100:200] * torch.nan, DATA[200:]]
    first, second, third = together(3, data, monkeypatch)
    assert isinstance(second, NonFiniteError)
    for other in (first, third):
        assert isinstance(other, EngineError)
        assert "rank 1 could not. NonFiniteError" in str(other)


def test_loaders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [torch.utils.data.DataLoader(DATA[rank::3], batch_size=50) for rank in range(3)]
    filters = together(3, data, monkeypatch)
    monkeypatch.undo()
    order = torch.utils.data.DataLoader(DATA, batch_size=50)
    for each in filters:  # three is odd, so that turns are the order of the whole
        assert_same(each, ttapca.fit(network(), "conv1", order, 12))


def test_loaders_beside_parts_take_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if all ranks know how many samples they have, they come one after the other."""
    loader = torch.utils.data.DataLoader(DATA[0::3], batch_size=50)
    data = [loader, parts_of(DATA[1::3], [20], 50), parts_of(DATA[2::3], [], 50)]
    filters = together(3, data, monkeypatch)
    monkeypatch.undo()
    order = torch.utils.data.DataLoader(DATA, batch_size=50)
    assert_same(filters[0], ttapca.fit(network(), "conv1", order, 12))


def test_a_layer_with_several_rows_for_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Linear(54, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.conv1(x.reshape(-1, 54)).reshape(len(x), -1)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Windows()
    data = [DATA[:100], DATA[100:]]
    first, second = together(2, data, monkeypatch, lambda: copy.deepcopy(model), components=2)
    assert isinstance(first, ShapeError)
    assert "one row for each sample; it gave 200 for 100. Give the data as a loader" in str(first)
    assert isinstance(second, ShapeError)


def test_this_process_is_alone() -> None:
    assert not several_ranks()
