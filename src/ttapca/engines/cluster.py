"""`DaskEngine`: tasks on the workers of a dask.distributed cluster, on any number of machines."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic

from distributed import Client, Future, KilledWorker

from ttapca.engines.cluster_workers import (
    Call,
    check_ready,
    check_versions,
    delivered,
    quiet_logs,
    versions,
)
from ttapca.engines.engine import Finished, Lost, Result, Task
from ttapca.engines.task_line import Attempt, TaskLine
from ttapca.errors import EngineError

if TYPE_CHECKING:
    from ttapca.engines.parcels import Parcel

FIRST_ANSWER = 20.0  # seconds that a scheduler has, before anything was sent
PATIENCE = 120.0  # seconds for workers to come, or a lost connection to come back
RETRIES = 1  # of a task that the scheduler has given up
WAITING_PER_THREAD = 2  # tasks, so that no thread waits for the next one
LOOKED_AFTER_EVERY = 5.0  # seconds without news
MOST_LOSSES = 5  # of the connection, without a task that has ended


class DaskEngine:
    """Does tasks on the workers of a cluster that somebody has started.

    Every worker must have the same versions of ttapca, torch, numpy and Python. A task whose worker
    dies is tried again as often as the scheduler allows (`distributed.scheduler.allowed-failures`,
    3 by default), then all of this once more, and is `Lost` after that: tasks that only wait at a
    worker count as well when it dies. If the connection breaks or the scheduler is started
    again, everything that had not ended is sent again.

    Args:
        address: Of the scheduler, `tcp://HOST:PORT` or `tls://HOST:PORT`.
        patience: For how many seconds to wait for a first worker, and for a lost connection to come
            back.
    """

    elsewhere = True

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self.address, self.patience = address, patience
        self._client: Client | None = None
        self._answered = False

    def __repr__(self) -> str:
        """Return how to make it."""
        return f"DaskEngine({self.address!r})"

    @property
    def workers(self) -> int:
        """How many threads all workers have now."""
        return _threads(self._connected())

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
        line, losses = TaskLine(tasks), 0
        tell = tell or (lambda _: None)
        try:
            while True:
                connection = _Connection(self._connected(), line, work, tell)
                try:
                    with connection.opened(needs, ready):
                        for ending in connection.endings():
                            losses = 0
                            yield ending
                    return
                except _ConnectionLost as error:
                    losses += 1
                    if losses > MOST_LOSSES:
                        raise EngineError(
                            f"The connection to {self.address} must last; it was lost {losses} "
                            "times in a row. What is finished is kept: the same command goes on."
                        ) from error
                    tell(f"lost the connection to {self.address}; waiting for it to come back")
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the cluster goes on."""
        client, self._client = self._client, None
        if client is not None:
            with quiet_logs():
                client.close(timeout=5)

    def _connected(self) -> Client:
        """Return the connection; make one if there is none, and wait for a worker."""
        if self._client is None or self._client.status != "running":
            self.close()
            self._client = self._connect()
        try:
            with quiet_logs():
                self._client.wait_for_workers(1, timeout=self.patience)
        except OSError as error:  # no time is left, or the scheduler is gone again
            self.close()
            raise EngineError(
                f"The scheduler at {self.address} must have workers; none came within "
                f"{self.patience:.0f} s. Start some with `dask worker {self.address} "
                "--nthreads 1`. What is finished is kept: the same command goes on."
            ) from error
        return self._client

    def _connect(self) -> Client:
        limit = self.patience if self._answered else min(FIRST_ANSWER, self.patience)
        try:
            with quiet_logs():
                client = Client(self.address, timeout=limit, set_as_default=False)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"There must be a dask scheduler at {self.address}; none answered within "
                f"{limit:.0f} s. Start one with `dask scheduler`. What is finished is kept: "
                "the same command goes on."
            ) from error
        self._answered = True
        return client


def _threads(client: Client) -> int:
    return sum(client.nthreads().values())


class _ConnectionLost(Exception):  # noqa: N818 - it is no error as long as it comes back
    """The scheduler does not answer any more, or has forgotten what it was sent."""


class _Connection(Generic[Task, Result]):
    """Sends tasks over one connection, as long as it lasts."""

    def __init__(
        self,
        client: Client,
        line: TaskLine[Task],
        work: Callable[[Task], Result],
        tell: Callable[[str], None],
    ) -> None:
        self._client, self._line, self._tell = client, line, tell
        self._call = Call(work, versions())
        self._sent: dict[Future[Any], Attempt[Task]] = {}  # what has not ended
        self._ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._told_of_no_workers = False

    @contextmanager
    def opened(
        self, needs: Sequence[Parcel[Any]], ready: Callable[[], object] | None
    ) -> Iterator[None]:
        """Make sure that all workers can do the work; put back at the end what has not ended."""
        with quiet_logs(), ExitStack() as stack:
            with self._noticing_loss():
                check_versions(self._client)
                stack.enter_context(delivered(self._client, needs))
                if ready is not None:
                    check_ready(self._client, ready)
            try:
                yield
            finally:
                self._line.put_back(self._sent.values())
                if self._sent and self._client.status == "running":
                    with suppress(OSError, CancelledError):
                        self._client.cancel(list(self._sent))

    def endings(self) -> Iterator[Finished[Task, Result] | Lost[Task]]:
        """Yield how tasks ended."""
        self._send()
        while self._sent:
            with self._noticing_loss():
                future = self._next()
                ending = self._ending(future)
            del self._sent[future]
            if isinstance(ending, Exception):
                raise ending
            if isinstance(ending, Attempt):
                self._line.put_back([ending])
                self._tell("workers died at the same task; it is tried once more")
            lost = None
            try:
                self._send()  # first: nobody need wait for whoever takes the results
            except _ConnectionLost as error:
                lost = error  # and yet this one has ended
            if not isinstance(ending, Attempt):
                yield ending
            if lost is not None:
                raise lost

    def _send(self) -> None:
        with self._noticing_loss():
            room = WAITING_PER_THREAD * max(1, _threads(self._client)) - len(self._sent)
            while room > 0 and (attempt := self._line.take()):
                try:
                    future = self._client.submit(self._call, attempt.task, pure=False)
                except BaseException:
                    self._line.put_back([attempt])
                    raise
                self._sent[future] = attempt
                future.add_done_callback(self._ended.put)
                room -= 1

    def _next(self) -> Future[Any]:
        """Wait for a task that ends."""
        while True:
            try:
                return self._ended.get(timeout=LOOKED_AFTER_EVERY)
            except queue.Empty:
                self._look_for_workers()

    def _result(self, future: Future[Any]) -> Any:
        """Return the result of a task that has ended.

        It can take as long as the task: if the worker that held it has died, it is done again.
        """
        while True:
            try:
                return future.result(timeout=LOOKED_AFTER_EVERY)
            except TimeoutError:
                if future.status == "error":  # then the work has raised it
                    raise
                self._look_for_workers()

    def _look_for_workers(self) -> None:
        """Say so, once, if there is nobody left to do the work."""
        if not self._told_of_no_workers and not _threads(self._client):
            self._tell("there are no workers any more; waiting for others")
            self._told_of_no_workers = True

    def _ending(
        self, future: Future[Any]
    ) -> Finished[Task, Result] | Lost[Task] | Attempt[Task] | Exception:
        """Return how a task ended, what its work has raised, or the attempt that comes next."""
        attempt = self._sent[future]
        try:
            return Finished(attempt.task, self._result(future))
        except KilledWorker as error:
            if attempt.deaths < RETRIES:
                return attempt.after_death()
            count = (RETRIES + 1) * (error.allowed_failures + 1)
            last = error.last_worker.address
            return Lost(
                attempt.task, f"WorkerDied: {count} workers died at it, the last one at {last}"
            )
        except Exception as error:
            if future.status == "error":
                return error
            raise

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            gone = isinstance(error, (OSError, CancelledError))
            if gone or self._client.status != "running":
                raise _ConnectionLost from error
            raise
