"""`FairThreads`: a few threads, in which the work of an event loop begins in fair turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ttapca.serving.fairness import Share, Turns

Result = TypeVar("Result")


class GaveWayError(Exception):
    """A request had to give way to others, which hold less."""


class FairThreads:
    """Threads for work of one event loop, which begins in fair turns.

    Args:
        name: Of the threads.
        threads: How many there are.
        most: How much may be at work at once; a single piece of work may have more.
    """

    def __init__(self, name: str, threads: int, most: float | None = None) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._threads, self._most = threads, most
        self._running, self._size = 0, 0.0
        self._turns: Turns[tuple[asyncio.Future[None], Share]] = Turns()

    async def run(
        self,
        work: Callable[[], Result],
        share: Share,
        cost: float = 1,
        abandoned: Callable[[Future[Result]], object] | None = None,
    ) -> Result:
        """Do work of some size in a thread; before it begins, it may have to give way.

        Args:
            work: What is done.
            share: Of whom; its `give_way` makes this raise `GaveWayError`.
            cost: How much it is.
            abandoned: Is told of the result if the caller was cancelled meanwhile.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        waiting = self._turns.put(share.client, share.stream, cost, (turn, share))
        share.give_way = partial(turn.set_exception, GaveWayError())
        self._begin()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._end(cost)
            else:
                self._turns.drop(waiting)
                share.give_way = None
            raise
        running = self._executor.submit(work)

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._end, cost)

        running.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if abandoned is not None:
                running.add_done_callback(abandoned)
            raise

    def _begin(self) -> None:
        """Begin what can begin."""
        for waiting in self._turns:
            (turn, share), cost = waiting.item, waiting.cost
            if turn.done():  # it gave way, or was given up, and will drop itself
                continue
            over = self._most is not None and self._running and self._size + cost > self._most
            if self._running == self._threads or over:
                return
            self._turns.take(waiting)
            self._running += 1
            self._size += cost
            share.give_way = None
            turn.set_result(None)

    def _end(self, cost: float) -> None:
        self._running -= 1
        self._size -= cost
        self._begin()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)
