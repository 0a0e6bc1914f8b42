"""What a long operation tells: how far it is, to a `Reporter`, and its peak memory."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

Step = TypeVar("Step")


class Reporter(Protocol):
    """What a caller implements to follow a long operation.

    Example:
        >>> class Loud:
        ...     def note(self, text: str) -> None:
        ...         print(text)
        ...     def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        ...         print(f"{task}: {done} of {total}")
        >>> reporter: Reporter = Loud()
        >>> reporter.advance("checking", 1, 2)
        checking: 1 of 2
    """

    def note(self, text: str) -> None:
        """Receive one finished sentence."""

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Receive the state of a task.

        Args:
            task: Its name.
            done: Number of images, batches or bytes that are done.
            total: Number of all of them, or None if unknown. The task is finished when `done`
                reaches it.
            facts: What is known so far, for people, such as the error.
        """


class Silent:
    """A reporter that reports nothing.

    Example:
        >>> Silent().note("nobody reads this")
    """

    def note(self, text: str) -> None:
        """Ignore the sentence."""

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Ignore the numbers."""


class Steps:
    """Wraps the batches of a loop, as `tqdm` does, and tells a reporter about each.

    Args:
        reporter: Who is told.
        task: What the loop does.
        total: Number of batches of all loops together; by default that of the loops so far.
        done: Number of batches that were done before.

    Example:
        >>> sum(Steps(Silent(), "adding")([1, 2, 3]))
        6
    """

    def __init__(
        self, reporter: Reporter, task: str, total: int | None = None, done: int = 0
    ) -> None:
        self._reporter, self._task = reporter, task
        self._done, self._total, self._fixed = done, total, total is not None

    def stage(self, name: str) -> None:
        """Name the work that is done now, if nobody knows how much of it is left."""
        self._reporter.advance(self._task, self._done, None, name)

    def __call__(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the steps, and report each when it is done."""
        length = operator.length_hint(steps)  # 0 for a loader that does not know its length
        if not self._fixed and length:
            self._total = (self._total or 0) + length
        self._reporter.advance(self._task, self._done, self._total)
        for step in steps:
            yield step
            self._done += 1
            self._reporter.advance(self._task, self._done, self._total)


def forget_peak_memory() -> None:
    """Start to measure anew, where the system can; elsewhere the peak is that of the whole run."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak memory


def peak_memory() -> float:
    """Return the highest resident memory of this process since it was forgotten, in MB.

    `getrusage` is used only where there is no other way: on Linux it starts with the peak of the
    parent process.

    Example:
        >>> peak_memory() > 10
        True
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    import resource  # not on Windows, which has no other way either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
