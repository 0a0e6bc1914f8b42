"""Run the service with uvicorn, write its log, and end it without losing anything."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType
from typing import Any, TextIO

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from ttapca.errors import OptionError
from ttapca.serving.http_app import LOGGER, create_app
from ttapca.serving.service import Service

SERVER_LOGGER = logging.getLogger("uvicorn.error")
LARGEST_HEAD = 16 * 1024  # bytes of the first line and the headers of a request
MOST_CONNECTIONS = 1024  # beyond that, connections without a request are closed
KEPT_SECONDS = 30  # that a connection stays open without a request
HEAD_SECONDS = 10.0  # that a client may take to send the head of a request
GRACE_SECONDS = 30.0  # that running requests may take when the service ends


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which takes `grace` seconds at the end to answer running requests."""

    def __init__(self, service: Service, grace: float = GRACE_SECONDS) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # the address of a client is nowhere used
                timeout_keep_alive=KEPT_SECONDS,
                timeout_graceful_shutdown=1,  # after the grace below
                h11_max_incomplete_event_size=LARGEST_HEAD,
            )
        )
        self.service, self.grace = service, grace
        self.signal: int | None = None  # that ended it
        self._end = float("inf")
        self._heads: dict[Any, tuple[Any, float]] = {}

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and end at the second; none cuts saving short."""
        del frame
        if self.signal is not None:
            self.should_exit = self.force_exit = True
            return
        self.signal = sig
        self.service.draining = True
        self._end = time.monotonic() + self.grace

    async def on_tick(self, counter: int) -> bool:
        """Decide every tenth of a second whether to end, and whether to close connections."""
        if counter % 10 == 0 or len(self.server_state.connections) > MOST_CONNECTIONS:
            self._close_connections()
        if self.signal is not None and (not self.service.running or time.monotonic() > self._end):
            return True
        return await super().on_tick(counter)

    def _close_connections(self) -> None:
        """Close connections that wait long, or are too many: uvicorn would refuse all requests."""
        now = time.monotonic()
        waiting: dict[Any, tuple[Any, float]] = {}  # the request before, and since when
        connections: set[Any] = set(self.server_state.connections)
        for connection in connections:
            last = connection.cycle
            if last is not None and not (last.response_complete or last.more_body):
                continue
            known = self._heads.get(connection)
            waiting[connection] = known if known and known[0] is last else (last, now)
            if now - waiting[connection][1] > HEAD_SECONDS + (KEPT_SECONDS if last else 0):
                connection.transport.close()
        self._heads = waiting
        # First those that never had a request, or have half a body, of which there are more; then
        # those that wait for longest.
        bodies = {each for each in waiting if each.cycle is not None and each.cycle.more_body}
        heads = {each for each in waiting if each.cycle is None}
        few, many = sorted((bodies, heads), key=len)
        idle = sorted(
            waiting, key=lambda each: (each not in many, each not in few, waiting[each][1])
        )
        for connection in idle[: max(0, len(connections) - MOST_CONNECTIONS)]:
            connection.transport.abort()  # `close` would wait for a client that does not read


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise `OptionError`; port 0 takes any that is free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # It must say that it is TCP, as `create_server` does not: only then asyncio sends small
        # packets at once, and an answer does not wait 40 ms for the client's acknowledgement.
        listening = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would let two programs have one port
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(MOST_CONNECTIONS)
        except BaseException:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise OptionError(
            f"The service cannot listen at {host}, port {port}: {error.strerror or error}. Choose "
            "another port (0 takes any that is free) or host."
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the address of a listening socket, for a browser."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def signals_put_back() -> Iterator[None]:
    """Restore the handlers of signals after the block, which has `serve` and saves streams."""
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(service: Service, listening: socket.socket) -> int:
    """Serve until a signal comes, close the service, and return the number of the signal."""
    server = DrainingServer(service)
    if threading.current_thread() is threading.main_thread():
        # Uvicorn does the same while it runs, and puts these back when it ends. Then further
        # signals do nothing until the end of `signals_put_back`: impatience loses no streams.
        for number in HANDLED_SIGNALS:
            signal.signal(number, server.handle_exit)
    try:
        server.run([listening])
    finally:
        service.close()
    LOGGER.info("the service has ended")
    return server.signal or signal.SIGTERM


class JsonLines(logging.Formatter):
    """Each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        content |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


class LineHandler(logging.StreamHandler[TextIO]):
    """Leaves out lines while their reader has stopped: a write would block requests and saving."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if that needs no waiting."""
        try:
            ready = os.name != "posix" or bool(select.select((), (self.stream,), (), 0)[1])
        except io.UnsupportedOperation:  # a stream in memory
            ready = True
        if ready:
            super().emit(record)


@contextmanager
def logging_to(stream: TextIO, *, as_json: bool) -> Iterator[None]:
    """Write the lines of this service and the warnings of uvicorn while the block runs."""
    handler = LineHandler(stream)
    people = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if as_json else people)
    before = {logger: (logger.level, logger.propagate) for logger in (LOGGER, SERVER_LOGGER)}
    for logger, level in ((LOGGER, logging.INFO), (SERVER_LOGGER, logging.WARNING)):
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, (level, propagate) in before.items():
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
