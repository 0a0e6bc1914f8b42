"""How much a request may ask for, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ttapca._checks import Maybe, Number, Whole, check_option
from ttapca.datasets.pictures import MAX_PIXELS

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class RequestLimits:
    """What one request may cost. The pool has limits of its own: images a pass, queue, streams.

    Attributes:
        max_body: Bytes of a request's body; what is larger is refused before it is read.
        max_held: Bytes of all bodies together that are being read or decoded; beyond that, requests
            are told to come back.
        max_images: Images of one request.
        max_pixels: Pixels of all pictures of one request together, counted from their headers
            before any is decoded: a small file can hold a large picture.
        max_running: Requests that are worked on at once.
        body_seconds: How long a client may take to send its body.
        answer_seconds: How long a request may wait for its answer.

    Raises:
        OptionError: A value cannot be.

    Example:
        >>> RequestLimits(max_body=1000).max_images
        256
    """

    max_body: int = 16 * MEGABYTE
    max_held: int = 256 * MEGABYTE
    max_images: int = 256
    max_pixels: int = MAX_PIXELS
    max_running: int = 256
    body_seconds: float = 10.0
    answer_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_option("max_body", self.max_body, Whole(1))
        check_option("max_held", self.max_held, Whole(self.max_body))
        check_option("max_images", self.max_images, Whole(1))
        check_option("max_pixels", self.max_pixels, Whole(1, MAX_PIXELS))
        check_option("max_running", self.max_running, Whole(1))
        check_option("body_seconds", self.body_seconds, Number(above=0))
        check_option("answer_seconds", self.answer_seconds, Number(above=0))


class RequestRate:
    """How often somebody may come: so many requests a second, and one second's worth at once.

    This is a token bucket: it is full at first, refills evenly, and each request takes one out. It
    is asked from one thread only, that of the event loop.

    Args:
        per_second: Requests a second; None for any number.
        clock: Seconds that only grow; for tests.

    Example:
        >>> rate = RequestRate(2, clock=lambda: 0.0)
        >>> [rate.wait() for _ in range(3)]
        [0.0, 0.0, 0.5]
    """

    def __init__(
        self, per_second: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_option("requests_per_second", per_second, Maybe(Number(above=0)))
        self.per_second, self._clock = per_second, clock
        self._most = max(1.0, per_second or 1.0)
        self._left, self._seen = self._most, clock()

    def wait(self) -> float:
        """Count a request, and return 0; or, if it comes too early, the seconds until it may."""
        if self.per_second is None:
            return 0.0
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen) * self.per_second)
        self._seen = now
        if self._left < 1:
            return (1 - self._left) / self.per_second
        self._left -= 1
        return 0.0
