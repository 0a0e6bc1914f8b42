"""`JoblibEngine`: tasks in processes of this machine, which joblib's loky starts and watches."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch

from ttapca._checks import Whole, check_option
from ttapca.engines import Endings, Finished, Lost, Result, Task
from ttapca.support.process import interrupts_held

PARENT_CHECKED_EVERY = 0.5  # seconds
HANDED_OVER_WITHIN = 5.0  # seconds, from this process to a worker
# Where libraries look for the number of their threads when they are loaded.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


class JoblibEngine:
    """Does tasks in `jobs` processes of this machine; if its process dies, one is tried again."""

    remote = True

    def __init__(self, jobs: int) -> None:
        check_option("jobs", jobs, Whole(1, 1000))
        self.workers = jobs

    def run(
        self,
        tasks: Iterable[Task],
        work: Callable[[Task], Result],
        *,
        tell: Callable[[str], None] | None = None,
        **_: Any,
    ) -> Endings[Task, Result]:
        """Do the work for every task; all processes of this machine see its artifacts."""
        import joblib  # knows the limits of containers, too

        threads = max(1, min(torch.get_num_threads(), joblib.cpu_count() // self.workers))
        pending, processes = iter(tasks), [_Process(threads) for _ in range(self.workers)]
        running: dict[Future[Result], tuple[_Process, Task, bool]] = {}

        def start(process: _Process) -> None:
            for task in islice(pending, 1):
                running[process.submit(work, task)] = process, task, False

        try:
            for process in processes:
                start(process)
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    process, task, retried = running.pop(future)
                    error = future.exception()
                    if _is_death(error) and not retried:
                        if tell is not None:
                            tell(f"a process died{_code(error)}; its task is tried once more")
                        running[process.submit(work, task)] = process, task, True
                        continue
                    start(process)  # before the caller takes the result, so that it is not idle
                    if _is_death(error):
                        why = "it was killed, crashed, or needed more memory than there was"
                        yield Lost(task, f"WorkerDied: its process died twice{_code(error)}: {why}")
                    else:
                        yield Finished(task, future.result())
        finally:
            for process in processes:
                process.end()


@dataclass
class _Process:
    """One worker process; a loky executor of several ends all of them if one dies."""

    _threads: int
    _executor: Any = None
    _last: Future[Any] | None = None

    def submit(self, work: Callable[[Task], Result], task: Task) -> Future[Result]:
        if self._executor is None:
            from joblib.externals.loky import ProcessPoolExecutor

            threads = dict.fromkeys(THREAD_VARIABLES, str(self._threads))
            self._executor = ProcessPoolExecutor(
                1, initializer=_start, initargs=(self._threads, os.getpid()), env=threads
            )
        try:
            with interrupts_held():  # the first task starts the process
                self._last = self._executor.submit(work, task)
        except Exception as error:
            if not _is_death(error):
                raise
            self.end()  # it has died, at its last task or without one
            return self.submit(work, task)
        return cast("Future[Result]", self._last)

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._executor is None:
            return
        end, last = time.monotonic() + HANDED_OVER_WITHIN, self._last
        while last and not (last.running() or last.done()) and time.monotonic() < end:
            time.sleep(0.001)  # loky cannot be ended while it hands over a task
        self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = self._last = None


def _is_death(error: BaseException | None) -> bool:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    return isinstance(error, TerminatedWorkerError)


def _start(threads: int, parent: int) -> None:
    """Prepare a new worker process."""
    from joblib.externals.loky import process_executor

    def end_with_parent() -> None:  # soon after it was killed: loky's own would wait for ever
        while os.getppid() == parent:
            time.sleep(PARENT_CHECKED_EVERY)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # Files that are mapped into memory look like a leak to loky, which would end the process. And
    # to look for one, it collects garbage every second: 0.1 s each time, with torch loaded.
    process_executor._MEMORY_LEAK_CHECK_DELAY = math.inf


def _code(error: BaseException | None) -> str:
    found = re.search(r"\{(.*)\}", str(error))  # `{SIGKILL(-9)}`, in a message of many lines
    return f" ({found[1]})" if found else ""
