"""A client that costs little, so that what is measured is the server.

It keeps a connection for each of many cameras in one thread, sends requests that were made before,
and reads no more of an answer than its status and where it ends.
"""

from __future__ import annotations

import asyncio
from typing import cast

PATIENCE = 120.0  # seconds without an answer


def predict_request(stream: str, kind: str, body: bytes) -> bytes:
    """A request for predictions of one stream, as it goes over the wire."""
    head = (
        f"POST /v1/predict?stream={stream} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One request at a time, over a connection that stays open, and is opened again if it must be.

    Args:
        host: Of the server.
        port: Of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._line: _Line | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """The status of the answer, and its body.

        Raises:
            OSError: The server cannot be reached, has broken off, or keeps silent.
        """
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.transport.is_closing():
            _, self._line = await loop.create_connection(_Line, *self._address)
        silence = loop.call_later(PATIENCE, self._line.end, TimeoutError("no answer came"))
        try:
            return await self._line.send(request)
        finally:
            silence.cancel()

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._line is not None:
            self._line.transport.close()


class _Line(asyncio.Protocol):
    """A connection while it is open, and the answer that is waited for."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._came = bytearray()

    def send(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        end = self._came.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._came[:end]).lower()
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)
        if len(self._came) < end + 4 + length:
            return
        body = bytes(self._came[end + 4 :])
        self._came.clear()
        if b"\r\nconnection: close" in head:
            self.transport.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head.split(None, 2)[1]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(error or ConnectionResetError("the server has broken off"))

    def end(self, error: Exception) -> None:
        """Tell whoever waits that there will be no answer."""
        self.transport.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
