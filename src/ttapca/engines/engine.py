"""`Engine`: runs independent tasks somewhere, and tells how each ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.engines.parcels import Parcel

Task = TypeVar("Task")
Result = TypeVar("Result")
TaskOf = TypeVar("TaskOf", covariant=True)
ResultOf = TypeVar("ResultOf", covariant=True)

_PROTOCOLS = {"dask": "tcp", "dask+tls": "tls"}


@dataclass(frozen=True)
class Finished(Generic[TaskOf, ResultOf]):
    """A task that was done, and what came of it.

    Attributes:
        task: As it was given.
        result: What the work returned.
    """

    task: TaskOf
    result: ResultOf


@dataclass(frozen=True)
class Lost(Generic[TaskOf]):
    """A task whose worker died whenever it was tried.

    Attributes:
        task: As it was given.
        reason: What became of the workers, for people.
    """

    task: TaskOf
    reason: str


class Engine(Protocol):
    """Runs independent tasks.

    Every task ends exactly once, as `Finished` or as `Lost`, in the order in which they end. A
    worker that dies (killed, out of memory) takes at most the tasks with it that it was at; they
    are tried again. What the work itself raises ends the run: the error comes out of the iterator,
    and what is still running is stopped. So does leaving the loop, by Ctrl-C or otherwise.

    Attributes:
        elsewhere: Whether the work is done in other processes. Then work, tasks and results are
            pickled; work that needs much is a small object which opens a `Parcel`.
        workers: How many tasks are done at the same time, as far as is known.
    """

    @property
    def elsewhere(self) -> bool:
        """Whether the work is done in other processes."""

    @property
    def workers(self) -> int:
        """How many tasks are done at the same time, as far as is known."""

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], Result],
        *,
        needs: Sequence[Parcel[Any]] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Generator[Finished[Task, Result] | Lost[Task], None, None]:
        """Do the work for every task, and yield how each ended.

        Args:
            tasks: Taken as workers become free, so that a generator can decide late.
            work: Called with a task.
            needs: What the work opens. A worker elsewhere that does not see it is sent it.
            ready: Called on every worker that does not share the files of this machine before any
                task is run; it raises if the worker cannot do the work.
            tell: Told what happens to workers, in sentences.

        Raises:
            EngineError: There are no workers, or none that can do the work.
        """


class SerialEngine:
    """Does one task after the other, in this process.

    Example:
        >>> [ending.result for ending in SerialEngine().run([1, 2], lambda task: 10 * task)]
        [10, 20]
    """

    elsewhere = False
    workers = 1

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], Result],
        *,
        needs: Sequence[Parcel[Any]] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Generator[Finished[Task, Result] | Lost[Task], None, None]:
        """Do the work for every task; see `Engine.run`."""
        del needs, ready, tell  # what this process has packed, it can open
        for task in tasks:
            yield Finished(task, work(task))


def engine_of(words: str | None) -> Engine:
    """Return the engine of these words.

    Args:
        words: `joblib:4` for four processes of this machine; `dask://HOST:PORT`, or
            `dask+tls://HOST:PORT`, for the cluster of the scheduler there; None for this process.

    Raises:
        OptionError: The words name no engine.

    Example:
        >>> engine_of("joblib:2")
        JoblibEngine(2)
        >>> engine_of("jobs:2")
        Traceback (most recent call last):
        ttapca.errors.OptionError: An engine is `joblib:N` or `dask://HOST:PORT`; found `jobs:2`.
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
