"""Requests and their answers, and the choice of the requests of the next pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ttapca.errors import PoolFullError
from ttapca.serving.fairness import Client, GaveWayError, Room, Share, Turns
from ttapca.serving.limits import PoolLimits
from ttapca.serving.stream_record import Mode, StreamGlance, StreamStatus
from ttapca.support.outputs import OutputKind


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one request.

    Attributes:
        logits: A row for each image, as the network returns them; those of the untouched network
            unless the mode is `on`, or `auto` and adapting is expected to help.
        outputs: Their meaning: `multiclass`, `binary` or `multilabel`.
        adapted: Whether a filter changed the images that are answered for.
        differ: In shadow and auto, how many images have another class when adapted; None in other
            modes, and if the adapted network has no finite numbers: then the request is skipped.
        glance: How the stream is after this request, in short.
    """

    logits: Tensor
    outputs: OutputKind
    adapted: bool
    differ: int | None
    glance: StreamGlance
    _status: Callable[[], StreamStatus] = field(repr=False)

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return self.glance.stream

    @property
    def mode(self) -> Mode:
        """The mode of the stream."""
        return self.glance.mode

    @property
    def shift(self) -> float:
        """How surely the stream has shifted by now, from 0 to 1."""
        return self.glance.shift

    @property
    def shifted(self) -> bool:
        """Whether the alarm of the stream is on."""
        return self.glance.shifted

    @cached_property
    def status(self) -> StreamStatus:
        """The status of the stream after this request; computed when it is asked for."""
        return self._status()


@dataclass(eq=False)
class Request:
    """Images that wait for their answer, as the model takes them."""

    stream: str  # its name
    images: Tensor
    answer: Future[Answer]
    came: float  # by `time.perf_counter`
    client: Client = field(default_factory=Client)
    starts: bool = False  # whether its stream begins anew
    ends: bool = False  # whether its stream is forgotten then


class RequestQueue:
    """Hands out requests in fair turns by images, those of different streams together."""

    def __init__(self, limits: PoolLimits, news: threading.Condition) -> None:
        self.closing = False  # no more requests come, so that none waits for others
        self._limits = limits
        self._news = news  # hears of new requests; callers of all methods hold its lock
        self._room, self._turns = Room(limits.max_queue), Turns[Request]()
        self._gone: list[Request] = []  # those that give way to the next one
        self._lately = 1  # streams in a pass

    def __bool__(self) -> bool:
        """Return whether requests wait."""
        return bool(self._turns.heads())

    @property
    def images(self) -> int:
        """How many images wait."""
        return self._room.size

    def put(self, request: Request) -> list[Request]:
        """Let a request wait, and return those that give way to it, or raise `PoolFullError`."""
        share, gone = Share(request.client, request.stream), self._gone
        try:
            self._room.grow(share, len(request.images))
        except GaveWayError:
            raise self.full() from None
        waiting = self._turns.put(share, len(request.images), request)

        def give_way() -> None:
            self._turns.drop(waiting)
            self._gone.append(request)

        share.give_way = give_way
        self._gone = []
        self._news.notify_all()
        return gone

    def full(self) -> PoolFullError:
        """Return the error of a request for which there is no room."""
        return PoolFullError(
            f"At most {self._limits.max_queue:,} images may wait for an answer; {self.images:,} do "
            "already, and no other stream has more than its share of them. Try again in a moment."
        )

    def take(self) -> tuple[list[Request], list[Request]]:
        """Take out the requests of the next pass, of different streams, and cancelled ones."""
        self._wait_for_others()
        chosen: list[Request] = []
        cancelled: list[Request] = []
        images = 0
        for waiting in self._turns:
            request = waiting.item
            if chosen and images + len(request.images) > self._limits.max_batch:
                break
            self._room.leave(waiting.share)
            if request.answer.set_running_or_notify_cancel():
                self._turns.take(waiting)
                chosen.append(request)
                images += len(request.images)
            else:
                self._turns.drop(waiting)
                cancelled.append(request)
        # It fades, so that one busy moment does not make quiet ones wait for ever.
        self._lately = max(len(chosen), self._lately - 1)
        return chosen, cancelled

    def _wait_for_others(self) -> None:
        first = min(self._turns.heads(), key=lambda each: each.number)
        until = first.item.came + self._limits.max_wait
        while not self.closing and len(self._turns.heads()) < self._lately:
            left = until - time.perf_counter()
            if left <= 0 or self.images >= self._limits.max_batch:
                return
            self._news.wait(left)
