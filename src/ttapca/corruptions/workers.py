"""Share tasks among processes that end with their parent, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import cv2

from ttapca.errors import TtapcaError

T = TypeVar("T")

_AHEAD = 2  # tasks handed out a process: one at work and one to go on with

_work: Callable[[Any], None] | None = None  # a worker process's own; set once, when it starts


def completed(work: Callable[[T], None], tasks: Iterable[T], jobs: int) -> Generator[T, None, None]:
    """Do tasks and yield each when it is done, in the order in which they end.

    Args:
        work: Does one task; sent to each process once.
        tasks: Drawn from only as fast as they are done.
        jobs: How many processes; with 1 everything happens here.

    Raises:
        TtapcaError: A process was killed. Also whatever `work` raises.
    """
    if jobs == 1:
        for task in tasks:
            work(task)
            yield task
        return
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_start, initargs=(work,)
    )
    running: dict[Future[None], T] = {}
    remaining = iter(tasks)
    try:
        while True:
            with _interrupts_held():  # processes are started here, and inherit the blocked signal
                for task in islice(remaining, _AHEAD * jobs - len(running)):
                    running[pool.submit(_do, task)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                yield running.pop(future)
    except BrokenProcessPool as error:
        raise TtapcaError(
            "Every process must live until its work is done; one was killed, perhaps for lack of "
            "memory. Files that were finished are kept: run the same command again, with fewer "
            "jobs if it happens again."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait a moment, so that it reaches this process only, and never half a start."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(work: Callable[[Any], None]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)  # the processes share the cores already
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """Without this, the processes of a killed parent would wait for work for ever."""
    parent.join()
    os._exit(1)


def _do(task: Any) -> None:
    if _work is not None:
        _work(task)
