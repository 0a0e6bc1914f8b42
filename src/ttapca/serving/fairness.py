"""Shares for all: turns to be served, and room to wait, by client and by stream of each client.

`Turns` is weighted fair queueing (Demers, Keshav and Shenker, 1989) on two levels, among clients
and among the streams of each: whoever would be done first if all were served at once, each by its
share, comes first. So small requests do not wait for large ones of others, and those who were idle
save up nothing. `Room` is bounded; if it is full, those who hold most of it give way.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")
MOST_IDLE = 1000  # names that are remembered although nothing of them waits


@dataclass(frozen=True)
class Client:
    """Whose a request is: the name of a token, and its share of the service beside others'."""

    name: str = ""
    share: float = 1.0


@dataclass(eq=False)
class Share:
    """What one request holds of a room."""

    client: Client
    stream: str
    give_way: Callable[[], object] | None = None  # gives the request up; None if that is too late
    size: int = 0

    @property
    def holder(self) -> tuple[Client, str]:
        """The stream and its client."""
        return self.client, self.stream


class Room:
    """Room of a size; not safe for threads."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._shares: defaultdict[tuple[Client, str], list[Share]] = defaultdict(list)

    def grow(self, share: Share, more: int) -> bool:
        """Let a request have more; others may have to give way. False if it must do so itself."""
        gone = self._greediest(share, more)
        if gone is None:
            return False
        for each in gone:
            self.leave(each)
            cast(Callable[[], object], each.give_way)()
        if share not in self._shares[share.holder]:
            self._shares[share.holder].append(share)
        share.size += more
        self.size += more
        return True

    def leave(self, share: Share) -> None:
        """Take a request out; a second call does nothing."""
        shares = self._shares.get(share.holder, [])
        if share in shares:
            shares.remove(share)
            self.size -= share.size
            share.size = 0
            if not shares:
                del self._shares[share.holder]

    def _greediest(self, own: Share, more: int) -> list[Share] | None:
        """Return who gives way, the last that came first; None if `own` would hold as much."""
        over = self.size + more - self.most
        if over <= 0 or self.size == own.size:  # any request may be alone
            return []
        streams = {holder: sum(s.size for s in shares) for holder, shares in self._shares.items()}
        streams[own.holder] = streams.get(own.holder, 0) + more
        clients: defaultdict[Client, float] = defaultdict(float)
        for (client, _), size in streams.items():
            clients[client] += size / client.share
        left = {
            holder: [s for s in shares if s.give_way] for holder, shares in self._shares.items()
        }
        gone: list[Share] = []
        while over > 0:
            able = [holder for holder, shares in left.items() if shares]
            most = max(able, key=lambda each: (clients[each[0]], streams[each]), default=own.holder)
            client = most[0]
            if client == own.client:
                fair = streams[most] <= streams[own.holder]
            else:
                fair = clients[client] <= clients[own.client]
            if fair:
                return None
            last = left[most].pop()
            gone.append(last)
            over -= last.size
            streams[most] -= last.size
            clients[client] -= last.size / client.share
        return gone


@dataclass(eq=False)
class Waiting(Generic[Item]):
    """Something that waits for its turn."""

    client: Client
    stream: str
    cost: float
    item: Item
    number: int


@dataclass
class _Served:
    """How far each of some names has come, and how far all have on average."""

    now: float = 0.0
    at: dict[str, float] = field(default_factory=dict)

    def join(self, name: str, waiting: int) -> None:
        """Let a name wait that did not."""
        if len(self.at) > MOST_IDLE + 2 * waiting:
            self.at = {each: at for each, at in self.at.items() if at > self.now}
        self.at[name] = max(self.at.get(name, 0.0), self.now)

    def charge(self, name: str, cost: float, share: float, shares: float) -> None:
        """Serve a name with a share, of the shares of all who wait."""
        self.now += cost / shares
        self.at[name] = self.at.get(name, self.now) + cost / share


class Turns(Generic[Item]):
    """A queue in fair order, first in first out within a stream; not safe for threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[Client, dict[str, deque[Waiting[Item]]]] = {}
        self._clients = _Served()
        self._streams: dict[str, _Served] = {}  # by the name of their client
        self._length = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._length

    @property
    def streams(self) -> int:
        """How many streams wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def first(self) -> Waiting[Item]:
        """What came first."""
        heads = (queue[0] for streams in self._waiting.values() for queue in streams.values())
        return min(heads, key=lambda each: each.number)

    def put(self, client: Client, stream: str, cost: float, item: Item) -> Waiting[Item]:
        """Let something wait, whose cost is what its client pays for its turn."""
        if client not in self._waiting:
            self._clients.join(client.name, len(self._waiting))
            self._waiting[client] = {}
        own = self._waiting[client]
        if stream not in own:
            self._streams.setdefault(client.name, _Served()).join(stream, len(own))
            own[stream] = deque()
        found = Waiting(client, stream, cost, item, next(self._numbers))
        own[stream].append(found)
        self._length += 1
        return found

    def __iter__(self) -> Iterator[Waiting[Item]]:
        """Yield the first of each stream in turn; it may be taken or dropped before the next."""
        heap: list[tuple[float, int, Client]] = []
        queues: dict[Client, list[Waiting[Item]]] = {}

        def push(client: Client) -> None:
            head = queues[client][-1]
            done = self._clients.at[client.name] + head.cost / client.share
            heappush(heap, (done, head.number, client))

        for client, streams in self._waiting.items():
            at = self._streams[client.name].at
            heads = [queue[0] for queue in streams.values()]
            heads.sort(key=lambda each: (at[each.stream] + each.cost, each.number), reverse=True)
            queues[client] = heads
            push(client)
        while heap:
            client = heappop(heap)[2]
            yield queues[client].pop()
            if queues[client]:
                push(client)

    def take(self, waiting: Waiting[Item]) -> Item:
        """Take the first of a stream out, whose turn it is."""
        client, streams = waiting.client, len(self._waiting[waiting.client])
        shares = sum(each.share for each in self._waiting)
        self._clients.charge(client.name, waiting.cost, client.share, shares)
        self._streams[client.name].charge(waiting.stream, waiting.cost, 1, streams)
        self.drop(waiting)
        return waiting.item

    def drop(self, waiting: Waiting[Item]) -> None:
        """Take something out that gives its turn up."""
        streams = self._waiting[waiting.client]
        streams[waiting.stream].remove(waiting)
        self._length -= 1
        if not streams[waiting.stream]:
            del streams[waiting.stream]
        if not streams:
            del self._waiting[waiting.client]
