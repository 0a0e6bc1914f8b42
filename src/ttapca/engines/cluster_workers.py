"""What is asked of the workers of a cluster before a task is sent, and what a task does first."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from distributed import Client, Worker, WorkerPlugin, get_worker

from ttapca import __version__
from ttapca.engines.engine import Result, Task
from ttapca.engines.parcels import Parcel, forget, keep_files_in
from ttapca.errors import EngineError

LARGEST_SENT = 128 * 2**20  # bytes; the scheduler sends them to each worker
FOLDER = "ttapca"  # in the folder that dask gives to a worker


def versions() -> dict[str, str]:
    """Return what must be the same on all workers, for the same numbers and for pickles."""
    return {
        "ttapca": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


@dataclass(frozen=True)
class Call(Generic[Task, Result]):
    """The work, as it is called on a worker.

    Attributes:
        work: Called with a task.
        versions: Of whoever sends it: workers may come long after all others were looked at.
    """

    work: Callable[[Task], Result]
    versions: Mapping[str, str]

    def __call__(self, task: Task) -> Result:
        """Do the work for a task."""
        worker = get_worker()
        _refuse(worker.address, self.versions, versions())
        keep_files_in(_folder(worker))
        return self.work(task)


def check_versions(client: Client) -> None:
    """Refuse workers that would compute something else.

    Raises:
        EngineError: A worker has another version, or no ttapca at all.
    """

    def found() -> dict[str, str]:  # sent as it is: the worker may have no ttapca
        import importlib
        import platform

        def version(name: str) -> str:
            try:
                return str(importlib.import_module(name).__version__)
            except ImportError:
                return "none"

        own = {name: version(name) for name in ("ttapca", "torch", "numpy")}
        return own | {"Python": ".".join(platform.python_version_tuple()[:2])}

    for address, there in _asked(client, found).items():
        _refuse(address, versions(), there)


def _refuse(address: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    other = [name for name in here if here[name] != there.get(name)]
    if other:
        needed = ", ".join(f"{name} {here[name]}" for name in other)
        found = ", ".join(f"{name} {there.get(name)}" for name in other)
        raise EngineError(
            f"All workers must have {needed}, as this process; the one at {address} has {found}. "
            "Install the same versions there, or leave it out of the cluster."
        )


@contextmanager
def delivered(client: Client, parcels: Sequence[Parcel[Any]]) -> Iterator[None]:
    """Send parcels to workers that do not see them, also to those that come during the block.

    Raises:
        EngineError: A parcel is too large to be sent, and there is no other way to it.
    """
    with ExitStack() as stack:
        for parcel in parcels:
            seen = _asked(client, _sees, parcel)
            blind = [address for address, sees in seen.items() if not sees]
            if parcel.size <= LARGEST_SENT:
                # Also if all of them see it: one that is started later may not.
                stack.enter_context(_sent(client, parcel))
            elif blind and parcel.otherwise is None:
                raise EngineError(
                    f"All workers must see {parcel.what}: {parcel.size / 1e6:,.0f} MB are too much "
                    f"to send. {len(blind)} of {len(seen)}, such as {blind[0]}, do not see "
                    f"{parcel.path}. Put the results into a folder that all of them share."
                )
        yield


def check_ready(client: Client, ready: Callable[[], object]) -> None:
    """Call a function on every worker.

    Raises:
        EngineError: It raised something on one of them.
    """
    for address, error in _asked(client, _ready, ready).items():
        if error is not None:
            raise EngineError(f"The worker at {address} cannot do the work: {error}")


def _asked(client: Client, question: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what a function returns on every worker; those that die meanwhile are left out."""
    answers: dict[str, Any] = client.run(question, *arguments, on_error="return")
    for address, answer in list(answers.items()):
        if isinstance(answer, OSError):
            del answers[address]
        elif isinstance(answer, BaseException):
            raise EngineError(f"The worker at {address} cannot be asked: {answer!r}") from answer
    return answers


# What follows runs on workers ---------------------------------------------------------------------


def _folder(worker: Worker) -> Path:
    return Path(worker.local_directory) / FOLDER


def _sees(parcel: Parcel[Any], dask_worker: Worker) -> bool:
    keep_files_in(_folder(dask_worker))
    return parcel.file() is not None


async def _ready(ready: Callable[[], object], dask_worker: Worker) -> str | None:
    """Return why a worker is not ready. A thread does it: the worker has to answer meanwhile."""
    keep_files_in(_folder(dask_worker))
    try:
        await asyncio.to_thread(ready)
    except Exception as error:
        return f"{error}"
    return None


class _Shipment(WorkerPlugin):
    """Bytes of a parcel, which dask gives to every worker, now and later."""

    def __init__(self, parcel: Parcel[Any], content: bytes) -> None:
        self.name = f"ttapca-{parcel.digest}"
        self.parcel, self.content = parcel, content

    def setup(self, worker: Worker) -> None:
        """Write the file, unless this worker sees it already."""
        keep_files_in(_folder(worker))
        if self.parcel.file() is None:
            _folder(worker).mkdir(parents=True, exist_ok=True)
            (_folder(worker) / self.parcel.digest).write_bytes(self.content)

    def teardown(self, worker: Worker) -> None:
        """Remove the file, and what was made of it."""
        keep_files_in(_folder(worker))
        forget(self.parcel)


# Until here ---------------------------------------------------------------------------------------


@contextmanager
def _sent(client: Client, parcel: Parcel[Any]) -> Iterator[None]:
    shipment = _Shipment(parcel, parcel.path.read_bytes())
    client.register_plugin(shipment)
    try:
        yield
    finally:
        if client.status == "running":
            with suppress(OSError):  # it may be lost at any moment
                client.unregister_worker_plugin(shipment.name)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep what dask says of lost connections from the terminal: it is handled, or raised."""
    logs = [logging.getLogger(name) for name in ("distributed", "distributed.client", "tornado")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
