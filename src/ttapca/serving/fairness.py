"""Shares for all: turns to be served, and room to wait, by client and by stream of each client.

`Turns` is weighted fair queueing (Demers, Keshav and Shenker, 1989) on two levels, among clients
and among the streams of each: whoever would be done first if all were served at once, each by its
share, comes first. So small requests do not wait for large ones of others, and those who were idle
save up nothing. `Room` is bounded; if it is full, those who hold most of it give way. `FairThreads`
are a few threads, in which the work of an event loop begins in fair turns.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Generic, TypeAlias, TypeVar

from ttapca.errors import TtapcaError

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_IDLE = 1000  # names that are remembered although nothing of them waits


class GaveWayError(TtapcaError):
    """A request had to give way to others, which hold less."""

    def __init__(self) -> None:
        words = "Too much is being worked on, and no other client has more of it than this one."
        super().__init__(f"{words} Try again in a moment.")


@dataclass(frozen=True)
class Client:
    """Whose a request is: the name of a token, and its share of the service beside others'."""

    name: str = ""
    share: float = 1.0


Stream: TypeAlias = tuple[Client, str]


@dataclass(eq=False)
class Share:
    """What one request holds of a room."""

    client: Client
    stream: str
    give_way: Callable[[], object] | None = None  # gives the request up; None if that is too late
    size: int = 0

    @property
    def holder(self) -> Stream:
        """The stream, with its client."""
        return self.client, self.stream


class Room:
    """Room of a size; not safe for threads."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._shares: dict[Share, None] = {}  # the last one came last

    def grow(self, share: Share, more: int) -> None:
        """Let a request have more; others give way, or it must: then raise `GaveWayError`."""
        if self.size > share.size and self.size + more > self.most:  # any request may be alone
            for gone, give_way in self._greediest(share, more):
                self.leave(gone)
                give_way()
        self._shares[share] = None
        share.size += more
        self.size += more

    def leave(self, share: Share) -> None:
        """Take a request out; a second call does nothing."""
        if share in self._shares:
            del self._shares[share]
            self.size, share.size = self.size - share.size, 0

    def _greediest(self, own: Share, more: int) -> list[tuple[Share, Callable[[], object]]]:
        clients, streams = Counter[Client](), Counter[Stream]()
        able = defaultdict(list)
        for each, size in [*((each, each.size) for each in self._shares), (own, more)]:
            clients[each.client] += size
            streams[each.holder] += size
            if each.give_way is not None and each is not own:
                able[each.holder].append((each, each.give_way))

        def held(holder: Stream) -> tuple[float, int]:
            return clients[holder[0]] / holder[0].share, streams[holder]

        gone, free = [], self.most - self.size
        while free < more:
            most = max(filter(able.get, able), key=held, default=own.holder)
            same = int(most[0] == own.client)  # then streams are compared
            if held(most)[same] <= held(own.holder)[same]:
                raise GaveWayError
            gone.append(able[most].pop())
            size = gone[-1][0].size
            clients[most[0]] -= size
            streams[most] -= size
            free += size
        return gone


@dataclass(eq=False)
class Waiting(Generic[Item]):
    """Something that waits for its turn, whose cost its client pays."""

    share: Share
    cost: float
    item: Item
    number: int


class _Served(dict[str, float]):
    """How far each of some names has come, and how far all have on average."""

    now, most = 0.0, MOST_IDLE

    def join(self, name: str) -> None:
        """Let a name wait that did not; idle ones are forgotten now and then."""
        if len(self) > self.most:
            for each in [each for each, at in self.items() if at <= self.now]:
                del self[each]
            self.most = 2 * len(self) + MOST_IDLE
        self[name] = max(self.get(name, 0.0), self.now)

    def charge(self, name: str, cost: float, share: float, shares: float) -> None:
        """Serve a name with a share, of the shares of all who wait."""
        self.now += cost / shares
        self[name] = self.get(name, self.now) + cost / share


@dataclass(eq=False)
class Turns(Generic[Item]):
    """A queue in fair order, first in first out within a stream; not safe for threads."""

    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _waiting: dict[Client, dict[str, deque[Waiting[Item]]]] = field(default_factory=dict)
    _clients: _Served = field(default_factory=_Served)
    _streams: defaultdict[str, _Served] = field(default_factory=lambda: defaultdict(_Served))

    def heads(self) -> list[Waiting[Item]]:
        """Return the first of each stream, in any order."""
        return [queue[0] for streams in self._waiting.values() for queue in streams.values()]

    def put(self, share: Share, cost: float, item: Item) -> Waiting[Item]:
        """Let something wait."""
        client = share.client
        if client not in self._waiting:
            self._clients.join(client.name)
        own = self._waiting.setdefault(client, {})
        if share.stream not in own:
            self._streams[client.name].join(share.stream)
        found = Waiting(share, cost, item, next(self._numbers))
        own.setdefault(share.stream, deque()).append(found)
        return found

    def __iter__(self) -> Iterator[Waiting[Item]]:
        """Yield the first of each stream in turn; it may be taken or dropped before the next."""
        heap: list[tuple[float, int, list[Waiting[Item]]]] = []

        def push(heads: list[Waiting[Item]]) -> None:
            client = heads[-1].share.client
            done = self._clients[client.name] + heads[-1].cost / client.share
            heappush(heap, (done, heads[-1].number, heads))

        for client, streams in self._waiting.items():
            at, first = self._streams[client.name], [queue[0] for queue in streams.values()]
            push(sorted(first, key=lambda each: (-at[each.share.stream] - each.cost, -each.number)))
        while heap:
            heads = heappop(heap)[2]
            yield heads.pop()
            if heads:
                push(heads)

    def take(self, waiting: Waiting[Item]) -> None:
        """Take the first of a stream out, whose turn it is."""
        client, stream = waiting.share.client, waiting.share.stream
        shares = sum(each.share for each in self._waiting)
        self._clients.charge(client.name, waiting.cost, client.share, shares)
        streams = len(self._waiting[client])
        self._streams[client.name].charge(stream, waiting.cost, 1, streams)
        self.drop(waiting)

    def drop(self, waiting: Waiting[Item]) -> None:
        """Take something out that gives its turn up."""
        client, stream = waiting.share.client, waiting.share.stream
        streams = self._waiting[client]
        streams[stream].remove(waiting)
        if not streams[stream]:
            del streams[stream]
        if not streams:
            del self._waiting[client]


class FairThreads:
    """Threads for work of one event loop; `name` is theirs."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._turns: Turns[asyncio.Future[None]] = Turns()

    async def run(
        self,
        work: Callable[[], Result],
        share: Share,
        cost: float = 1,
        abandoned: Callable[[Future[Result]], object] = lambda _: None,
    ) -> Result:
        """Do work of some cost, which may have to give way before: then raise `GaveWayError`.

        `abandoned` is told of the result if the caller was cancelled meanwhile.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        waiting = self._turns.put(share, cost, turn)
        share.give_way = partial(turn.set_exception, GaveWayError())
        self._begin()
        try:
            await turn
        except BaseException:
            if turn.cancelled() or turn.exception():
                self._turns.drop(waiting)
                share.give_way = None
            else:
                self._end()
            raise
        running = self._executor.submit(work)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._end)

        running.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(abandoned)
            raise

    def _begin(self) -> None:
        for waiting in self._turns:
            if not self._free:
                return
            if not waiting.item.done():  # else it gave way, or was cancelled, and drops itself
                self._turns.take(waiting)
                self._free -= 1
                waiting.share.give_way = None
                waiting.item.set_result(None)

    def _end(self) -> None:
        self._free += 1
        self._begin()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)
