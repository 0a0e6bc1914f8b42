"""Records of streams in memory and on disk, if the disk or the moment is a bad one."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

import ttapca
from ttapca.errors import DamagedStreamError, SavedStreamError, StorageError
from ttapca.serving import PoolLimits, StreamPool, StreamStore
from ttapca.serving.batched_network import FilteredImage

SAMPLES = torch.rand(100, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path: Path):
    with StreamStore(tmp_path / "s.sqlite") as opened:
        yield opened


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@pytest.fixture
def fitted(network: nn.Module):
    return ttapca.fit(network, "0", SAMPLES)


@pytest.fixture
def pool(store: StreamStore, network: nn.Module, fitted: ttapca.FittedFilter):
    """Knows `a` and `b`: both are on disk, and one is in memory at most."""
    limits = PoolLimits(max_resident=1)
    with StreamPool(network, fitted, store=store, input_shape=(3,), limits=limits) as made:
        for name in "ab":
            made.predict(name, SAMPLES[:1])
        made.save()
        yield made


def test_a_stream_is_known_as_long_as_a_record_or_a_reservation_of_it_is(
    pool: StreamPool,
) -> None:
    cache = pool._streams
    first, second, third = object(), object(), object()
    cache.reserve("new", first)
    cache.drop("new")
    cache.reserve("new", second)
    cache.release("new", first)  # of a stream that was dropped since
    assert "new" in cache.names()
    cache.put("new", cache.get("a"))
    cache.release("new", second)  # its stream has begun by another request
    cache.reserve("new", third)
    cache.release("new", third)
    assert "new" in cache.names()


def test_every_save_is_synced_to_the_disk(store: StreamStore) -> None:
    """Else a power failure takes more with it than the last seconds."""
    full = 2
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (full,)


class Broken:
    """Stands for a connection to a file that can neither be read nor written."""

    def __enter__(self) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    def __exit__(self, *_: object) -> None:
        pass


def test_a_disk_that_cannot_be_read_or_written_is_a_storage_error(
    pool: StreamPool, store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.predict("b", SAMPLES[:1])
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connection", Broken())
        with pytest.raises(StorageError, match="disk I/O error"):
            pool.status("a")
        with pytest.raises(StorageError, match="disk I/O error"):
            pool.predict("a", SAMPLES[:1])
        # There is an attempt to save it before: it stays in memory, as what it has seen is not
        # on disk.
        assert pool.predict("b", SAMPLES[:1]).glance.images == 3
        with pytest.raises(StorageError, match="disk I/O error"):
            pool.save()
    assert pool.status("a").health.images == 1


def test_the_log_says_once_that_streams_cannot_be_saved_and_once_that_they_are(
    pool: StreamPool,
    store: StreamStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ttapca.serving")
    pool.reset("b")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connection", Broken())
        for _ in range(3):
            pool._try_to_save()
    for _ in range(3):
        pool._try_to_save()
    first, second = (record.getMessage() for record in caplog.records)
    assert "cannot be saved: Streams in" in first
    assert "disk I/O error" in first
    assert "saved again" in second


def test_a_stream_that_cannot_be_dropped_from_disk_stays(
    pool: StreamPool, store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connection", Broken())
        with pytest.raises(StorageError, match="disk I/O error"):
            pool.drop("b")
    assert pool.names() == store.names() == ["a", "b"]
    assert pool.status("b").health.images == 1
    pool.drop("b")
    assert pool.names() == store.names() == ["a"]


def test_a_damaged_state_on_disk_is_not_the_callers_fault(
    pool: StreamPool, store: StreamStore
) -> None:
    store.write({"a": b"damaged"})
    whole = pool.dump("b")
    damaged = r"stream `a` in .*s\.sqlite is damaged: .* Drop it"
    for use in (pool.status, pool.reset, lambda name: pool.predict(name, SAMPLES[:1])):
        with pytest.raises(DamagedStreamError, match=damaged):
            use("a")
    assert pool.restore("a", whole).health.images == 1
    store.write({"a": b"damaged"})
    pool.drop("a")
    assert pool.predict("a", SAMPLES[:1]).glance.images == 1


def test_a_damaged_stream_does_not_keep_the_others_from_going_on(
    pool: StreamPool, store: StreamStore, network: nn.Module, fitted: ttapca.FittedFilter
) -> None:
    pool.close()
    store.write({"a": b"damaged"})
    with StreamPool(network, fitted, store=store, input_shape=(3,)) as again:
        assert again.predict("b", SAMPLES[:1]).glance.images == 2
    store.write({"b": b"damaged"})
    with pytest.raises(
        SavedStreamError, match=r"keeps others\. [A-Z].*too early.* or another file"
    ):
        StreamPool(network, fitted, store=store, input_shape=(3,))
    assert not network[0]._forward_hooks


def test_many_damaged_streams_side_by_side_hide_no_others(
    pool: StreamPool, store: StreamStore, network: nn.Module, fitted: ttapca.FittedFilter
) -> None:
    pool.close()
    store.write({f"0-{number:02}": b"damaged" for number in range(30)})
    store._connection.execute("UPDATE streams SET state = 7 WHERE name = 'a'")
    with StreamPool(network, fitted, store=store, input_shape=(3,)) as again:
        assert again.status("b").health.images == 1
        with pytest.raises(DamagedStreamError, match=r"stream `a` .* is damaged: .*found integer"):
            again.status("a")
        again.drop("a")
        assert len(again.names()) == 31


def test_a_store_of_an_older_version_says_so(
    store: StreamStore, network: nn.Module, fitted: ttapca.FittedFilter
) -> None:
    about = {"format": "ttapca pool stream 2", "kind": "any", "numbers": {}}
    store.write({"a": save({"shown.samples": torch.ones(1)}, {"ttapca": json.dumps(about)})})
    said = "saved by an older ttapca.*Let the stream begin anew.* or another file"
    with pytest.raises(SavedStreamError, match=said):
        StreamPool(network, fitted, store=store, input_shape=(3,))
    assert store.names() == ["a"]
    assert not network[0]._forward_hooks


def test_a_pool_that_cannot_save_frees_the_model_and_can_be_closed_again(
    pool: StreamPool, store: StreamStore, network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.predict("b", SAMPLES[:1])
    before = store.read("b")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_connection", Broken())
        with pytest.raises(StorageError, match="disk I/O error"):
            pool.close()
    assert not network[0]._forward_hooks
    assert store.read("b") == before
    pool.close()
    assert store.read("b") != before


def test_a_state_leaves_memory_only_after_it_is_on_disk(
    pool: StreamPool, store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, writing, fails = pool._streams, threading.Event(), threading.Event()
    cache.put("a", dataclasses.replace(cache.get("a"), images=77))

    def slow_and_broken(*_: object) -> None:
        writing.set()
        assert fails.wait(60)
        raise StorageError("no space")

    def save_elsewhere() -> None:
        with pytest.raises(StorageError, match="no space"):
            cache.save()

    def save() -> None:
        """Fail, and leave another thread in the middle of an attempt that fails later."""
        other.start()
        assert writing.wait(60)
        threading.Timer(0.5, fails.set).start()

    other = threading.Thread(target=save_elsewhere)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", slow_and_broken)
        cache.make_room(1, save)
        other.join(60)
    assert cache.get("a").images == 77
    cache.save()
    assert cache.parse(store.read("a") or b"").images == 77


def test_what_is_no_image_has_no_pictures(pool: StreamPool) -> None:
    assert pool.predict("a", SAMPLES[:1]).glance.images == 2
    assert pool.pictures("a") is None
    signal = torch.rand(3, 16)
    assert FilteredImage(signal, signal, signal).pictures() is None


def test_a_request_that_outlives_its_stream_leaves_no_picture(
    pool: StreamPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch.rand(3, 4, 4)
    predict = pool._network.predict

    def drop_meanwhile(requests: Any) -> Any:
        pool._streams.drop("b")
        first = FilteredImage(image, image, image)
        return [(record, answer, first) for record, answer, _ in predict(requests)]

    monkeypatch.setattr(pool._network, "predict", drop_meanwhile)
    pool.predict("b", SAMPLES[:1])
    assert pool.names() == ["a"]
    pool.set_mode("b", "off")
    assert pool.pictures("b") is None
