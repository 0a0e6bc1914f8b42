"""How a long operation tells what it is doing: through a `Reporter` that the caller passes in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
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
        """Take one finished sentence."""

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Take the state of a task.

        Args:
            task: Its name.
            done: Images, batches or bytes that are done.
            total: How many there are in all; None where nobody knows. The task is finished when
                `done` reaches it.
            facts: What is known so far, for people, such as the error.
        """


class Silent:
    """The reporter of a caller who does not want to know.

    Example:
        >>> Silent().note("nobody reads this")
    """

    def note(self, text: str) -> None:
        """Drop the sentence."""

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Drop the numbers."""


class Steps:
    """Wraps the batches of a loop, as `tqdm` does, and tells a reporter about each.

    Args:
        reporter: Who is told.
        task: What the loop does.
        total: Batches of all loops together; by default those of the loops so far.
        done: Batches that were done before.

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
        """Say what is done now, where nobody can tell how much of it is left."""
        self._reporter.advance(self._task, self._done, None, name)

    def __call__(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Give the steps one by one, and tell of each when it is done."""
        if not self._fixed and isinstance(steps, Sized):
            self._total = (self._total or 0) + len(steps)
        self._reporter.advance(self._task, self._done, self._total)
        for step in steps:
            yield step
            self._done += 1
            self._reporter.advance(self._task, self._done, self._total)
