"""`DaskEngine`: tasks on the workers of a dask.distributed cluster, on any number of machines."""

from __future__ import annotations

import asyncio
import logging
import platform
import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from distributed import Client, Future, KilledWorker, Worker, WorkerPlugin, get_worker

from ttapca import __version__
from ttapca.engines.artifacts import Artifact, forget, keep_files_in
from ttapca.engines.engine import Finished, Lost, Result, Task
from ttapca.errors import EngineError

FIRST_ANSWER = 20.0  # seconds that a scheduler has for its first answer
PATIENCE = 120.0  # seconds for workers to come, or a lost connection to come back
WAITING_PER_THREAD = 2  # tasks, so that no thread waits for the next one
CHECKED_EVERY = 5.0  # seconds without news
MOST_LOSSES = 5  # of the connection, without a task that has ended
LARGEST_SENT = 128 * 2**20  # bytes of an artifact; the scheduler sends them to each worker
FOLDER = "ttapca"  # in the folder that dask gives to a worker


class DaskEngine:
    """Does tasks on the workers of a running cluster.

    Every worker must have the same versions of ttapca, torch, numpy and Python. If a worker dies,
    dask tries its tasks elsewhere, as often as `distributed.scheduler.allowed-failures` says (3 by
    default), also those that only waited there; after that a task is `Lost`. If the connection
    breaks or the scheduler is started again, all tasks that have not ended are sent again.

    Args:
        address: Of the scheduler, `tcp://HOST:PORT` or `tls://HOST:PORT`.
        patience: Seconds to wait for a first worker, and for a lost connection to come back.
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
        needs: Sequence[Artifact[Any]] = (),
        ready: Callable[[], object] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Generator[Finished[Task, Result] | Lost[Task], None, None]:
        """Do the work for every task; see `Engine.run`."""
        pending, losses = iter(tasks), 0
        tell = tell or (lambda _: None)
        try:
            while True:
                connection = _Connection(self._connected(), pending, work, tell)
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
                            "times in a row. Finished tasks are kept: the same command goes on."
                        ) from error
                    pending = chain(connection.unfinished, pending)
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
                "--nthreads 1`. Finished tasks are kept: the same command goes on."
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
                f"{limit:.0f} s. Start one with `dask scheduler`. Finished tasks are kept: "
                "the same command goes on."
            ) from error
        self._answered = True
        return client


def _threads(client: Client) -> int:
    return sum(client.nthreads().values())


class _ConnectionLostError(Exception):
    """The scheduler does not answer any more, or has forgotten the tasks that it was sent."""


class _Connection(Generic[Task, Result]):
    """Sends tasks over one connection, as long as it lasts."""

    def __init__(
        self,
        client: Client,
        tasks: Iterator[Task],
        work: Callable[[Task], Result],
        tell: Callable[[str], None],
    ) -> None:
        self._client, self._tasks, self._tell = client, tasks, tell
        self._call = _Call(work, versions())
        self._sent: dict[Future[Any], Task] = {}  # tasks that have not ended
        self._unsent: list[Task] = []
        self._ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._told_of_no_workers = False

    @property
    def unfinished(self) -> list[Task]:
        """Tasks that were taken and have not ended."""
        return [*self._sent.values(), *self._unsent]

    @contextmanager
    def opened(
        self, needs: Sequence[Artifact[Any]], ready: Callable[[], object] | None
    ) -> Iterator[None]:
        """Make sure that all workers can do the work; cancel at the end what has not ended."""
        with quiet_logs(), ExitStack() as stack:
            with self._noticing_loss():
                check_versions(self._client)
                stack.enter_context(_delivered(self._client, needs))
                if ready is not None:
                    _check_ready(self._client, ready)
            try:
                yield
            finally:
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
            lost = None
            try:
                self._send()  # before the caller takes the result, so that no worker is idle
            except _ConnectionLostError as error:
                lost = error
            yield ending
            if lost is not None:
                raise lost

    def _send(self) -> None:
        with self._noticing_loss():
            room = WAITING_PER_THREAD * max(1, _threads(self._client)) - len(self._sent)
            for task in islice(self._tasks, max(0, room)):
                try:
                    future = self._client.submit(self._call, task, pure=False)
                except BaseException:
                    self._unsent.append(task)
                    raise
                self._sent[future] = task
                future.add_done_callback(self._ended.put)

    def _next(self) -> Future[Any]:
        """Wait for a task that ends."""
        while True:
            try:
                return self._ended.get(timeout=CHECKED_EVERY)
            except queue.Empty:
                self._look_for_workers()

    def _result(self, future: Future[Any]) -> Any:
        """Return the result of a task that has ended.

        It can take as long as the task: if the worker that held it has died, it is done again.
        """
        while True:
            try:
                return future.result(timeout=CHECKED_EVERY)
            except TimeoutError:
                if future.status == "error":  # then the work has raised it
                    raise
                self._look_for_workers()

    def _look_for_workers(self) -> None:
        """Say so, once, if all workers have gone."""
        if not self._told_of_no_workers and not _threads(self._client):
            self._tell("there are no workers any more; waiting for others")
            self._told_of_no_workers = True

    def _ending(self, future: Future[Any]) -> Finished[Task, Result] | Lost[Task] | Exception:
        """Return how a task ended, or the error that its work has raised."""
        task = self._sent[future]
        try:
            return Finished(task, self._result(future))
        except KilledWorker as error:
            count, last = error.allowed_failures + 1, error.last_worker.address
            return Lost(task, f"WorkerDied: {count} workers died at it, the last one at {last}")
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
                raise _ConnectionLostError from error
            raise


def versions() -> dict[str, str]:
    """Return the versions that all workers must have, for the same numbers and for pickles."""
    return {
        "ttapca": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_versions(client: Client) -> None:
    """Refuse workers that would compute other numbers.

    Raises:
        EngineError: A worker has another version, or no ttapca at all.
    """

    def found() -> dict[str, str]:  # pickled by value: the worker may have no ttapca
        import importlib
        import platform

        def version(name: str) -> str:
            try:
                return str(importlib.import_module(name).__version__)
            except ImportError:
                return "none"

        own = {name: version(name) for name in ("ttapca", "torch", "numpy")}
        return own | {"Python": ".".join(platform.python_version_tuple()[:2])}

    for address, there in _ask(client, found).items():
        _compare(address, versions(), there)


def _compare(address: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    other = [name for name in here if here[name] != there.get(name)]
    if other:
        needed = ", ".join(f"{name} {here[name]}" for name in other)
        found = ", ".join(f"{name} {there.get(name)}" for name in other)
        raise EngineError(
            f"All workers must have {needed}, as this process; the one at {address} has {found}. "
            "Install the same versions there, or leave it out of the cluster."
        )


@contextmanager
def _delivered(client: Client, artifacts: Sequence[Artifact[Any]]) -> Iterator[None]:
    """Send artifacts to workers that do not see them, also to those that come during the block.

    Raises:
        EngineError: An artifact is too large to be sent, and has no fallback.
    """
    with ExitStack() as stack:
        for artifact in artifacts:
            seen = _ask(client, _sees, artifact)
            blind = [address for address, sees in seen.items() if not sees]
            if artifact.size <= LARGEST_SENT:
                # Also if all of them see it: one that is started later may not.
                stack.enter_context(_sent(client, artifact))
            elif blind and artifact.fallback is None:
                raise EngineError(
                    f"All workers must see {artifact.label}: {artifact.size / 1e6:,.0f} MB are too "
                    f"much to send. {len(blind)} of {len(seen)}, such as {blind[0]}, do not see "
                    f"{artifact.path}. Put the results into a folder that all of them share."
                )
        yield


@contextmanager
def _sent(client: Client, artifact: Artifact[Any]) -> Iterator[None]:
    plugin = _ArtifactPlugin(artifact, artifact.path.read_bytes())
    client.register_plugin(plugin)
    try:
        yield
    finally:
        if client.status == "running":
            with suppress(OSError):  # it may be lost at any moment
                client.unregister_worker_plugin(plugin.name)


def _check_ready(client: Client, ready: Callable[[], object]) -> None:
    for address, error in _ask(client, _ready, ready).items():
        if error is not None:
            raise EngineError(f"The worker at {address} cannot do the work: {error}")


def _ask(client: Client, question: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return the result of a function on every worker; workers that die meanwhile are left out."""
    answers: dict[str, Any] = client.run(question, *arguments, on_error="return")
    for address, answer in list(answers.items()):
        if isinstance(answer, OSError):
            del answers[address]
        elif isinstance(answer, BaseException):
            raise EngineError(f"The worker at {address} cannot be asked: {answer!r}") from answer
    return answers


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


# On workers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call(Generic[Task, Result]):
    """The work, as it is called on a worker: it may have come after all others were checked."""

    work: Callable[[Task], Result]
    versions: Mapping[str, str]

    def __call__(self, task: Task) -> Result:
        worker = get_worker()
        _compare(worker.address, self.versions, versions())
        keep_files_in(_folder(worker))
        return self.work(task)


class _ArtifactPlugin(WorkerPlugin):
    """The bytes of an artifact, which dask gives to every worker, now and later."""

    def __init__(self, artifact: Artifact[Any], content: bytes) -> None:
        self.name = f"ttapca-{artifact.digest}"
        self.artifact, self.content = artifact, content

    def setup(self, worker: Worker) -> None:
        """Write the file, unless this worker sees it already."""
        keep_files_in(_folder(worker))
        if self.artifact.file() is None:
            _folder(worker).mkdir(parents=True, exist_ok=True)
            (_folder(worker) / self.artifact.digest).write_bytes(self.content)

    def teardown(self, worker: Worker) -> None:
        """Remove the file, and the files that were made of it."""
        keep_files_in(_folder(worker))
        forget(self.artifact)


def _folder(worker: Worker) -> Path:
    return Path(worker.local_directory) / FOLDER


def _sees(artifact: Artifact[Any], dask_worker: Worker) -> bool:
    keep_files_in(_folder(dask_worker))
    return artifact.file() is not None


async def _ready(ready: Callable[[], object], dask_worker: Worker) -> str | None:
    """Return why a worker is not ready. A thread does it: the worker has to answer meanwhile."""
    keep_files_in(_folder(dask_worker))
    try:
        await asyncio.to_thread(ready)
    except Exception as error:
        return f"{error}"
    return None
