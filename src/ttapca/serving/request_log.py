"""One line for each request: for people, or as JSON for programs.

A line has the route instead of the address, and no token, query or anything of an image.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any, TextIO

LOGGER = logging.getLogger("ttapca.serving")
SERVER_LOGGER = logging.getLogger("uvicorn.error")
MOST_WAITING = 10_000  # lines, if their reader has stopped
LAST_SECONDS = 2.0  # that the last lines may take at the end


@dataclass
class RequestRecord:
    """The facts of one request for log and metrics; the routes fill them in."""

    request: str  # its id, from the client or drawn here
    method: str
    route: str = "other"  # the pattern that its address fits, such as `/v1/streams/{name}`
    status: int = 0
    seconds: float = 0.0  # from its head to the end of its answer
    token: str | None = None  # the name, never the secret
    stream: str | None = None  # the full name
    images: int | None = None
    bytes: int | None = None  # of its body
    code: str | None = None  # if it was refused

    def line(self) -> str:
        """Return it for a person: `GET /healthz 200 in 1.2 ms  (1f)`."""
        parts = [f"{self.method} {self.route} {self.status} in {1000 * self.seconds:.1f} ms"]
        parts += [part for part in (self.code, self.token, self.stream) if part]
        if self.images is not None:
            parts.append(f"{self.images} image{'s' * (self.images != 1)}")
        return f"{', '.join(parts)}  ({self.request})"

    def log(self) -> None:
        """Write the line."""
        LOGGER.info("%s", self.line(), extra={"request_record": self})


class JsonLines(logging.Formatter):
    """Each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        request = getattr(record, "request_record", None)
        if isinstance(request, RequestRecord):
            facts = {name: value for name, value in asdict(request).items() if value is not None}
            content |= facts | {"seconds": round(request.seconds, 6)}
        else:
            content["message"] = record.getMessage()
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


class _Queue(QueueHandler):
    """Hands records to another thread, so that a blocked terminal blocks no request."""

    queue: queue.SimpleQueue[logging.LogRecord | None]  # None is the end

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() < MOST_WAITING:  # without a reader, lines are lost, not requests
            self.queue.put(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process; the other thread formats it


def _write(stream: TextIO, text: str) -> None:
    """Write to the file of a stream, not to its buffer.

    Without a reader, this waits for ever. It must not hold a lock of the stream or of a handler of
    `logging` meanwhile: Python takes those when it ends, and would wait as well.
    """
    try:
        file = stream.fileno()
    except io.UnsupportedOperation:  # a stream in memory
        stream.write(text)
        stream.flush()
        return
    left = text.encode(stream.encoding, "backslashreplace")
    while left:
        left = left[os.write(file, left) :]


@contextmanager
def logging_to(stream: TextIO, *, as_json: bool) -> Iterator[None]:
    """Write the lines of this service and the warnings of uvicorn while the block runs."""
    handler = _Queue(queue.SimpleQueue())
    formatter = JsonLines() if as_json else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")

    def write_lines() -> None:
        while (record := handler.queue.get()) is not None:
            with suppress(Exception):  # a line that cannot be written stops no other
                _write(stream, f"{formatter.format(record)}\n")

    # A daemon: the process can end while it waits for a reader.
    writer = threading.Thread(target=write_lines, name="ttapca log", daemon=True)
    before = {logger: (logger.level, logger.propagate) for logger in (LOGGER, SERVER_LOGGER)}
    for logger, level in ((LOGGER, logging.INFO), (SERVER_LOGGER, logging.WARNING)):
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    writer.start()
    try:
        yield
    finally:
        for logger, (level, propagate) in before.items():
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.queue.put(None)
        writer.join(LAST_SECONDS)
