"""Progress through work whose stages are known beforehand, with an estimate of each one's time.

The bar counts per cent of the time of all stages together. Within a stage of batches it moves with
the batches; within any other it moves with the clock, a little short of the stage's end, so that
it neither stands still nor arrives too early.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, Self, TypeVar

from ttapca.support.progress import Reporter

Step = TypeVar("Step")

READING = "reading"
WHOLE = 100
TICK = 0.5  # seconds
LAST = 0.97  # share of a stage that the clock alone may fill


class NamedStage(Protocol):
    """A stage of the work."""

    @property
    def name(self) -> str:
        """What `TimedStages.stage` is told."""

    @property
    def seconds(self) -> float:
        """How long it will take."""


class Planned(Protocol):
    """What is known about the work; its words are for people."""

    @property
    def stages(self) -> tuple[NamedStage, ...]:
        """In their order; none where nobody knows how long they take."""

    @property
    def passes(self) -> int:
        """How often the batches are read."""


class TimedStages:
    """Wraps the batches of a fit, is told its plan and its stages, and tells a reporter.

    Args:
        reporter: Who is told.
        task: What the work is.
        announce: Whether to say what will be done; a second try of the same work need not.

    Example:
        >>> from ttapca.support.progress import Silent
        >>> with TimedStages(Silent(), "adding") as progress:
        ...     total = sum(progress([1, 2, 3]))
        >>> total
        6
    """

    def __init__(self, reporter: Reporter, task: str, *, announce: bool = True) -> None:
        self._reporter, self._task, self._announce = reporter, task, announce
        self._stages: tuple[NamedStage, ...] = ()
        self._passes, self._pass, self._done, self._length = 1, 0, 0, 0
        self._unit = "batch"
        self._now, self._since = READING, time.perf_counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        """Start the clock."""
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the clock, and finish the bar."""
        self._ended.set()
        self._clock.join()
        self._reporter.advance(self._task, WHOLE, WHOLE)

    def plan(self, plan: Planned) -> None:
        """Say what will be done, and begin."""
        self._stages, self._passes = plan.stages, plan.passes
        if self._announce:
            self._reporter.note(f"{self._task}: {plan}")
        self._since = time.perf_counter()

    def stage(self, name: str) -> None:
        """Begin a stage without batches."""
        with self._lock:
            self._now, self._since = name, time.perf_counter()
        self._report()

    def __call__(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the batches of a pass, and report each when it is done."""
        self._pass, self._done = self._pass + 1, 0
        self._length = operator.length_hint(steps)  # 0 for a loader that does not know its length
        self._unit = getattr(steps, "unit", "batch")
        self.stage(READING)
        for step in steps:
            yield step
            self._done += 1
            self._report()

    def _tick(self) -> None:
        while not self._ended.wait(TICK):
            self._report()

    def _report(self) -> None:
        with self._lock:
            total = WHOLE if self._stages else None
            done = min(WHOLE - 1, int(WHOLE * self._share())) if total else self._done
            self._reporter.advance(self._task, done, total, self._words())

    def _share(self) -> float:
        """Return the share of all the time that is over, from 0 to 1."""
        names = [stage.name for stage in self._stages]
        every = sum(stage.seconds for stage in self._stages) or 1.0
        if self._now not in names:
            return LAST
        place = names.index(self._now)
        before = sum(stage.seconds for stage in self._stages[:place])
        return (before + self._stages[place].seconds * self._within(place)) / every

    def _within(self, place: int) -> float:
        """Return the share of the present stage that is over."""
        if self._now == READING and self._length:
            passes = max(self._passes, self._pass)
            return (self._pass - 1 + self._done / self._length) / passes
        spent = time.perf_counter() - self._since
        return min(LAST, spent / max(self._stages[place].seconds, 1e-3))

    def _words(self) -> str:
        if self._now != READING:
            return self._now
        batches = f"{self._unit} {self._done:,}"
        again = f", pass {self._pass}" if self._pass > 1 else ""
        return f"{READING} {batches}{again}"
