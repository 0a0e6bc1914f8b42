"""A pool answers a stream as an adapter does that has it alone, and their states are the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import scripted_classes
import ttapca
from adapters import NETWORKS
from adapters import fitted as filter_of
from oracles import images
from small_networks import with_outputs
from ttapca import networks
from ttapca.datasets import read_cifar10_500
from ttapca.serving import PoolLimits, PoolObserver, StreamPool
from ttapca.serving.stream_record import Mode

SAME = 1e-4  # in logits: passes of other sizes round in other ways
NAME = "cifar10-resnet20"
Batches = list[Tensor]
Adapted = dict[str, tuple[list[Tensor], ttapca.Health]]


@functools.cache
def photographs() -> dict[str, Tensor]:
    """The 500 photographs of the package, and what came of them; classes one after the other."""
    known = read_cifar10_500()
    order = torch.from_numpy(known.labels).argsort(stable=True)
    clean = torch.from_numpy(known.images)[order].permute(0, 3, 1, 2).float() / 255
    generator = torch.Generator().manual_seed(0)
    noisy = (clean + 0.15 * torch.randn(clean.shape, generator=generator)).clamp(0, 1)
    pale, hit = 0.5 + 0.3 * (clean - 0.5), torch.rand(clean.shape, generator=generator) < 0.1
    speckled = clean.where(~hit, 1.0)
    found = {"clean": clean, "noisy": noisy, "speckled": speckled}
    kinds = torch.stack([clean, noisy, pale])
    found["mixed"] = kinds[torch.arange(len(clean)) % 3, torch.arange(len(clean))]
    return found


def in_no_order(condition: str, size: int, images: int) -> Batches:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    return list(photographs()[condition][order[:images]].split(size))


def by_class(condition: str, size: int, images: int) -> Batches:
    return list(photographs()[condition][:images].split(size))


SIZES = [1, 7, 1, 64, 3, 1, 40, 120, 1, 62]
STREAMS = {
    "clean-shuffled": lambda: in_no_order("clean", 20, 120),
    "clean-by-class": lambda: by_class("clean", 20, 120),
    "clean-by-class-one-by-one": lambda: by_class("clean", 1, 40),
    "noisy-shuffled": lambda: in_no_order("noisy", 20, 120),
    "noisy-by-class": lambda: by_class("noisy", 20, 120),
    "noisy-shuffled-one-by-one": lambda: in_no_order("noisy", 1, 40),
    "noisy-by-class-one-by-one": lambda: by_class("noisy", 1, 60),
    "speckled-by-class": lambda: by_class("speckled", 20, 120),
    "mixed-shuffled": lambda: in_no_order("mixed", 32, 192),
    "mixed-shuffled-one-by-one": lambda: in_no_order("mixed", 1, 70),
    "mixed-by-class": lambda: list(photographs()["mixed"][: sum(SIZES)].split(SIZES)),
    "noise-that-ends": lambda: by_class("noisy", 16, 96) + by_class("clean", 16, 96),
}
# What the health of a stream says in numbers.
NUMBERS = ("p_value", "shift", "size", "ordered", "run_length", "outliers", "batch_weight")


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return networks.load(NAME)


@pytest.fixture(scope="module")
def fitted() -> ttapca.FittedFilter:
    return ttapca.load(networks.packaged_filters()[NAME])


def adapter_of(model: nn.Module, fitted: ttapca.FittedFilter, **given: Any) -> ttapca.Adapter:
    """An adapter with an alarm, as a pool has one."""
    given = {"filter": fitted, "forgetting": "online", "on_shift": nobody, **given}
    return ttapca.adapt(model, "wiener", **given)


def nobody(health: ttapca.Health) -> None:
    """Hear of a shift."""


@pytest.fixture(scope="module")
def adapted(network: nn.Module, fitted: ttapca.FittedFilter) -> Adapted:
    """What an adapter answers to each stream, and the health of it then."""
    found = {}
    with adapter_of(network, fitted) as adapter:
        for name, make in STREAMS.items():
            stream = adapter.stream(name)
            found[name] = [stream(batch) for batch in make()], stream.health
    return found


@pytest.fixture
def pool(network: nn.Module, fitted: ttapca.FittedFilter) -> Iterator[StreamPool]:
    with StreamPool(network, fitted) as made:
        yield made


class Passes(PoolObserver):
    """Counts the streams of each pass."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def passed(self, images: int, streams: int, seconds: float) -> None:
        self.streams.append(streams)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=0, atol=SAME)


def assert_same_health(found: ttapca.Health, expected: ttapca.Health) -> None:
    assert (found.images, found.skipped) == (expected.images, expected.skipped)
    assert (found.conditions, found.shifted) == (expected.conditions, expected.shifted)
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-3), name
    assert found.composition == pytest.approx(expected.composition, abs=1e-3)
    ratios = [[band.ratio for band in each.bands] for each in (found, expected)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)


def asked_together(pool: StreamPool, turn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ask for several streams at once, so that they share a pass."""
    with pool._news:  # no pass begins before all have asked
        asked = {name: pool.submit(name, batch) for name, batch in turn.items()}
    return {name: each.result(60).logits for name, each in asked.items()}


def asked_in_turns(pool: StreamPool, streams: dict[str, Batches]) -> dict[str, list[Tensor]]:
    """Ask for the next batch of every stream that has one, again and again."""
    found: dict[str, list[Tensor]] = {name: [] for name in streams}
    for number in range(max(map(len, streams.values()))):
        turn = {name: own[number] for name, own in streams.items() if number < len(own)}
        for name, logits in asked_together(pool, turn).items():
            found[name].append(logits)
    return found


# One network of the package, with what it knows of classes.


def test_the_streams_are_what_their_names_say(
    adapted: Adapted,
) -> None:
    """Else the tests below would not look at what they are for."""
    said = {name: health for name, (_, health) in adapted.items()}
    for name, health in said.items():
        assert health.shift is not None
        assert health.ordered is not None
        if name == "noise-that-ends":  # and is not present any more
            assert (health.conditions, health.shift) == (2, 0.0)
        elif not name.startswith("clean"):
            assert health.shift > 0.5, name
        if len(STREAMS[name]()) < 40 and name not in ("mixed-by-class", "noise-that-ends"):
            assert (health.ordered > 0.5) == ("by-class" in name), name
        if name.startswith("mixed"):
            assert health.conditions > 1, name
    assert said["clean-shuffled"].shift == 0


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_alone(name: str, pool: StreamPool, adapted: Adapted) -> None:
    expected, health = adapted[name]
    assert_same([pool.predict(name, batch).logits for batch in STREAMS[name]()], expected)
    assert_same_health(pool.status(name).health, health)


def test_streams_that_share_passes(
    network: nn.Module,
    fitted: ttapca.FittedFilter,
    adapted: Adapted,
) -> None:
    """Also beside streams in shadow, and streams that are only watched."""
    seen, limits = Passes(), PoolLimits(max_batch=1000)
    with StreamPool(network, fitted, observer=seen, limits=limits) as pool:
        streams = {name: make() for name, make in STREAMS.items()}
        beside: dict[str, Mode] = {"in-shadow": "shadow", "watched": "off"}
        for name, mode in beside.items():
            pool.set_mode(name, mode)
        answers = asked_in_turns(pool, streams | dict.fromkeys(beside, streams["noisy-by-class"]))
        assert seen.streams[:6] == [len(STREAMS) + 2] * 6
        for name, (expected, health) in adapted.items():
            assert_same(answers[name], expected)
            assert_same_health(pool.status(name).health, health)
        plain = untouched(streams["noisy-by-class"])
    for name in beside:
        assert_same(answers[name], plain)


def untouched(batches: Batches) -> list[Tensor]:
    """What the untouched network says, while a pool has another one."""
    model = networks.load(NAME)
    with torch.no_grad():
        return [model(batch) for batch in batches]


def test_a_stream_in_shadow_has_learned_what_one_that_is_on_has(
    pool: StreamPool, adapted: Adapted
) -> None:
    name = "noisy-by-class"
    batches, (expected, health) = STREAMS[name](), adapted[name]
    pool.set_mode("a", "shadow")
    for batch in batches[:4]:
        pool.predict("a", batch)
    pool.set_mode("a", "on")
    assert_same([pool.predict("a", batch).logits for batch in batches[4:]], expected[4:])
    assert_same_health(pool.status("a").health, health)


# States go from one to the other.


@pytest.mark.parametrize("name", ["noisy-by-class", "mixed-by-class", "clean-shuffled"])
def test_a_pool_goes_on_where_an_adapter_has_saved(
    name: str,
    network: nn.Module,
    fitted: ttapca.FittedFilter,
    adapted: Adapted,
    tmp_path: Path,
) -> None:
    batches, (expected, health) = STREAMS[name](), adapted[name]
    half = len(batches) // 2
    with adapter_of(network, fitted) as adapter:
        for batch in batches[:half]:
            adapter.stream("any")(batch)
        adapter.stream("any").save(tmp_path / "stream")
    with StreamPool(network, fitted, mode="on") as pool:
        status = pool.restore("a", (tmp_path / "stream").read_bytes())
        assert (status.mode, status.requests, status.health.images) == (
            "on",
            half,
            sum(map(len, batches[:half])),
        )
        assert_same([pool.predict("a", batch).logits for batch in batches[half:]], expected[half:])
        assert_same_health(pool.status("a").health, health)


@pytest.mark.parametrize("name", ["noisy-by-class", "mixed-by-class", "clean-shuffled"])
def test_an_adapter_goes_on_where_a_pool_was_dumped(
    name: str,
    network: nn.Module,
    fitted: ttapca.FittedFilter,
    adapted: Adapted,
    tmp_path: Path,
) -> None:
    batches, (expected, health) = STREAMS[name](), adapted[name]
    half = len(batches) // 2
    with StreamPool(network, fitted) as pool:
        for batch in batches[:half]:
            pool.predict("a", batch)
        (tmp_path / "stream").write_bytes(pool.dump("a"))
    with adapter_of(network, fitted) as adapter:
        stream = adapter.stream("another")
        stream.load(tmp_path / "stream")
        assert (stream.samples, stream.batches) == (sum(map(len, batches[:half])), half)
        assert_same([stream(batch) for batch in batches[half:]], expected[half:])
        assert_same_health(stream.health, health)
        assert adapter.stream("default").samples == 0


def test_there_and_back_again_changes_no_number(
    network: nn.Module, fitted: ttapca.FittedFilter, tmp_path: Path
) -> None:
    batches, path = STREAMS["mixed-by-class"](), tmp_path / "stream"
    with adapter_of(network, fitted) as adapter:
        for batch in batches[:5]:
            adapter(batch)
        adapter.stream("default").save(path)
        before = path.read_bytes()
    with StreamPool(network, fitted) as pool:
        pool.restore("a", before)
        path.write_bytes(pool.dump("a"))
    with adapter_of(network, fitted) as adapter:
        adapter.stream("default").load(path)
        adapter.stream("default").save(path)
    assert path.read_bytes() == before


# Any options, any layers, any outputs.


class TwoOutputs(nn.Module):
    """What a model returns that returns more than logits."""

    def forward(self, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits, "norm": logits.norm(dim=1)}


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "shuffled": {"order": "shuffled"},
    "by order": {"order": "auto"},
    "a video": {"order": "video"},
    "one state": {"states": 1},
    "no repair": {"outliers": False},
}
FACTORS = (1.0, 3.0, 0.4, 3.0, 1.0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_any_network_by_any_options(kind: str, options: str) -> None:
    """Three streams that share passes: other images, other sizes, other conditions."""
    streams = {
        f"camera-{number}": [
            factor * images(size + number, seed=10 * number + turn) + 0.2 * (number == 2)
            for turn, (factor, size) in enumerate(zip(FACTORS, (12, 1, 5, 30, 2), strict=True))
        ]
        for number in range(3)
    }
    model, given = NETWORKS[kind](), OPTIONS[options]
    fitted = filter_of(kind)
    with adapter_of(model, fitted, **given) as adapter:
        expected = {name: [adapter.stream(name)(x) for x in own] for name, own in streams.items()}
    with StreamPool(model, fitted, input_shape=(3, 6, 6), **given) as pool:
        together = asked_in_turns(pool, streams)
    for name, own in expected.items():
        assert_same(together[name], own)


OUTPUTS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "one number": (with_outputs(1), {}),
    "one number, flat": (with_outputs(1, nn.Flatten(0)), {}),
    "labels": (with_outputs(4), {"outputs": "multilabel"}),
    "logits among others": (
        with_outputs(5, TwoOutputs()),
        {"logits": lambda output: output["logits"]},
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_kind(kind: str, tmp_path: Path) -> None:
    model, given = OUTPUTS[kind]
    fitted = ttapca.fit(model, "conv1", images(300), 40, **given)
    batches = [
        factor * images(size, seed=turn)
        for turn, (factor, size) in enumerate(zip(FACTORS, (12, 1, 5, 30, 2), strict=True))
    ]
    with adapter_of(model, fitted, **given) as adapter:
        expected = [adapter(batch) for batch in batches]
        health = adapter.health
        adapter.stream("default").save(tmp_path / "stream")
    with StreamPool(model, fitted, **given) as pool:
        found = [pool.predict("a", batch).logits for batch in batches]
        restored = pool.restore("b", (tmp_path / "stream").read_bytes())
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert_same(found, expected)
    assert restored.health.p_value == pytest.approx(health.p_value)
    assert restored.health.images == health.images == 50


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the stream
        st.sampled_from([1, 1, 2, 5, 17, 40]),  # how many images
        st.sampled_from([0.0, 0.0, 1.0, 3.0]),  # noise
        st.booleans(),  # whether all are of one class
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=20)
@given(REQUESTS, st.integers(1, 4))
def test_whatever_comes_together(
    requests: list[tuple[int, int, float, bool]], together: int
) -> None:
    """Requests of three streams in any order, any number at a time."""
    batches: list[tuple[str, Tensor]] = []
    for number, (stream, size, noise, alike) in enumerate(requests):
        generator = torch.Generator().manual_seed(number)
        labels = torch.full((size,), stream) if alike else torch.arange(size) * 7 % 5
        clean = scripted_classes.pictures(labels, number)
        drawn = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
        batches.append((f"camera-{stream}", clean + noise * drawn))
    model, fitted = scripted_classes.network(), scripted_classes.fitted()
    with adapter_of(model, fitted) as adapter:
        expected = [adapter.stream(name)(batch) for name, batch in batches]
    found = []
    with StreamPool(model, fitted, input_shape=clean.shape[1:]) as pool:
        for first in range(0, len(batches), together):
            with pool._news:  # no pass begins before all have asked
                asked = [pool.submit(*each) for each in batches[first : first + together]]
            found += [each.result(60).logits for each in asked]
    assert_same(found, expected)
