"""`DaskEngine`: tasks on the workers of a dask.distributed cluster, on any number of machines."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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
    """Does tasks on the workers of a running cluster, with the versions of this process.

    If a worker dies, dask tries its tasks elsewhere, as often as its configuration says. If the
    connection is lost for less than `patience` seconds, tasks that have not ended are sent again.
    """

    remote = True

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self.address, self.patience = address, patience
        self._answers_within = min(FIRST_ANSWER, patience)
        self._client: Client | None = None

    @property
    def workers(self) -> int:
        """How many threads all workers have now."""
        with quiet_logs():
            return sum(self._connected().nthreads().values())

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
        versions, tell = _versions(), tell or (lambda _: None)
        with quiet_logs(), closing(self):
            while True:
                connection = _Connection(self._connected(), pending, work, versions, tell)
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


class _ConnectionLostError(Exception):
    """The scheduler does not answer any more, or has forgotten the tasks that it was sent."""


@dataclass
class _Connection(Generic[Task, Result]):
    """Sends tasks over one connection, as long as it lasts."""

    client: Client
    tasks: Iterator[Task]
    work: Callable[[Task], Result]
    versions: Mapping[str, str | None]
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
        plugins: list[_ArtifactPlugin] = []
        try:
            with self._noticing_loss():
                for artifact in needs:
                    plugin = _ArtifactPlugin(artifact)
                    self.client.register_plugin(plugin)
                    plugins.append(plugin)
                arguments = self.versions, needs, ready
                answers = self.client.run(_why_not_ready, *arguments, on_error="return")
                for address, error in answers.items():
                    if error is not None and not isinstance(error, OSError):  # of a dead worker
                        raise EngineError(f"The worker at {address} cannot do the work: {error}")
            yield
        finally:
            with suppress(OSError, CancelledError):  # the connection may be lost at any moment
                if self.client.status == "running":
                    self.client.cancel(list(self.sent))
                    for plugin in plugins:
                        self.client.unregister_worker_plugin(plugin.name)

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
            threads = max(1, sum(self.client.nthreads().values()))
            room = WAITING_PER_THREAD * threads - len(self.sent)
            work = partial(_work_on_worker, self.work, self.versions)
            for task in islice(self.tasks, max(0, room)):
                self.unsent = [task]
                future = self.client.submit(work, task, pure=False)
                self.unsent = []
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
            if not self.told_of_no_workers and not self.client.nthreads():
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
    with ExitStack() as stack:
        for name in ("distributed", "distributed.client", "tornado"):
            log = logging.getLogger(name)
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        yield


def _versions() -> dict[str, str | None]:
    """Return the versions of this process that must agree."""
    found = get_versions(PACKAGES)["packages"]
    python = ".".join(found["python"].split(".")[:2])
    return {name: found[name] for name in PACKAGES} | {"Python": python}


def _compare(address: str, needed: Mapping[str, str | None]) -> None:
    """Raise `EngineError` if this worker has other versions."""
    here = _versions()
    other = [name for name in needed if needed[name] != here[name]]
    if other:
        wanted = ", ".join(f"{name} {needed[name]}" for name in other)
        found = ", ".join(f"{name} {here[name]}" for name in other)
        raise EngineError(
            f"All workers must have {wanted}; the one at {address} has {found}. Install the same "
            "versions there, or leave it out of the cluster."
        )


def _work_on_worker(
    work: Callable[[Task], Result], versions: Mapping[str, str | None], task: Task
) -> Result:
    """Do the work on a worker, which may have come after all others were checked."""
    _compare(get_worker().address, versions)
    return work(task)


class _ArtifactPlugin(WorkerPlugin):
    """An artifact, with its bytes if they are few; dask gives it to every worker, now and later."""

    def __init__(self, artifact: Artifact[Any]) -> None:
        self.name, self.artifact = f"ttapca-{artifact.digest}", artifact
        # Also if all workers see it now: one that is started later may not.
        few = artifact.size <= LARGEST_SENT
        self.content = (artifact.folder / artifact.digest).read_bytes() if few else None

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
    versions: Mapping[str, str | None],
    needs: Sequence[Artifact[Any]],
    ready: Callable[[], object] | None,
    dask_worker: Worker,
) -> Exception | None:
    """Return why a worker is not ready. A thread does it: the worker has to answer meanwhile."""
    try:
        _compare(dask_worker.address, versions)
        for step in (*(artifact.open for artifact in needs), *([ready] if ready else ())):
            await asyncio.to_thread(step)
    except Exception as error:
        return EngineError(str(error))  # it can be pickled
    return None
