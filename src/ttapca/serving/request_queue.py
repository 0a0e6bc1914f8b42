"""Requests and their answers, and the choice of the requests of the next pass."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ttapca.errors import PoolFullError
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


class RequestQueue:
    """Hands out requests in order, those of different streams together."""

    def __init__(self, limits: PoolLimits, news: threading.Condition) -> None:
        self.images = 0  # that wait
        self.closing = False  # no more requests come, so that none waits for others
        self._limits = limits
        self._news = news  # hears of new requests; callers of all methods hold its lock
        self._requests: deque[Request] = deque()
        self._lately = 1  # streams in a pass

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._requests)

    def check_room(self, images: int) -> None:
        """Raise `PoolFullError` if too many images would wait; any request may wait alone."""
        if self.images and self.images + images > self._limits.max_queue:
            raise PoolFullError(
                f"At most {self._limits.max_queue:,} images may wait for an answer; "
                f"{self.images:,} do already. Try again in a moment."
            )

    def put(self, request: Request) -> None:
        """Let a request wait."""
        self._requests.append(request)
        self.images += len(request.images)
        self._news.notify_all()

    def take(self) -> tuple[list[Request], list[Request]]:
        """Take out the requests of the next pass, of different streams, and cancelled ones."""
        self._wait_for_others()
        chosen: dict[str, Request] = {}
        cancelled: list[Request] = []
        later: deque[Request] = deque()
        images = 0
        while self._requests:
            request = self._requests.popleft()
            if chosen and images + len(request.images) > self._limits.max_batch:
                later.append(request)
                break
            if request.stream in chosen:
                later.append(request)
            elif request.answer.set_running_or_notify_cancel():
                chosen[request.stream] = request
                images += len(request.images)
            else:
                cancelled.append(request)
        self._requests.extendleft(reversed(later))
        self.images -= images + sum(len(each.images) for each in cancelled)
        # It fades, so that one busy moment does not make quiet ones wait for ever.
        self._lately = max(len(chosen), self._lately - 1)
        return list(chosen.values()), cancelled

    def _wait_for_others(self) -> None:
        """Wait a moment if fewer streams ask than did of late."""
        until = self._requests[0].came + self._limits.max_wait
        while not self.closing and len({each.stream for each in self._requests}) < self._lately:
            left = until - time.perf_counter()
            if left <= 0 or self.images >= self._limits.max_batch:
                return
            self._news.wait(left)
