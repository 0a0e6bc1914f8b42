"""Limits of a pool, of a request over HTTP, and of a token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from ttapca._checks import Number, Rule, Whole, check_option
from ttapca.datasets.pictures import MAX_PIXELS

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class PoolLimits:
    """Limits of a pool.

    Attributes:
        max_batch: Images of one pass; a request may have more.
        max_wait: Seconds to wait for other streams, if others came of late.
        max_queue: Images that may wait; a request may have more if it waits alone.
        max_images: Images in a request.
        max_streams: Streams that are known, in memory or on disk.
        max_resident: Streams in memory.
        max_memory: Bytes of the states in memory.
    """

    max_batch: int = 64
    max_wait: float = 0.002
    max_queue: int = 1024
    max_images: int = 256
    max_streams: int = 100_000
    max_resident: int = 2_000
    max_memory: int = 2**30

    def __post_init__(self) -> None:
        """Check the numbers."""
        for each in dataclasses.fields(self):
            rule = Number(0) if each.name == "max_wait" else Whole(1)
            check_option(each.name, getattr(self, each.name), rule)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests over HTTP."""

    max_body: int = 16 * MEGABYTE  # bytes; a larger body is refused before it is read
    max_held: int = 256 * MEGABYTE  # bytes of all bodies that are being read or decoded
    max_images: int = 256
    # Of all pictures of a request together, counted from their headers before any is decoded: a
    # small file can hold a large picture.
    max_pixels: int = MAX_PIXELS
    max_running: int = 256  # requests that are worked on at once
    body_seconds: float = 10.0  # that a client may take to send its body
    answer_seconds: float = 30.0  # that a request may wait for its answer

    def __post_init__(self) -> None:
        """Check the values."""
        rules: dict[str, Rule] = {
            "max_held": Whole(self.max_body),
            "max_pixels": Whole(1, MAX_PIXELS),
            "body_seconds": Number(above=0),
            "answer_seconds": Number(above=0),
        }
        for each in dataclasses.fields(self):
            check_option(each.name, getattr(self, each.name), rules.get(each.name, Whole(1)))


class RequestRate:
    """A token bucket for one thread: one second's worth of requests may come at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        check_option("requests_per_second", per_second, Number(above=0))
        self._per_second, self._clock = per_second, clock
        self._most = max(1.0, per_second)
        self._left, self._updated = self._most, clock()

    def wait(self) -> float:
        """Count a request, and return 0; or, if it comes too early, the seconds until it may."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._updated) * self._per_second)
        self._updated = now
        if self._left < 1:
            return (1 - self._left) / self._per_second
        self._left -= 1
        return 0.0
