"""What a pool may hold, how its streams may be called, and who is told what it does."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from ttapca._checks import Number, Whole, check_option
from ttapca.errors import StreamNameError
from ttapca.serving.answers import Answer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class PoolLimits:
    """What a pool may hold.

    Attributes:
        max_batch: Images that are gathered into one pass; a request may have more.
        max_wait: Seconds to wait for other streams, where there were others of late.
        max_queue: Images that may wait.
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
        """Take notice of an answer, before it is given, and of the seconds that it took."""

    def refused(self, reason: str) -> None:
        """Take notice of a request that was not taken."""


def check_name(name: object) -> None:
    """Raise `StreamNameError` unless a stream may have this name.

    Example:
        >>> check_name("camera-7")
        >>> check_name("../etc/passwd")
        Traceback (most recent call last):
        ttapca.errors.StreamNameError: The name of a stream must have 1 to 100 letters of ...
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise StreamNameError(
            "The name of a stream must have 1 to 100 letters of A-Z, a-z, 0-9, dot, hyphen and "
            f"underscore, and begin with a letter or a digit; found {str(name)[:100]!r}."
        )
