"""How a long operation tells a `Reporter` its progress, and how counts are written."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Step = TypeVar("Step")


def counted(number: int, thing: str) -> str:
    """Write a number of things: `1 image`, `2,000 images`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


class Reporter:
    """Follows a long operation; this one does nothing, and a caller's own tells somebody."""

    def note(self, text: str) -> None:
        """Receive one finished sentence."""

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        """Receive the images, batches or bytes of a task that are done, and results so far."""


class Counted(Generic[Step]):
    """Steps whose number is known."""

    def __init__(self, steps: Iterable[Step], count: int) -> None:
        self._steps, self._count = steps, count

    def __length_hint__(self) -> int:
        """Return how many there are."""
        return self._count

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps."""
        return iter(self._steps)


class Steps:
    """Wraps the batches of a loop, as `tqdm` does, and tells a reporter about each."""

    def __init__(
        self, reporter: Reporter, task: str, total: int | None = None, done: int = 0
    ) -> None:
        # `total` counts the batches of all loops, `done` those of earlier runs.
        self._reporter, self._task = reporter, task
        self._done, self._total, self._fixed = done, total, total is not None
        self._plan = ""

    def plan(self, plan: object) -> None:
        """Note the plan of the task; a second try with the same plan is not noted again."""
        if self._plan != str(plan):
            self._plan = str(plan)
            self._reporter.note(f"{self._task}: {plan}")

    def stage(self, name: str) -> None:
        """Name the work that is done now, of an unknown length."""
        self._reporter.advance(self._task, self._done, None, name)

    def finish(self) -> None:
        """End the task, after a stage or an unknown number of batches."""
        self._reporter.advance(self._task, self._done, self._done)

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
