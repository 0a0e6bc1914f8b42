"""Engines run independent tasks: in this process, in several processes, or on other machines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.engines.artifacts import Artifact

__all__ = ["Endings", "Engine", "Finished", "Lost", "SerialEngine", "engine_of"]

Task = TypeVar("Task")
Result = TypeVar("Result")

_PROTOCOLS = {"dask": "tcp", "dask+tls": "tls"}


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
    """Runs independent tasks.

    Every task ends exactly once, as `Finished` or as `Lost`, in any order. If a worker dies, its
    tasks are tried again. An error that the work raises ends the run, and so does leaving the loop.
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
            ready: Called on every worker of other machines before any task; raises if the worker
                cannot do the work.
            tell: Gets sentences about lost workers and connections.

        Raises:
            EngineError: There are no workers, or none that can do the work.
        """


class SerialEngine:
    """Does one task after the other, in this process.

    Example:
        >>> [ending.result for ending in SerialEngine().run([1, 2], lambda task: 10 * task)]
        [10, 20]
    """

    remote = False
    workers = 1

    def run(
        self, tasks: Iterable[Task], work: Callable[[Task], Result], **_: Any
    ) -> Endings[Task, Result]:
        """Do the work for every task; this process has all that it needs."""
        for task in tasks:
            yield Finished(task, work(task))


def engine_of(words: str | None) -> Engine:
    """Return the engine that a command names, or raise `OptionError`.

    `joblib:4` is four processes of this machine; `dask://HOST:PORT`, or `dask+tls://HOST:PORT`, the
    cluster of the scheduler there; None this process.

    Example:
        >>> engine_of("joblib:2")
        JoblibEngine(2)
    """
    if words is None:
        return SerialEngine()
    kind, _, rest = words.partition(":")
    if kind == "joblib" and rest.isdecimal():
        from ttapca.engines.processes import JoblibEngine

        return JoblibEngine(int(rest))
    host, _, port = rest.removeprefix("//").rpartition(":")
    if kind in _PROTOCOLS and rest.startswith("//") and host and port.isdecimal():
        from ttapca.engines.cluster import DaskEngine

        return DaskEngine(f"{_PROTOCOLS[kind]}://{host}:{port}")
    raise OptionError(f"An engine is `joblib:N` or `dask://HOST:PORT`; found `{words}`.")
