"""Limits of a pool, of a request over HTTP, and of a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from ttapca._checks import Count, NotNegative, Number, Positive, Whole, check_fields, check_option
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

    max_batch: Count = 64
    max_wait: NotNegative = 0.002
    max_queue: Count = 1024
    max_images: Count = 256
    max_streams: Count = 100_000
    max_resident: Count = 2_000
    max_memory: Count = 2**30

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_fields(self)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests over HTTP."""

    max_body: Count = 16 * MEGABYTE  # bytes; a larger body is refused before it is read
    max_held: Count = 256 * MEGABYTE  # bytes of all bodies that have come and are not decoded yet
    max_images: Count = 256
    # Of all pictures of a request together, counted from their headers before any is decoded: a
    # small file can hold a large picture. Large ones are decoded one request after the other.
    max_pixels: Annotated[int, Whole(1, MAX_PIXELS)] = MAX_PIXELS
    max_running: Count = 256  # requests at once that send no images
    body_seconds: Positive = 10.0  # that a client may take to send its body
    answer_seconds: Positive = 30.0  # that a request may wait for its answer

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)
        check_option("max_held", self.max_held, Whole(self.max_body))


class Rate:
    """A token bucket for one thread: one second's worth may come at once, or what comes alone."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        check_option("per_second", per_second, Number(above=0))
        self._per_second, self._clock = per_second, clock
        self._most = max(1.0, per_second)
        self._left, self._updated = self._most, clock()

    def wait(self, count: int = 1) -> float:
        """Count requests or images, and return 0; or, if they come too early, seconds to wait.

        Of more than a second's worth the rest is owed: what comes next waits for it.
        """
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._updated) * self._per_second)
        self._updated = now
        missing = min(count, self._most) - self._left
        if missing > 0:
            return missing / self._per_second
        self._left -= count
        return 0.0
