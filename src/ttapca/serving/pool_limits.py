"""What a pool may hold, and who is told what it does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ttapca._checks import Number, Whole, check_option
from ttapca.serving.answers import Answer


@dataclass(frozen=True)
class PoolLimits:
    """What a pool may hold.

    Attributes:
        max_batch: Images that are gathered into one pass; a request may have more.
        max_wait: Seconds to wait for other streams, where there were others of late.
        max_queue: Images that may wait; a request may have more if it waits alone.
        max_images: Images in a request.
        max_streams: Streams that are known, in memory or on disk.
        max_resident: Streams in memory.
        max_memory: Bytes of the states in memory; a stream with large images or with many
            conditions takes more of it.
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


class PoolObserver:
    """Is told what a pool does, by the thread that does it; by default it does nothing.

    Where it raises an `Exception`, a `CallbackWarning` tells so, and the pool goes on.
    """

    def passed(self, images: int, streams: int, seconds: float) -> None:
        """Take notice of a forward pass."""

    def answered(self, answer: Answer, waited: float) -> None:
        """Take notice of an answer before it is given, and of the seconds since its images came."""

    def refused(self, reason: str) -> None:
        """Take notice of a request that was not taken, or of states that could not be saved.

        Args:
            reason: The name of the error.
        """
