"""`TaskLine`: tasks that wait for a worker, first those that have to be tried again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from ttapca.engines.engine import Task


@dataclass(frozen=True)
class Attempt(Generic[Task]):
    """A task, and how often it was given up because its workers died."""

    task: Task
    deaths: int = 0

    def after_death(self) -> Attempt[Task]:
        """Return the attempt that comes next."""
        return Attempt(self.task, self.deaths + 1)


class TaskLine(Generic[Task]):
    """Hands out every task once, unless it is put back.

    Example:
        >>> line = TaskLine("ab")
        >>> first = line.take()
        >>> line.put_back([first.after_death()])
        >>> line.take(), line.take(), line.take()
        (Attempt(task='a', deaths=1), Attempt(task='b', deaths=0), None)
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._remaining, self._again = iter(tasks), deque[Attempt[Task]]()

    def take(self) -> Attempt[Task] | None:
        """Return the next task; None if there is none now."""
        if self._again:
            return self._again.popleft()
        for task in self._remaining:
            return Attempt(task)
        return None

    def put_back(self, attempts: Iterable[Attempt[Task]]) -> None:
        """Let tasks be tried again, before all others."""
        self._again.extend(attempts)
