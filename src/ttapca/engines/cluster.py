"""`DaskEngine`: tasks on the workers of a dask.distributed cluster, on any number of machines."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from itertools import islice
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
from ttapca.errors import EngineError

if TYPE_CHECKING:
    from ttapca.engines.parcels import Parcel

PATIENCE = 120.0  # seconds
WAITING_PER_THREAD = 2  # tasks, so that no thread waits for the next one
LOOKED_AFTER_EVERY = 5.0  # seconds without news
MOST_LOSSES = 5  # of the connection, without a task that has ended


class DaskEngine:
    """Does tasks on the workers of a cluster that somebody has started.

    Every worker must have the same versions of ttapca, torch, numpy and Python. A task whose worker
    dies is tried again as often as the scheduler allows (`distributed.scheduler.allowed-failures`,
    3 by default), and is `Lost` after that. If the connection breaks or the scheduler is started
    again, everything that had not ended is sent again.

    Args:
        address: Of the scheduler, `tcp://HOST:PORT` or `tls://HOST:PORT`.
        patience: For how many seconds to wait for a scheduler and a first worker, also after the
            connection was lost.
    """

    elsewhere = True

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self.address, self.patience = address, patience
        self._client: Client | None = None

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
        remaining, again, losses = iter(tasks), deque[Task](), 0
        tell = tell or (lambda _: None)
        try:
            while True:
                connection = _Connection[Task, Result](self._connected(), work, tell)
                try:
                    with connection.opened(needs, ready):
                        for ending in connection.endings(_taken(again, remaining)):
                            losses = 0
                            yield ending
                    return
                except _ConnectionLost as error:
                    losses += 1
                    again.extendleft(reversed(connection.sent.values()))
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
        if self._client is not None and self._client.status == "running":
            return self._client
        self.close()
        with quiet_logs():
            try:
                client = Client(self.address, timeout=self.patience, set_as_default=False)
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"There must be a dask scheduler at {self.address}; none answered within "
                    f"{self.patience:.0f} s. Start one with `dask scheduler`. What is finished is "
                    "kept: the same command goes on."
                ) from error
            self._client = client
            try:
                client.wait_for_workers(1, timeout=self.patience)
            except TimeoutError as error:
                raise EngineError(
                    f"The scheduler at {self.address} must have workers; none came within "
                    f"{self.patience:.0f} s. Start some with `dask worker {self.address} "
                    "--nthreads 1`. What is finished is kept: the same command goes on."
                ) from error
        return client


def _threads(client: Client) -> int:
    return sum(client.nthreads().values())


def _taken(again: deque[Task], remaining: Iterator[Task]) -> Iterator[Task]:
    """Yield tasks one by one, first those that are to be sent again."""
    while True:
        if again:
            yield again.popleft()
        else:
            try:
                yield next(remaining)
            except StopIteration:
                return


class _ConnectionLost(Exception):  # noqa: N818 - it is no error as long as it comes back
    """The scheduler does not answer any more, or has forgotten what it was sent."""


class _Connection(Generic[Task, Result]):
    """Tasks that are sent over one connection, as long as it lasts.

    Attributes:
        sent: Tasks that have not ended, by their futures.
    """

    def __init__(
        self, client: Client, work: Callable[[Task], Result], tell: Callable[[str], None]
    ) -> None:
        self._client, self._call, self._tell = client, Call(work, versions()), tell
        self.sent: dict[Future[Any], Task] = {}
        self._ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    @contextmanager
    def opened(
        self, needs: Sequence[Parcel[Any]], ready: Callable[[], object] | None
    ) -> Iterator[None]:
        """Make sure that all workers can do the work; cancel at the end what has not ended."""
        with quiet_logs(), ExitStack() as stack:
            with self._noticing_loss():
                check_versions(self._client)
                stack.enter_context(delivered(self._client, needs))
                if ready is not None:
                    check_ready(self._client, ready)
            try:
                yield
            finally:
                if self.sent and self._client.status == "running":
                    self._client.cancel(list(self.sent))

    def endings(self, tasks: Iterator[Task]) -> Iterator[Finished[Task, Result] | Lost[Task]]:
        """Yield how tasks ended."""
        self._send(tasks)
        while self.sent:
            with self._noticing_loss():
                future = self._next()
                if future.status == "cancelled":
                    raise _ConnectionLost
                ending = self._ending(future)
            del self.sent[future]
            self._send(tasks)
            if isinstance(ending, Exception):
                raise ending
            yield ending

    def _send(self, tasks: Iterator[Task]) -> None:
        with self._noticing_loss():
            room = WAITING_PER_THREAD * max(1, _threads(self._client)) - len(self.sent)
            for task in islice(tasks, max(0, room)):
                future = self._client.submit(self._call, task, pure=False)
                self.sent[future] = task
                future.add_done_callback(self._ended.put)

    def _next(self) -> Future[Any]:
        """Wait for a task that ends; say so if there is nobody left to do it."""
        told = False
        while True:
            try:
                return self._ended.get(timeout=LOOKED_AFTER_EVERY)
            except queue.Empty:
                if not told and not _threads(self._client):
                    self._tell("there are no workers any more; waiting for others")
                    told = True

    def _ending(self, future: Future[Any]) -> Finished[Task, Result] | Lost[Task] | Exception:
        task = self.sent[future]
        try:
            return Finished(task, future.result())
        except KilledWorker as error:
            count, last = error.allowed_failures + 1, error.last_worker.address
            return Lost(task, f"WorkerDied: {count} workers died at it, the last one at {last}")
        except Exception as error:
            if future.status == "error":  # what the work has raised
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
