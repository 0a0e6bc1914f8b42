"""How the library tells what it is doing without printing: it calls a reporter of the caller."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """What a caller implements to follow a long operation.

    Example:
        >>> class Loud:
        ...     def note(self, text: str) -> None:
        ...         print(text)
        ...     def advance(self, task: str, done: int, total: int) -> None:
        ...         print(f"{task}: {done} of {total}")
        >>> reporter: Reporter = Loud()
        >>> reporter.advance("checking", 1, 2)
        checking: 1 of 2
    """

    def note(self, text: str) -> None:
        """Take one finished sentence, such as which source was tried."""

    def advance(self, task: str, done: int, total: int) -> None:
        """Take the state of a task in bytes; it is finished when `done` reaches `total`."""


class Silent:
    """A reporter for callers who do not want to know.

    Example:
        >>> Silent().note("nobody reads this")
    """

    def note(self, text: str) -> None:
        """Drop the sentence."""

    def advance(self, task: str, done: int, total: int) -> None:
        """Drop the numbers."""
