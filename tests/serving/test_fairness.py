"""Turns and room, beside slow rules: what everybody gets, and who gives way."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.servers import PATIENCE
from ttapca.serving.fairness import (
    MOST_IDLE,
    Client,
    FairThreads,
    GaveWayError,
    Room,
    Share,
    Turns,
)

CLIENTS = [Client("a"), Client("b", 2.0), Client("c", 0.5)]
ASKED = st.tuples(st.sampled_from(CLIENTS), st.sampled_from("xyz"), st.integers(1, 9))


def next_of(turns: Turns[Any]) -> Any:
    waiting = next(iter(turns))
    turns.take(waiting)
    return waiting.item


@given(st.lists(ASKED, min_size=1, max_size=40))
def test_everything_gets_its_turn_and_streams_keep_their_order(
    asked: list[tuple[Client, str, int]],
) -> None:
    turns: Turns[int] = Turns()
    for number, (client, stream, cost) in enumerate(asked):
        turns.put(Share(client, stream), cost, number)
    assert len(turns.heads()) == len({each[:2] for each in asked})
    found = [next_of(turns) for _ in asked]
    assert sorted(found) == list(range(len(asked)))
    for stream in {each[:2] for each in asked}:
        own = [number for number in found if asked[number][:2] == stream]
        assert own == sorted(own)
    assert turns.heads() == []


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.25, 4)), min_size=2, max_size=5))
def test_those_who_always_wait_get_what_their_shares_say(flows: list[tuple[int, float]]) -> None:
    """The service of two that always wait differs by one request of each, as in the papers."""
    turns: Turns[Client] = Turns()
    clients = [Client(str(number), share) for number, (_, share) in enumerate(flows)]
    costs = dict(zip(clients, (cost for cost, _ in flows), strict=True))
    for client in clients * 2:
        turns.put(Share(client, "x"), costs[client], client)
    served: Counter[Client] = Counter()
    for _ in range(200):
        client = next_of(turns)
        served[client] += costs[client]
        turns.put(Share(client, "x"), costs[client], client)
        for one in clients:
            for other in clients:
                apart = served[one] / one.share - served[other] / other.share
                assert apart <= costs[one] / one.share + costs[other] / other.share + 1e-6


@pytest.mark.parametrize("served", range(0, 60, 7))
def test_a_small_request_waits_for_none_of_the_large_ones(served: int) -> None:
    turns: Turns[str] = Turns()
    for number in range(20):
        for _ in range(4):
            turns.put(Share(CLIENTS[0], f"heavy-{number}"), 64, "heavy")
    for _ in range(served):
        assert next_of(turns) == "heavy"
    for _ in range(3):
        turns.put(Share(CLIENTS[0], "camera"), 1, "camera")
        assert next_of(turns) == "camera"


def test_streams_of_a_client_share_what_it_gets() -> None:
    turns: Turns[str] = Turns()
    one, other = Client("one"), Client("other")
    for _ in range(10):
        for stream in "xyz":
            turns.put(Share(one, stream), 1, f"one-{stream}")
        turns.put(Share(other, "x"), 1, "other")
    found = [next_of(turns) for _ in range(12)]
    assert Counter(found) == {"other": 6, "one-x": 2, "one-y": 2, "one-z": 2}


def test_names_that_are_over_are_forgotten() -> None:
    turns: Turns[int] = Turns()
    for number in range(3 * MOST_IDLE):
        turns.put(Share(CLIENTS[0], f"stream-{number}"), 1, number)
        next_of(turns)
    assert len(turns._streams[CLIENTS[0].name]) <= MOST_IDLE + 2


# Room ---------------------------------------------------------------------------------------------


def grew(room: Room, share: Share, more: int) -> bool:
    try:
        room.grow(share, more)
    except GaveWayError:
        return False
    return True


@given(st.lists(ASKED, min_size=1, max_size=40), st.integers(5, 30))
def test_only_those_who_hold_less_get_in_for_others(
    asked: list[tuple[Client, str, int]], most: int
) -> None:
    room = Room(most)
    held: dict[Share, int] = {}
    for client, stream, size in asked:
        clients: Counter[Client] = Counter()
        streams: Counter[tuple[Client, str]] = Counter()
        for each, amount in held.items():
            clients[each.client] += amount
            streams[each.client, each.stream] += amount
        share, gone = Share(client, stream), []
        for each in held:
            each.give_way = functools.partial(gone.append, each)
        full = bool(held) and sum(held.values()) + size > most
        if grew(room, share, size):
            assert bool(gone) == full
            for each in gone:
                if each.client != client:
                    asks = (clients[client] + size) / client.share
                    assert clients[each.client] / each.client.share > asks
                else:
                    assert streams[each.client, each.stream] > streams[client, stream] + size
                del held[each]
            held[share] = size
        else:
            assert full
            assert not gone
        assert room.size == sum(held.values())
        assert room.size <= most or len(held) == 1
    for share in held:
        room.leave(share)
        room.leave(share)
    assert room.size == 0


def test_a_fair_part_is_never_refused() -> None:
    """Whatever twenty heavy streams hold, a newcomer gets its part of all."""
    room = Room(100)
    for number in range(60):
        share = Share(CLIENTS[0], f"heavy-{number % 20}")
        share.give_way = lambda: None
        grew(room, share, 10)
    assert grew(room, Share(CLIENTS[0], "camera"), 4)
    assert room.size <= 100


def test_what_cannot_give_way_stays() -> None:
    room = Room(10)
    assert grew(room, Share(CLIENTS[0], "x"), 10)
    assert not grew(room, Share(CLIENTS[1], "y"), 1)
    assert room.size == 10


# Threads ------------------------------------------------------------------------------------------


def test_work_begins_in_turn() -> None:
    begun: list[str] = []
    go_on = threading.Event()

    async def all_of_it() -> None:
        threads = FairThreads("test", 1)

        def work(name: str) -> str:
            begun.append(name)
            assert go_on.wait(PATIENCE)
            return name

        def run(name: str, cost: float) -> asyncio.Task[str]:
            share = Share(CLIENTS[0], name)
            return asyncio.ensure_future(threads.run(lambda: work(name), share, cost))

        tasks = [run("first", 9), run("second", 9), run("lost", 2), run("small", 1)]
        while not begun:
            await asyncio.sleep(0)
        lost = tasks.pop(2)
        lost.cancel()
        go_on.set()
        assert await asyncio.gather(*tasks) == ["first", "second", "small"]
        with pytest.raises(asyncio.CancelledError):
            await lost
        assert (threads._free, threads._turns.heads()) == (1, [])
        threads.close()

    asyncio.run(all_of_it())
    assert begun == ["first", "small", "second"]


def test_what_waits_may_have_to_give_way() -> None:
    go_on = threading.Event()

    async def all_of_it() -> None:
        threads, room = FairThreads("test", 1), Room(2)
        shares = [Share(CLIENTS[0], "x") for _ in range(2)]
        assert all(grew(room, share, 1) for share in shares)
        runs = [threads.run(lambda: go_on.wait(PATIENCE), share) for share in shares]
        first, second = map(asyncio.ensure_future, runs)
        await asyncio.sleep(0)
        assert grew(room, Share(CLIENTS[1], "y"), 1)
        with pytest.raises(GaveWayError):
            await second
        go_on.set()
        assert await first
        threads.close()

    asyncio.run(all_of_it())


def test_a_result_that_is_not_waited_for_is_told() -> None:
    go_on, told = threading.Event(), threading.Event()

    async def all_of_it() -> None:
        threads = FairThreads("test", 1)
        begun = threading.Event()

        def work() -> None:
            begun.set()
            go_on.wait(PATIENCE)

        share = Share(CLIENTS[0], "x")
        task = asyncio.ensure_future(threads.run(work, share, 1, lambda _: told.set()))
        while not begun.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not threads._free  # the thread goes on
        go_on.set()
        while not threads._free:
            await asyncio.sleep(0)
        threads.close()

    asyncio.run(all_of_it())
    assert told.is_set()
