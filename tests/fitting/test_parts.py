"""A fit of parts is the fit of the whole, in any partition and order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from fitting.parted import NETWORKS, Parts, ShuffledEngine, TensorPart, assert_same, parts_of
from oracles import images, left_untouched, small_convnet
from ttapca.engines import SerialEngine
from ttapca.errors import (
    DataFormatError,
    EngineError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.fitting import source_statistics
from ttapca.fitting.fit import plan_fit
from ttapca.fitting.readers import CHECKED_PARTS
from ttapca.fitting.source_statistics import merged
from ttapca.spectral import position_sample

SAMPLES, BATCH = 420, 16
DATA = images(SAMPLES)
CASES = [
    ("BatchNorm", "conv1", "folded"),
    ("BatchNorm", "bn1", "exact"),
    ("BatchNorm", "conv1", "dct"),
    ("GroupNorm", "conv1", "folded"),
    ("LayerNorm", "conv1", "exact"),
]


@pytest.fixture
def small_choices() -> Iterator[None]:
    """Choices that these few samples are too many for, so that they matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(position_sample, "SAMPLES", 300)
        patch.setattr(source_statistics, "MEASURED", 120)
        patch.setattr(source_statistics, "MEASURED_PER_CLASS", 1)
        patch.setattr(source_statistics, "ONE_IN", 4)
        yield


@cache
def whole(network: str, layer: str, route: Any) -> ttapca.FittedFilter:
    """The fit of one loader."""
    return ttapca.fit(NETWORKS[network](), layer, DATA.split(BATCH), 12, route=route)


@pytest.mark.parametrize(("network", "layer", "route"), CASES)
@settings(
    max_examples=4,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    cuts=st.lists(st.integers(0, SAMPLES), max_size=9),
    batch=st.integers(5, 60),
    workers=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_any_partition_and_order(
    network: str,
    layer: str,
    route: Any,
    small_choices: None,
    cuts: list[int],
    batch: int,
    workers: int,
    seed: int,
) -> None:
    parts = parts_of(DATA, cuts, batch)
    data = Parts(parts.parts, BATCH)  # what a batch usually is does not depend on who reads
    engine = ShuffledEngine(seed, workers)
    found = ttapca.fit(NETWORKS[network](), layer, data, 12, route=route, engine=engine)
    assert_same(found, whole(network, layer, route))
    assert engine.done >= min(workers, 1)
    assert found.n_samples_ == SAMPLES


def test_the_choices_matter_in_the_test_above(small_choices: None) -> None:
    """Some samples are not kept, and some images are not measured."""
    found = whole("BatchNorm", "conv1", "dct")
    assert found.energies_ is not None
    assert len(found.energies_) == 210  # every other one
    rule = source_statistics.choose_subsample(small_convnet(), SAMPLES, 5)
    assert 40 < int(rule.of(torch.arange(SAMPLES)).sum()) < SAMPLES


@pytest.mark.parametrize("engine", [None, SerialEngine(), ShuffledEngine(workers=2)])
def test_eight_parts(engine: Any) -> None:
    model = small_convnet()
    with left_untouched(model, DATA[:5]):
        found = ttapca.fit(model, "conv1", parts_of(DATA, range(50, 400, 50)), 12, engine=engine)
    assert_same(found, ttapca.fit(small_convnet(), "conv1", DATA, 12))


def test_float32_and_a_gain_on_top() -> None:
    """A network of float32 rounds by batches, so filters are as near as that."""
    model, data = small_convnet().float(), DATA.float()
    one = ttapca.fit(model, "conv1", data, 12)
    two = ttapca.fit(model, "conv1", parts_of(data, [100, 101, 300]), 12, engine=ShuffledEngine())
    assert_same(one, two, 1e-5)
    batches = images(20, seed=5).float() * 2
    logits = []
    for fitted in (one, two):
        adapter = ttapca.adapt(model, "wiener", filter=fitted)
        logits.append(adapter(batches))
        adapter.detach()
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_processes_of_joblib() -> None:
    pytest.importorskip("joblib")
    data = parts_of(DATA, range(50, 400, 50))
    found = ttapca.fit(small_convnet(), "conv1", data, 12, engine="joblib:2")
    assert_same(found, ttapca.fit(small_convnet(), "conv1", DATA, 12))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_few_results_wait_for_others(sizes: list[int]) -> None:
    """The parent holds two of them; what it holds is counted by a kind of sum."""

    class Sum:
        held = most = 0

        def __init__(self, value: int) -> None:
            self.value = value
            Sum.held += 1
            Sum.most = max(Sum.most, Sum.held)

        def merge(self, other: Sum) -> None:
            self.value += other.value
            Sum.held -= 1

    found = merged(Sum(size) for size in sizes)  # type: ignore[arg-type, misc]
    assert found.value == sum(sizes)  # type: ignore[attr-defined]
    assert Sum.most <= 2


def test_the_plan_says_who_reads() -> None:
    data = parts_of(DATA, [100, 200, 300])
    plan = plan_fit(small_convnet(), "conv1", data, 12, engine=ShuffledEngine(workers=2))
    assert plan.parallelism is not None
    assert (plan.route, plan.samples, plan.tasks, plan.parallelism.workers) == ("folded", 420, 4, 2)
    assert "420 samples in 4 parts, read by 2 workers: up to" in str(plan)
    alone = plan_fit(small_convnet(), "conv1", data, 12)
    assert (alone.parallelism, alone.samples, alone.route) == (None, 420, "folded")


def test_routes_that_need_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    data, engine = parts_of(DATA, [100]), ShuffledEngine()
    for route in ("gram", "randomised"):
        with pytest.raises(OptionError, match=f"The {route} route needs all samples in one proc"):
            ttapca.fit(small_convnet(), "bn1", data, 12, route=route, engine=engine)
        alone = ttapca.fit(small_convnet(), "bn1", data, 12, route=route)
        exact = ttapca.fit(small_convnet(), "bn1", DATA, 12, route="exact")
        assert alone.route == route
        torch.testing.assert_close(
            alone.singular_values_, exact.singular_values_, rtol=1e-6, atol=0
        )
    with monkeypatch.context() as patch:
        patch.setattr("ttapca.fitting.plan.MATRIX_LIMIT", 20)
        plan = plan_fit(small_convnet(), "bn1", data, 12, engine=engine)
        assert (plan.route, plan.reason) == ("dct", "from sums, since several processes read")
        flat = nn.Sequential(nn.Flatten(), nn.Linear(108, 90), nn.ReLU()).double()
        with pytest.raises(OptionError, match=r"The gram route .*`route=\"exact\"` if 90 x 90 "):
            ttapca.fit(flat, "2", data, 12, engine=engine)
    monkeypatch.setattr("ttapca.fitting.plan.FEW_FROM", 20)
    monkeypatch.setattr("ttapca.fitting.plan.SMALL", 10**6)
    few = parts_of(DATA[:100], [50])
    assert plan_fit(small_convnet(), "bn1", few, 12).route == "gram"
    plan = plan_fit(small_convnet(), "bn1", few, 12, engine=engine)
    assert (plan.route, plan.reason) == ("exact", "from sums, since several processes read")


@pytest.mark.parametrize("engine", [None, ShuffledEngine()])
class TestFaults:
    """What a part has that it should not have, wherever it is read."""

    def test_a_number_that_is_none(self, engine: Any) -> None:
        data = DATA.clone()
        data[205, 0, 0, 0] = torch.nan
        parts = parts_of(data, [100, 200], batch=4)
        with pytest.raises(NonFiniteError, match="in the data at batch 1 of part 200-420"):
            ttapca.fit(small_convnet(), "conv1", parts, 12, engine=engine)

    def test_another_shape(self, engine: Any) -> None:
        odd = TensorPart(images(50, shape=(3, 7, 7)), 10, "the odd one")
        data = Parts([TensorPart(DATA, 10), odd], 10)
        with pytest.raises(ShapeError, match="batch 0 of the odd one gave"):
            ttapca.fit(small_convnet(), "conv1", data, 12, engine=engine)

    def test_another_number_of_samples(self, engine: Any) -> None:
        class Wrong(TensorPart):
            def __len__(self) -> int:
                return 7

        data = Parts([TensorPart(DATA, 10), Wrong(DATA[:9], 3, "wrong")], 10)
        with pytest.raises(DataFormatError, match="wrong said 7, and 9 rows came"):
            ttapca.fit(small_convnet(), "conv1", data, 12, engine=engine)

    def test_too_few(self, engine: Any) -> None:
        with pytest.raises(NotEnoughDataError, match=r"at least 32 samples.*Found 31"):
            ttapca.fit(small_convnet(), "conv1", parts_of(DATA[:31], [10]), 5, engine=engine)
        with pytest.raises(NotEnoughDataError, match="needs data; found none"):
            ttapca.fit(small_convnet(), "conv1", Parts([], 5), 5, engine=engine)

    def test_some_parts_are_empty(self, engine: Any) -> None:
        data = parts_of(DATA, [0, 0, 200, 200, 420])
        found = ttapca.fit(small_convnet(), "conv1", data, 12, engine=engine)
        assert_same(found, ttapca.fit(small_convnet(), "conv1", DATA, 12))


def test_a_lost_task_is_named() -> None:
    parts = parts_of(DATA, [100, 200])
    with pytest.raises(EngineError, match=r"must be read; 1 were lost: part .*WorkerDied"):
        ttapca.fit(small_convnet(), "conv1", parts, 12, engine=ShuffledEngine(lost=1))


def test_a_worker_that_does_not_see_the_data() -> None:
    seen = []

    class Hidden(TensorPart):
        def check(self) -> None:
            seen.append(self.name)
            raise DataFormatError(f"{self.name} cannot be seen from here")

    data = Parts([Hidden(DATA[:3], 3, f"hidden {each}") for each in range(3 * CHECKED_PARTS)], 3)
    with pytest.raises(DataFormatError, match="hidden 0 cannot be seen from here"):
        ttapca.fit(small_convnet(), "conv1", data, 12, engine=ShuffledEngine())
    assert seen == ["hidden 0"]


def test_an_engine_needs_parts() -> None:
    for data in (DATA, DATA.split(50)):
        with pytest.raises(OptionError, match=r"data in parts.*found \w+, which this process"):
            ttapca.fit(small_convnet(), "conv1", data, 12, engine="joblib:2")
    with pytest.raises(OptionError, match="found `threads:2`"):
        ttapca.fit(small_convnet(), "conv1", parts_of(DATA, []), 12, engine="threads:2")


def test_progress_counts_parts_or_tasks() -> None:
    class Listener:
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, steps: Any) -> Any:
            self.lengths.append(steps.__length_hint__())
            return itertools.chain(steps)

    for engine, expected in ((None, 5), (ShuffledEngine(workers=1), 4)):
        listener = Listener()
        parts = parts_of(DATA, [50, 150, 250, 350])
        ttapca.fit(small_convnet(), "conv1", parts, 5, progress=listener, engine=engine)
        assert listener.lengths == [expected]


def test_kept_inputs_of_several_arguments() -> None:
    """What is kept to predict again may be more than one tensor."""

    class Lit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_convnet()

        def forward(self, x: Tensor, light: Tensor) -> Tensor:
            return self.net(x * light[:, None, None, None])

    class Pairs(TensorPart):
        def __iter__(self) -> Iterator[Any]:
            return ((batch, batch.mean((1, 2, 3)).abs()) for batch in super().__iter__())

    def both(batch: Any) -> Any:
        return tuple(batch)

    data = Parts([Pairs(DATA[:150], 32), Pairs(DATA[150:], 32)], 32)
    found = ttapca.fit(Lit(), "net.conv1", data, 12, prepare=both, engine=ShuffledEngine())
    one = ttapca.fit(Lit(), "net.conv1", list(Pairs(DATA, 32)), 12, prepare=both)
    assert_same(found, one)
    assert found.agreement_ is not None
