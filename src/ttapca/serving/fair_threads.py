"""`FairThreads`: a few threads, in which the work of an event loop begins in fair turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ttapca.serving.fairness import GaveWayError, Share, Turns

Result = TypeVar("Result")


class FairThreads:
    """Threads for work of one event loop; `name` is theirs."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._turns: Turns[asyncio.Future[None]] = Turns()

    async def run(
        self,
        work: Callable[[], Result],
        share: Share,
        cost: float = 1,
        abandoned: Callable[[Future[Result]], object] = lambda _: None,
    ) -> Result:
        """Do work of some cost, which may have to give way before: then raise `GaveWayError`.

        `abandoned` is told of the result if the caller was cancelled meanwhile.
        """
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        waiting = self._turns.put(share, cost, turn)
        share.give_way = partial(turn.set_exception, GaveWayError())
        self._begin()
        try:
            await turn
        except BaseException:
            if turn.cancelled() or turn.exception():
                self._turns.drop(waiting)
                share.give_way = None
            else:
                self._end()
            raise
        running = self._executor.submit(work)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._end)

        running.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(abandoned)
            raise

    def _begin(self) -> None:
        for waiting in self._turns:
            if not self._free:
                return
            if not waiting.item.done():  # else it gave way, or was cancelled, and drops itself
                self._turns.take(waiting)
                self._free -= 1
                waiting.share.give_way = None
                waiting.item.set_result(None)

    def _end(self) -> None:
        self._free += 1
        self._begin()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)
