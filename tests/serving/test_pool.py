"""The pool must answer each stream as an adapter of its own would, whatever comes beside it."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import left_untouched
from serving.conftest import smooth_images as pictures
from ttapca import errors
from ttapca.errors import (
    CallbackWarning,
    InputTypeError,
    NonFiniteError,
    OptionError,
    PoolClosedError,
    PoolFullError,
    SavedStreamError,
    ShapeError,
    StorageError,
    StreamNameError,
    TooManyStreamsError,
    UnknownStreamError,
)
from ttapca.serving import PoolLimits, PoolObserver, StreamPool, StreamStore
from ttapca.serving.fairness import Client
from ttapca.serving.stream_record import StreamRecord

SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5)).eval()


@pytest.fixture(scope="module")
def fitted(network: nn.Module) -> ttapca.FittedFilter:
    return ttapca.fit(network, "0", pictures(1000, seed=1))  # enough to tell conditions apart


Open = Callable[..., StreamPool]


@pytest.fixture
def open_pool(network: nn.Module, fitted: ttapca.FittedFilter) -> Open:
    return functools.partial(StreamPool, network, fitted)


@pytest.fixture
def pool(open_pool: Open):
    with open_pool() as made:
        yield made


def test_a_request_that_finds_no_room_begins_no_stream(open_pool: Open) -> None:
    with open_pool(limits=PoolLimits(max_queue=2)) as pool:
        with pool._news:  # no pass begins before all have asked
            alone = pool.submit("large", pictures(3, seed=0))
            with pytest.raises(PoolFullError, match=r"At most 2 images may wait.* 3 do already"):
                pool.submit("new", pictures(3, seed=0))
        assert len(alone.result(60).logits) == 3  # one request may always wait
        assert pool.names() == ["large"]


def test_in_a_full_queue_streams_with_much_give_way(open_pool: Open) -> None:
    with open_pool(limits=PoolLimits(max_queue=6)) as pool:
        with pool._news:  # no pass begins before all have asked
            heavy = [pool.submit("heavy", pictures(2, n)) for n in range(3)]
            light = pool.submit("light", pictures(1, seed=0))
            with pytest.raises(PoolFullError, match="5 do already"):
                pool.submit("heavy", pictures(2, seed=0))
            assert pool.queue_length == 5
        assert len(light.result(60).logits) == 1
        with pytest.raises(PoolFullError, match="no other stream has more"):
            heavy[2].result(60)  # the last one
        assert [len(each.result(60).logits) for each in heavy[:2]] == [2, 2]
        assert pool.status("heavy").health.images == 4


def test_a_stream_that_has_only_given_way_has_not_begun(open_pool: Open) -> None:
    with open_pool(limits=PoolLimits(max_queue=3)) as pool:
        with pool._news:
            given_up = pool.submit("gone", pictures(2, seed=0))
            pool.submit("kept", pictures(1, seed=0))
            gone = pool.submit("large", pictures(3, seed=0), client=Client("b", 4.0))
        assert len(gone.result(60).logits) == 3  # its client has four shares
        with pytest.raises(PoolFullError):
            given_up.result(60)
        assert "gone" not in pool.names()


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much(open_pool: Open) -> None:
    class Seen(PoolObserver):
        streams: list[str]

        def __init__(self) -> None:
            self.streams = []

        def answered(self, answer, waited: float) -> None:
            self.streams.append(answer.stream)

    seen = Seen()
    with open_pool(observer=seen, limits=PoolLimits(max_batch=8)) as pool:
        with pool._news:
            asked = [pool.submit(f"heavy-{n % 3}", pictures(8, n)) for n in range(9)]
            asked += [pool.submit("camera", pictures(1, n)) for n in range(3)]
        for each in asked:
            each.result(60)
    assert seen.streams[:3] == ["camera"] * 3
    assert [each for each in seen.streams if each != "camera"] == [
        "heavy-0",
        "heavy-1",
        "heavy-2",
    ] * 3


def test_a_request_that_was_given_up_begins_no_stream(pool: StreamPool) -> None:
    one = pictures(1, seed=0)
    with pool._news:  # no pass begins before all have asked
        given_up = [pool.submit(name, one) for name in ("gone", "gone", "kept")]
        kept = pool.submit("kept", one)
        for each in given_up:
            assert each.cancel()
    assert kept.result(60).status.health.images == 1
    assert pool.names() == ["kept"]


def test_threads_get_what_each_stream_would_get_alone(
    open_pool: Open, network: nn.Module, fitted: ttapca.FittedFilter
) -> None:
    batches = {
        f"camera-{n}": [
            pictures(1 + (n + turn) % 3, 50 * n + turn, noise=0.3 * (turn // 20 == 1))
            for turn in range(60)
        ]
        for n in range(4)
    }
    expected = {}
    with ttapca.adapt(network, "wiener", filter=fitted, forgetting="online") as adapted:
        for name, images in batches.items():
            expected[name] = [adapted.stream(name)(each) for each in images]
    found: dict[str, list[Tensor]] = {}

    def ask(name: str) -> None:
        found[name] = [pool.predict(name, each).logits for each in batches[name]]

    with open_pool() as pool:
        threads = [threading.Thread(target=ask, args=(name,)) for name in batches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.status("camera-0").health.conditions > 1
    for name, logits in found.items():
        for here, there in zip(logits, expected[name], strict=True):
            assert torch.allclose(here, there, atol=1e-4)


def test_requests_of_a_stream_are_answered_in_order_and_streams_are_gathered(
    open_pool: Open,
) -> None:
    class Seen(PoolObserver):
        def __init__(self) -> None:
            self.passes: list[tuple[int, int]] = []
            self.order: list[int] = []

        def passed(self, images: int, streams: int, seconds: float) -> None:
            assert seconds >= 0
            self.passes.append((images, streams))

        def answered(self, answer, waited: float) -> None:
            assert waited >= 0
            if answer.stream == "a":
                self.order.append(len(answer.logits))

    seen = Seen()
    with open_pool(observer=seen) as pool:
        with pool._news:  # no pass begins before all have asked
            asked = [pool.submit("a", pictures(1 + n, n)) for n in range(4)]
            asked += [pool.submit(name, pictures(2, 9)) for name in "bcd"]
        for each in asked:
            each.result(timeout=60)
    assert seen.order == [1, 2, 3, 4]
    assert seen.passes == [(7, 4), (2, 1), (3, 1), (4, 1)]


def test_who_has_an_answer_finds_it_counted(open_pool: Open) -> None:
    class Slow(PoolObserver):
        counted = 0

        def answered(self, answer, waited: float) -> None:
            threading.Event().wait(0.05)
            self.counted += 1

    seen = Slow()
    with open_pool(observer=seen) as pool:
        for turn in range(1, 4):
            pool.predict("a", pictures(1, turn), timeout=60)
            assert seen.counted == turn


def test_off_and_shadow_answer_as_the_untouched_network_bit_for_bit(
    network: nn.Module, pool: StreamPool
) -> None:
    pool.set_mode("off", "off")
    pool.set_mode("shadow", "shadow")
    differed = 0
    for turn in range(6):
        images = pictures(20, turn, noise=0.3)
        with torch.no_grad():
            # The pool has to let go of the network for this: its filter passes nobody's images.
            plain = network(images)
            twice = network(torch.cat([images, images]))[:20]  # as many as a pass in shadow has
        off, shadow = pool.predict("off", images), pool.predict("shadow", images)
        on = pool.predict("on", images)
        assert torch.equal(off.logits, plain)
        assert torch.equal(shadow.logits, twice)
        assert not off.adapted
        assert not shadow.adapted
        assert off.differ is None
        assert on.adapted
        assert not torch.equal(on.logits, plain)
        differed += shadow.differ
        expected = int((on.logits.argmax(1) != plain.argmax(1)).sum())
        assert shadow.differ == expected
        assert torch.allclose(shadow.logits, plain, atol=1e-6)
    status = pool.status("shadow")
    assert status.disagreement == pytest.approx(differed / 120)
    assert status.adapted_share == 0
    assert pool.status("on").adapted_share == 1
    assert pool.status("off").health.shift > 0.5  # it is watched


def test_the_alarm_tells_when_a_shift_began_and_ended(pool: StreamPool) -> None:
    for turn in range(10):
        pool.predict("a", pictures(32, turn))
    clean = pool.status("a")
    assert not clean.health.shifted
    assert clean.shifted_since is None
    for turn in range(10):
        pool.predict("a", pictures(32, turn, noise=0.3))
    noisy = pool.status("a")
    assert noisy.health.shifted
    assert noisy.shifted_since is not None
    assert noisy.health.p_value < 0.01
    assert min(noisy.gains) < 0.5
    assert len(noisy.gains) == len(noisy.health.bands)
    for turn in range(20):
        pool.predict("a", pictures(32, 100 + turn))
    assert not pool.status("a").health.shifted
    told = noisy.to_dict()
    assert told["mode"] == "on"
    assert told["health"]["shifted"]


def test_an_answer_says_how_many_images_the_alarm_still_needs(pool: StreamPool) -> None:
    found = []
    for turn, size in enumerate((10, 20, 34, 60, 4, 1)):
        glance = pool.predict("a", pictures(size, turn, noise=0.5)).glance
        assert glance.shifted == (glance.alarm_after is None)
        found.append(glance.alarm_after)
    assert found == [118, 98, 64, 4, None, None]
    pool.reset("a")
    assert pool.status("a").alarm_after == 128


def test_states_survive_in_a_store_bit_for_bit(open_pool: Open, tmp_path: Path) -> None:
    path = tmp_path / "streams.sqlite"
    with StreamStore(path) as store, open_pool(store=store) as pool:
        for turn in range(5):
            pool.predict("a", pictures(3, turn, noise=0.2))
        pool.set_mode("b", "shadow")
        saved = pool.dump("a")
    with StreamStore(path) as store, open_pool(store=store) as pool:
        assert pool.names() == ["a", "b"]
        assert pool.resident == 0
        assert pool.dump("a") == saved
        assert pool.status("b").mode == "shadow"
        pool.drop("b")
    with StreamStore(path) as store:
        assert store.names() == ["a"]


def test_streams_with_an_alarm_are_known_without_reading_all_states(
    open_pool: Open, tmp_path: Path
) -> None:
    path = tmp_path / "streams.sqlite"
    with StreamStore(path) as store, open_pool(store=store) as pool:
        for turn in range(8):
            pool.predict("noisy", pictures(60, turn, noise=0.5))
            pool.predict("gone", pictures(60, turn, noise=0.5))
            pool.predict("clean", pictures(60, turn))
        assert pool.names(shifted=True) == ["gone", "noisy"]
        pool.save()
        pool.drop("gone")
    with StreamStore(path) as store, open_pool(store=store) as pool:
        assert store.shifted() == pool.names(shifted=True) == ["noisy"]
        assert pool.names(shifted=False) == ["clean"]
        assert pool.resident == 0
        pool.reset("noisy")
        assert pool.names(shifted=True) == []
    with StreamStore(path) as store:
        assert (store.shifted(), store.names()) == ([], ["clean", "noisy"])


def test_what_is_not_finite_in_shadow_differs_from_nothing(pool: StreamPool) -> None:
    pool.set_mode("shadow", "shadow")
    answer = pool.predict("shadow", torch.full((2, *SHAPE), 3e38))
    assert answer.differ is None
    status = pool.status("shadow")
    assert (status.health.skipped, status.disagreement) == (1, None)


def assert_refused(pool: StreamPool, record: StreamRecord, match: str) -> None:
    before = pool.dump("a")
    with pytest.raises(SavedStreamError, match=match):
        pool.restore("a", record.to_bytes(pool._network.kind))
    assert pool.dump("a") == before


def test_conditions_that_no_image_can_have_are_refused(pool: StreamPool) -> None:
    """Their squares would be infinite, and every later image of the stream an error."""
    for turn in range(3):
        pool.predict("a", pictures(30, turn))
    record = pool._streams.get("a")
    known = record.state.conditions
    assert known is not None
    for changed in (
        dataclasses.replace(known, searched=known.searched * 1e200),
        dataclasses.replace(known, centres=known.centres - 1e200),
    ):
        state = dataclasses.replace(record.state, conditions=changed)
        wrong = dataclasses.replace(record, state=state)
        assert_refused(pool, wrong, r"`conditions\.\w+` cannot be like that")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shifted_since", 1e300),  # no browser knows this time
        ("shifted_since", -1.0),
        ("last_seen", 1e12),
        ("last_seen", "now"),
        ("last_seen", math.nan),
        ("images", 2**53 + 1),
        ("images", 1.0),
        ("requests", -1),
        ("skipped", None),
        ("adapted", True),
        ("differed", [3]),
        ("mode", "half"),
        ("mode", ["on"]),
    ],
)
def test_numbers_that_no_stream_can_have_are_refused(
    pool: StreamPool, name: str, value: Any
) -> None:
    pool.predict("a", pictures(3, seed=0))
    record = pool._streams.get("a")
    pool.restore("b", record.to_bytes(pool._network.kind))  # as it is, it can be
    wrong = dataclasses.replace(record, **{name: value})
    assert_refused(pool, wrong, f"no saved stream: `{name}` must be")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skew", 1.5),
        ("shifted", 1),
        ("images", -1),
        ("runs", math.inf),
        ("energies", (torch.ones(3, dtype=torch.float64),)),
        ("energies", (-torch.ones(8, dtype=torch.float64),)),
        ("counts", -torch.ones(5, dtype=torch.float64)),
        ("counts", torch.full((5,), 1e308, dtype=torch.float64)),
    ],
)
def test_an_alarm_that_no_stream_can_have_is_refused(
    pool: StreamPool, name: str, value: Any
) -> None:
    pool.predict("a", pictures(3, seed=0))
    record = pool._streams.get("a")
    [energies] = record.state.alarm.energies
    assert energies.shape == (8,)  # a number for each band
    alarm = dataclasses.replace(record.state.alarm, **{name: value})
    wrong = dataclasses.replace(record, state=dataclasses.replace(record.state, alarm=alarm))
    assert_refused(pool, wrong, rf"no saved stream: `alarm\.{name}")


def test_a_store_of_another_filter_is_refused_at_once(
    open_pool: Open, network: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "streams.sqlite"
    with StreamStore(path) as store, open_pool(store=store) as pool:
        pool.predict("a", pictures(3, seed=0))
    other = ttapca.fit(network, "0", pictures(300, seed=2))
    with StreamStore(path) as store, left_untouched(network, pictures(2, seed=0)):
        with pytest.raises(SavedStreamError, match=r"streams\.sqlite keeps others.* another file"):
            StreamPool(network, other, store=store)
        store.drop(["a"])  # a file without streams is anybody's
        with StreamPool(network, other, store=store) as pool:
            assert pool.names() == []


@pytest.mark.parametrize("limits", [PoolLimits(max_resident=8), PoolLimits(max_memory=10_000)])
def test_many_streams_go_to_disk_and_come_back_as_they_were(
    open_pool: Open, tmp_path: Path, limits: PoolLimits
) -> None:
    with (
        StreamStore(tmp_path / "s.sqlite") as store,
        open_pool(store=store, limits=limits) as pool,
    ):
        dumps = {}
        for number in range(40):
            name = f"camera-{number}"
            pool.predict(name, pictures(2, number, noise=0.1))
            dumps[name] = pool.dump(name)
            assert pool.resident <= 8
        for name, data in dumps.items():
            assert pool.dump(name) == data
        again = pool.predict("camera-0", pictures(2, 77)).status
        assert again.health.images == 4


def test_a_restored_stream_goes_on_as_the_other(pool: StreamPool) -> None:
    for turn in range(4):
        pool.predict("a", pictures(2, turn, noise=0.2))
    pool.restore("b", pool.dump("a"))
    images = pictures(3, 9, noise=0.2)
    assert torch.equal(pool.predict("a", images).logits, pool.predict("b", images).logits)
    pool.reset("b")
    assert pool.status("b").health.images == 0


def test_wrong_bytes_are_refused_and_change_nothing(network: nn.Module, pool: StreamPool) -> None:
    pool.predict("a", pictures(2, 0, noise=0.2))
    data = pool.dump("a")
    for wrong, words in (
        (b"", "ends too early"),
        (data[:-9], "no saved stream"),
        (data.replace(b"ttapca stream 3", b"ttapca stream 9"), "of the format"),
        (data.replace(b"ttapca stream 3", b"ttapca stream 1"), "saved by an older ttapca"),
        (
            data.replace(rb"\"skipped\": 0", rb"\"skipped\":-1"),
            "`skipped` must be .* found -1",
        ),
        (b"\xff" * 50, "ends too early"),
    ):
        with pytest.raises(SavedStreamError, match=words):
            pool.restore("a", wrong)
    assert pool.dump("a") == data
    second = nn.Sequential(*(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5)))
    other = ttapca.fit(second, "0", pictures(300, seed=2))
    with (
        StreamPool(second, other) as foreign,
        pytest.raises(SavedStreamError, match="a stream of another network, filter or method"),
    ):
        foreign.restore("a", data)


@pytest.mark.parametrize(
    ("images", "error", "words"),
    [
        (pictures(1, 0)[0], ShapeError, "found"),
        (pictures(1, 0)[:, :, :4], ShapeError, "shape"),
        (torch.rand(300, *SHAPE), ShapeError, "from 1 to 256"),
        (torch.rand(0, *SHAPE), ShapeError, "from 1 to 256"),
        (torch.zeros(1, *SHAPE, dtype=torch.uint8), InputTypeError, "images / 255"),
        ([[1.0]], InputTypeError, "found list"),
        (torch.full((1, *SHAPE), torch.nan), NonFiniteError, "NaN"),
    ],
)
def test_wrong_images_are_refused_and_begin_no_stream(
    pool: StreamPool, images: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pool.predict("new", images)
    assert pool.names() == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 101, "ü", "a\n", None])
def test_names_that_could_lead_elsewhere_are_refused(pool: StreamPool, name: object) -> None:
    for call in (pool.status, pool.reset, pool.drop, pool.dump, pool.pictures):
        with pytest.raises(StreamNameError, match="1 to 100 letters"):
            call(name)
    with pytest.raises(StreamNameError, match="1 to 100 letters"):
        pool.predict(name, pictures(1, 0))


def test_unknown_streams_and_modes(pool: StreamPool) -> None:
    for call in (pool.status, pool.reset, pool.drop, pool.dump, pool.pictures):
        with pytest.raises(UnknownStreamError, match="begins with its first image"):
            call("nobody")
    with pytest.raises(OptionError, match="shadow"):
        pool.set_mode("a", "half")
    assert pool.names() == []


def test_limits(open_pool: Open) -> None:
    limits = PoolLimits(max_streams=2, max_queue=5)
    with open_pool(limits=limits) as pool:
        pool.predict("a", pictures(1, 0))
        pool.predict("b", pictures(1, 0))
        with pytest.raises(TooManyStreamsError, match="at most 2 streams"):
            pool.predict("c", pictures(1, 0))
        with pool._news:
            waiting = [pool.submit("a", pictures(2, n)) for n in range(2)]
            with pytest.raises(PoolFullError, match="4 do already"):
                pool.submit("a", pictures(2, 3))
        assert [len(each.result(60).logits) for each in waiting] == [2, 2]
    with open_pool(limits=PoolLimits(max_memory=1)) as pool:
        pool.predict("a", pictures(1, 0))
        with pytest.raises(TooManyStreamsError, match="may take 1 bytes"):
            pool.predict("b", pictures(1, 0))
        assert len(pool.predict("a", pictures(1, 0)).logits) == 1
    with pytest.raises(OptionError, match="max_batch"):
        PoolLimits(max_batch=0)


def test_outliers_need_a_filter_of_images(network: nn.Module) -> None:
    inner = ttapca.fit(network, "3", pictures(100, seed=1))
    with pytest.raises(OptionError, match="no filter acts on the model's input images"):
        StreamPool(network, inner, outliers=True, input_shape=SHAPE)
    with StreamPool(network, inner, input_shape=list(SHAPE)) as pool:
        assert len(pool.predict("a", pictures(2, 0)).logits) == 2


def test_a_pass_that_fails_hurts_only_the_culprit(
    network: nn.Module, fitted: ttapca.FittedFilter
) -> None:
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self, images: Tensor) -> Tensor:
            if bool((images > 5).any()):
                raise RuntimeError("too bright")
            return self.inner(images)

    model = Fussy()
    inner = ttapca.fit(model, "inner.0", pictures(300, seed=1))
    with StreamPool(model, inner) as pool:
        for turn in range(3):
            for name in ("good", "bad"):
                pool.predict(name, pictures(1, turn))
        before = pool.dump("bad")
        with pytest.raises(RuntimeError, match="too bright"):
            pool.predict("new", torch.full((1, *SHAPE), 6.0))
        assert pool.names() == ["bad", "good"]
        with pool._news:
            good = pool.submit("good", pictures(1, 5))
            bad = pool.submit("bad", torch.full((1, *SHAPE), 6.0))
        assert good.result(60).logits.shape == (1, 5)
        with pytest.raises(RuntimeError, match="too bright"):
            bad.result(60)
        assert pool.dump("bad") == before
        assert pool.status("good").health.images == 4


def test_a_disk_that_cannot_be_written_stops_no_answer(
    open_pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no space")

    limits = PoolLimits(max_resident=4)
    with StreamStore(tmp_path / "s.sqlite") as store:
        pool = open_pool(store=store, limits=limits)
        with monkeypatch.context() as patch:
            patch.setattr(store, "write", full)
            for number in range(10):
                pool.predict(f"s{number}", pictures(1, number))
            assert pool.resident == 10  # rather too many in memory than one lost
            with pytest.raises(StorageError, match="no space"):
                pool.save()
        pool.predict("s10", pictures(1, 10))  # there is room again
        assert pool.resident <= 4
        assert [pool.status(f"s{number}").health.images for number in range(11)] == [1] * 11
        pool.close()


@pytest.mark.parametrize("warned", ["ignore", "error"])
def test_an_observer_that_raises_stops_no_answer(open_pool: Open, warned: Any) -> None:
    class Broken(PoolObserver):
        def passed(self, images: int, streams: int, seconds: float) -> None:
            raise RuntimeError("broken")

    with open_pool(observer=Broken()) as pool, warnings.catch_warnings():
        warnings.simplefilter(warned, CallbackWarning)
        for turn in range(3):
            assert pool.predict("a", pictures(1, turn), timeout=60).logits.shape == (1, 5)


def test_a_closed_pool_answers_what_waits_and_leaves_the_model_as_it_was(
    open_pool: Open, network: nn.Module
) -> None:
    images = pictures(4, 3, noise=0.3)
    plain = network(images)
    pool = open_pool()
    with pool._news:
        waiting = [pool.submit(f"s{n}", images) for n in range(5)]
        threading.Thread(target=pool.close).start()
    assert all(each.result(60).logits.shape == (4, 5) for each in waiting)
    pool.close()
    assert torch.equal(network(images), plain)
    assert not network[0]._forward_pre_hooks
    for call in (lambda: pool.predict("a", images), lambda: pool.set_mode("a", "on")):
        with pytest.raises(PoolClosedError, match="closed"):
            call()


def test_warming_up_changes_no_answer(pool: StreamPool) -> None:
    images = [pictures(3, n, noise=0.2) for n in range(4)]
    cold = [pool.predict("a", each).logits for each in images]
    pool.warm_up()
    drawn = len(pool._network._gain.normal._known)
    assert all(
        torch.equal(pool.predict("b", each).logits, before)
        for each, before in zip(images, cold, strict=True)
    )
    assert len(pool._network._gain.normal._known) == drawn > 50


def test_pictures_show_what_the_filter_did(pool: StreamPool) -> None:
    assert pool.predict("a", pictures(1, 0, noise=0.3)).adapted
    before, after = pool.pictures("a")
    assert before.shape == after.shape == (8, 8, 3)
    assert before.dtype == after.dtype == "uint8"
    rough, smooth = (
        float(abs(each[1:].astype(float) - each[:-1]).mean()) for each in (before, after)
    )
    assert smooth < rough


def test_a_trial_belongs_to_no_stream() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8), route="dct")
    with StreamPool(model, fitted) as pool:
        pool.try_out()
        assert pool.names() == []
    with StreamPool(model, fitted, input_shape=(1, 9, 9)) as pool:
        with pytest.raises(errors.ShapeError, match=r"shape \(1, 9, 9\); it does not"):
            pool.try_out()
        assert pool.names() == []


def test_a_stream_begins_anew_and_ends_in_order_of_arrival() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8))
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with StreamPool(model, fitted) as pool:
        asked = [pool.submit("a", images, starts=number == 2) for number in range(4)]
        assert [each.result().glance.images for each in asked] == [4, 8, 4, 8]
        last, after = pool.submit("a", images, ends=True), pool.submit("a", images)
        assert last.result().glance.images == 12
        after.result()
        with pytest.raises(errors.NonFiniteError):
            pool.submit("a", images * torch.nan, starts=True, ends=True)
        pool.predict("b", images)
        pool.submit("b", images, ends=True).result()
        assert "b" not in pool.names()
