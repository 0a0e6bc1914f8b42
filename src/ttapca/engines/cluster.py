"""`DaskEngine`: tasks on the workers of a dask.distributed cluster, on any number of machines."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic

from distributed import Client, Future, KilledWorker, Worker, WorkerPlugin, get_worker
from distributed.versions import get_versions

from ttapca.engines import Endings, Finished, Lost, Result, Task
from ttapca.engines.artifacts import Artifact, forget, keep_files_in
from ttapca.errors import EngineError

FIRST_ANSWER = 20.0  # seconds that a scheduler has for its first answer
PATIENCE = 120.0  # seconds for workers to come, or a lost connection to come back
WAITING_PER_THREAD = 2  # tasks, so that no thread waits for the next one
CHECKED_EVERY = 5.0  # seconds without news
MOST_LOSSES = 5  # of the connection, without a task that has ended
LARGEST_SENT = 128 * 2**20  # bytes of an artifact; the scheduler sends them to each worker
PACKAGES = ("ttapca", "torch", "numpy")  # of one version everywhere: for equal numbers and pickles
GO_ON = "Finished tasks are kept: the same command goes on."


class DaskEngine:
    """Does tasks on the workers of a running cluster.

    Every worker must have the same versions of ttapca, torch, numpy and Python. If a worker dies,
    dask tries its tasks elsewhere, as often as `distributed.scheduler.allowed-failures` says; after
    that a task is `Lost`. If the connection is lost for less than `patience` seconds, all tasks
    that have not ended are sent again.
    """

    remote = True

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self.address, self.patience = address, patience
        self._answers_within = min(FIRST_ANSWER, patience)
        self._client: Client | None = None

    def __repr__(self) -> str:
        """Return how to make it."""
        return f"DaskEngine({self.address!r})"

    @property
    def workers(self) -> int:
        """How many threads all workers have now."""
        with quiet_logs():
            return _threads(self._connected())

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], Result],
        *,
        needs: Sequence[Artifact[Any]] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Endings[Task, Result]:
        """Do the work for every task; see `Engine.run`."""
        pending, losses = iter(tasks), 0
        call, tell = _Call(work, _versions()), tell or (lambda _: None)
        with quiet_logs(), closing(self):
            while True:
                connection = _Connection(self._connected(), pending, call, tell)
                try:
                    with connection.opened(needs, ready):
                        for ending in connection.endings():
                            losses = 0
                            yield ending
                    return
                except _ConnectionLostError as error:
                    losses += 1
                    if losses > MOST_LOSSES:
                        raise EngineError(
                            f"The connection to {self.address} must last; it was lost {losses} "
                            f"times in a row. {GO_ON}"
                        ) from error
                    pending = chain(connection.sent.values(), connection.unsent, pending)
                    tell(f"lost the connection to {self.address}; waiting for it to come back")

    def close(self) -> None:
        """Close the connection; the cluster goes on."""
        client, self._client = self._client, None
        if client is not None:
            client.close(timeout=5)

    def _connected(self) -> Client:
        """Return the connection; make one if there is none, and wait for a worker."""
        if self._client is None or self._client.status != "running":
            self.close()
            within = self._answers_within
            try:
                self._client = Client(self.address, timeout=within, set_as_default=False)
            except (OSError, ValueError) as error:
                raise EngineError(
                    f"There must be a dask scheduler at {self.address}; none answered within "
                    f"{within:.0f} s. Start one with `dask scheduler`. {GO_ON}"
                ) from error
            self._answers_within = self.patience
        try:
            self._client.wait_for_workers(1, timeout=self.patience)
        except OSError as error:  # no time is left, or the scheduler is gone again
            self.close()
            raise EngineError(
                f"The scheduler at {self.address} must have workers; none came within "
                f"{self.patience:.0f} s. Start some with `dask worker {self.address} "
                f"--nthreads 1`. {GO_ON}"
            ) from error
        return self._client


def _threads(client: Client) -> int:
    return sum(client.nthreads().values())


class _ConnectionLostError(Exception):
    """The scheduler does not answer any more, or has forgotten the tasks that it was sent."""


@dataclass
class _Connection(Generic[Task, Result]):
    """Sends tasks over one connection, as long as it lasts."""

    client: Client
    tasks: Iterator[Task]
    call: _Call[Task, Result]
    tell: Callable[[str], None]
    sent: dict[Future[Any], Task] = field(default_factory=dict)  # tasks that have not ended
    unsent: list[Task] = field(default_factory=list)
    ended: queue.SimpleQueue[Future[Any]] = field(default_factory=queue.SimpleQueue)
    told_of_no_workers: bool = False

    @contextmanager
    def opened(
        self, needs: Sequence[Artifact[Any]], ready: Callable[[], object] | None
    ) -> Iterator[None]:
        """Make sure that all workers can do the work; at the end, cancel those left."""
        with ExitStack() as stack:
            with self._noticing_loss():
                found: Any = self.client.get_versions(packages=PACKAGES)
                for address, there in found["workers"].items():
                    _compare(address, self.call.versions, _versions(there))
                for artifact in needs:
                    stack.enter_context(self._delivered(artifact))
                self._check(needs, ready)
            try:
                yield
            finally:
                if self.sent and self.client.status == "running":
                    with suppress(OSError, CancelledError):
                        self.client.cancel(list(self.sent))

    @contextmanager
    def _delivered(self, artifact: Artifact[Any]) -> Iterator[None]:
        """Send an artifact, if it is small, to all workers, now and as they come."""
        # Also if all of them see it: one that is started later may not.
        small = artifact.size <= LARGEST_SENT
        plugin = _ArtifactPlugin(artifact, artifact.path.read_bytes() if small else None)
        self.client.register_plugin(plugin)
        try:
            yield
        finally:
            if self.client.status == "running":
                with suppress(OSError):  # it may be lost at any moment
                    self.client.unregister_worker_plugin(plugin.name)

    def _check(self, needs: Sequence[Artifact[Any]], ready: Callable[[], object] | None) -> None:
        answers = self.client.run(_why_not_ready, needs, ready, on_error="return")
        for address, error in answers.items():
            if error is not None and not isinstance(error, OSError):  # of a worker that died
                raise EngineError(f"The worker at {address} cannot do the work: {error}")

    def endings(self) -> Iterator[Finished[Task, Result] | Lost[Task]]:
        """Yield how tasks ended."""
        self._send()
        while self.sent:
            with self._noticing_loss():
                future, ending = self._next()
            del self.sent[future]
            if isinstance(ending, Exception):
                raise ending
            try:
                self._send()  # before the caller takes the result, so that no worker is idle
            finally:  # it has ended, even if the connection is lost by now
                yield ending

    def _send(self) -> None:
        with self._noticing_loss():
            room = WAITING_PER_THREAD * max(1, _threads(self.client)) - len(self.sent)
            for task in islice(self.tasks, max(0, room)):
                try:
                    future = self.client.submit(self.call, task, pure=False)
                except BaseException:
                    self.unsent.append(task)
                    raise
                self.sent[future] = task
                future.add_done_callback(self.ended.put)

    def _next(self) -> tuple[Future[Any], Finished[Task, Result] | Lost[Task] | Exception]:
        """Wait for a task that ends, and return how, or the error that its work has raised."""
        while True:
            with suppress(queue.Empty):
                future = self.ended.get(timeout=CHECKED_EVERY)
                task = self.sent[future]
                try:
                    return future, Finished(task, future.result(timeout=CHECKED_EVERY))
                except KilledWorker as error:
                    died, last = error.allowed_failures + 1, error.last_worker.address
                    reason = f"WorkerDied: {died} workers died at it, the last one at {last}"
                    return future, Lost(task, reason)
                except Exception as error:
                    if future.status == "error":  # then the work has raised it
                        return future, error
                    if not isinstance(error, TimeoutError):
                        raise
                    self.ended.put(future)  # its result has died with a worker, and is made again
            if not self.told_of_no_workers and not _threads(self.client):
                self.tell("there are no workers any more; waiting for others")
                self.told_of_no_workers = True

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            gone = isinstance(error, (OSError, CancelledError))
            if gone or self.client.status != "running":
                raise _ConnectionLostError from error
            raise


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep dask's messages about lost connections from the terminal: the engine handles them."""
    logs = [logging.getLogger(name) for name in ("distributed", "distributed.client", "tornado")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _versions(told: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """Return the versions that must agree: of this process, or as dask told of another."""
    found = (told or get_versions(PACKAGES))["packages"]
    python = ".".join(found["python"].split(".")[:2])
    return {name: found[name] for name in PACKAGES} | {"Python": python}


def _compare(address: str, here: Mapping[str, str | None], there: Mapping[str, str | None]) -> None:
    other = [name for name in here if here[name] != there[name]]
    if other:
        needed = ", ".join(f"{name} {here[name]}" for name in other)
        found = ", ".join(f"{name} {there[name] or 'none'}" for name in other)
        raise EngineError(
            f"All workers must have {needed}, as this process; the one at {address} has {found}. "
            "Install the same versions there, or leave it out of the cluster."
        )


# On workers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call(Generic[Task, Result]):
    """The work, as it is called on a worker: it may have come after all others were checked."""

    work: Callable[[Task], Result]
    versions: Mapping[str, str | None]

    def __call__(self, task: Task) -> Result:
        _compare(get_worker().address, self.versions, _versions())
        return self.work(task)


class _ArtifactPlugin(WorkerPlugin):
    """The bytes of an artifact, if they are sent; dask gives it to every worker, now and later."""

    def __init__(self, artifact: Artifact[Any], content: bytes | None) -> None:
        self.name = f"ttapca-{artifact.digest}"
        self.artifact, self.content = artifact, content

    def setup(self, worker: Worker) -> None:
        """Write the file, unless this worker sees it already."""
        folder = Path(worker.local_directory) / "ttapca"
        keep_files_in(folder)
        if self.content is not None and self.artifact.file() is None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.artifact.digest).write_bytes(self.content)

    def teardown(self, worker: Worker) -> None:
        """Remove the file, and the files that were made of it."""
        del worker  # the process knows its folder
        forget(self.artifact)


async def _why_not_ready(
    needs: Sequence[Artifact[Any]], ready: Callable[[], object] | None
) -> Exception | None:
    """Return why a worker is not ready. A thread does it: the worker has to answer meanwhile."""
    try:
        for step in (*(artifact.open for artifact in needs), *([ready] if ready else ())):
            await asyncio.to_thread(step)
    except Exception as error:
        return EngineError(str(error))  # it can be pickled
    return None
