"""Engines run independent tasks: in this process, in several processes, or on other machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.engines.artifacts import Artifact

__all__ = ["Endings", "Engine", "Finished", "Lost", "SerialEngine", "engine_of"]

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Finished(Generic[Task, Result]):
    """A task, and the result of its work."""

    task: Task
    result: Result


@dataclass(frozen=True)
class Lost(Generic[Task]):
    """A task whose worker died at every attempt, and the reason in words."""

    task: Task
    reason: str


Endings = Generator[Finished[Task, Result] | Lost[Task], None, None]


class Engine(Protocol):
    """Runs independent tasks, each of which ends once, as `Finished` or `Lost`, in any order.

    If a worker dies, its tasks are tried again. An error of the work ends the run.
    """

    @property
    def remote(self) -> bool:
        """Whether work, tasks and results are pickled; large data is opened as an `Artifact`."""

    @property
    def workers(self) -> int:
        """How many tasks are done at the same time, as far as is known."""

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], Result],
        *,
        needs: Sequence[Artifact[Any]] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Endings[Task, Result]:
        """Do the work for every task, and yield how each ended.

        Args:
            tasks: Taken when workers become free, so that a generator can decide late.
            work: Called with a task.
            needs: Artifacts that the work opens; sent to workers that do not see their files.
            ready: Called on every worker of a cluster before any task; raises if it cannot work.
            tell: Gets sentences about lost workers and connections.
        """


class SerialEngine:
    """Does one task after the other, in this process."""

    remote = False
    workers = 1

    def run(
        self, tasks: Iterable[Task], work: Callable[[Task], Result], **_: Any
    ) -> Endings[Task, Result]:
        """Do the work for every task; this process has all that it needs."""
        for task in tasks:
            yield Finished(task, work(task))


def engine_of(words: str | None) -> Engine:
    """Return the engine that a command names; None is this process.

    `joblib:4` is four processes of this machine; `dask://HOST:PORT`, or `dask+tls://HOST:PORT`, the
    cluster of the scheduler there.

    Example:
        >>> engine_of("joblib:2").workers
        2
    """
    if words is None:
        return SerialEngine()
    found = re.fullmatch(r"joblib:([0-9]+)|dask(\+tls)?://(.+:[0-9]+)", words)
    if not found:
        raise OptionError(f"An engine is `joblib:N` or `dask://HOST:PORT`; found `{words}`.")
    jobs, tls, address = found.groups()
    if jobs:
        from ttapca.engines.processes import JoblibEngine

        return JoblibEngine(int(jobs))
    from ttapca.engines.cluster import DaskEngine

    return DaskEngine(f"{'tls' if tls else 'tcp'}://{address}")
