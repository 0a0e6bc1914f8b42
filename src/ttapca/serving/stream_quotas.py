"""How many streams a token has: counted before a new one begins, so that none is too many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ttapca.errors import TooManyStreamsError
from ttapca.serving.tokens import Token


class StreamQuotas:
    """Lets a token begin streams until it has `max_streams` of them.

    It is used from the thread of the event loop only. Tokens without a limit cost nothing here.

    Args:
        names: Returns the names of all streams; it is called in another thread.
    """

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self._names = names
        self._known: dict[str, set[str]] = {}  # by token
        self._beginning: Counter[str] = Counter()  # streams of requests that are not answered yet

    @asynccontextmanager
    async def beginning(self, token: Token, stream: str) -> AsyncIterator[None]:
        """Hold a place for a stream, by its full name, while a request that may begin it runs.

        If the request fails without beginning it, the place is free again as soon as it is needed.

        Raises:
            TooManyStreamsError: The stream is new, and the token has as many as it may.
        """
        if token.max_streams is None:
            yield
            return
        if not self._has_room(token, stream):
            await self._count(token)  # streams may have been deleted in other ways
            if not self._has_room(token, stream):
                raise TooManyStreamsError(
                    f"The token `{token.name}` may have {token.max_streams:,} streams, and has as "
                    "many. Delete one, or use one that is there."
                )
        self._beginning[stream] += 1
        try:
            yield
        finally:
            # Also of a request that failed: the pool may go on with it. If not, a count tells.
            self._known[token.name].add(stream)
            self._beginning[stream] -= 1
            if not self._beginning[stream]:
                del self._beginning[stream]

    def _has_room(self, token: Token, stream: str) -> bool:
        known = self._known.get(token.name)
        if known is None or token.max_streams is None:
            return False
        new = {name for name in self._beginning if token.owns(name) and name not in known}
        return stream in known or stream in new or len(known) + len(new) < token.max_streams

    async def _count(self, token: Token) -> None:
        before = set(self._known.get(token.name, ()))
        names = await asyncio.to_thread(self._names)
        begun = self._known.get(token.name, set()) - before  # meanwhile: `names` may lack them
        self._known[token.name] = {name for name in names if token.owns(name)} | begun
