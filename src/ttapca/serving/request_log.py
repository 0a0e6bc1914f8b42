"""One line for each request: for people, or as JSON for programs.

A line holds the route, not the address that was asked for, and the names of token and stream; it
never holds a token, a query or anything of an image.
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
from typing import Any, TextIO, TypeAlias

LOGGER = logging.getLogger("ttapca.serving")
SERVER_LOGGER = logging.getLogger("uvicorn.error")
MOST_WAITING = 10_000  # lines, where whoever reads them has stopped reading
LAST_SECONDS = 2.0  # that the last lines may take at the end


@dataclass
class RequestRecord:
    """What is said about one request; the routes fill in what they find out.

    Attributes:
        request: Its id, from the client or drawn here.
        method: The method of HTTP.
        route: The pattern that its address fits, such as `/v1/streams/{name}`.
        status: Of the answer.
        seconds: From its head to the end of its answer.
        token: The name of the token that was shown.
        stream: The full name of its stream.
        images: How many images it had.
        bytes: Size of its body.
        code: Why it was refused.
    """

    request: str
    method: str
    route: str = "other"
    status: int = 0
    seconds: float = 0.0
    token: str | None = None
    stream: str | None = None
    images: int | None = None
    bytes: int | None = None
    code: str | None = None

    def line(self) -> str:
        """Return it for a person.

        Example:
            >>> RequestRecord("1f", "GET", "/healthz", 200, 0.0012).line()
            'GET /healthz 200 in 1.2 ms  (1f)'
        """
        parts = [f"{self.method} {self.route} {self.status} in {1000 * self.seconds:.1f} ms"]
        parts += [str(part) for part in (self.code, self.token, self.stream) if part]
        if self.images is not None:
            parts.append(f"{self.images} image{'s' * (self.images != 1)}")
        return f"{', '.join(parts)}  ({self.request})"


def log_request(record: RequestRecord) -> None:
    """Write the line of a request."""
    LOGGER.info("%s", record.line(), extra={"request_record": record})


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
            said = {name: value for name, value in asdict(request).items() if value is not None}
            content |= said | {"seconds": round(request.seconds, 6)}
        else:
            content["message"] = record.getMessage()
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


class PlainLines(logging.Formatter):
    """Each record as a line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")


# None is the end of them.
Lines: TypeAlias = "queue.SimpleQueue[logging.LogRecord | None]"


class _Waiting(QueueHandler):
    """Hands records to another thread, so that a terminal that has stopped stops no request."""

    def __init__(self) -> None:
        self.lines: Lines = queue.SimpleQueue()
        super().__init__(self.lines)

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.lines.qsize() < MOST_WAITING:  # else nobody reads: lines are lost, no requests
            self.lines.put(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process; the other thread formats it


def _write_lines(lines: Lines, stream: TextIO, formatter: logging.Formatter) -> None:
    """Write lines to a stream until they end; runs in a thread of its own."""
    while (record := lines.get()) is not None:
        with suppress(Exception):  # a line that cannot be written stops no other
            _write(stream, f"{formatter.format(record)}\n")


def _write(stream: TextIO, text: str) -> None:
    """Write to the file of a stream, not to its buffer.

    Where nobody reads, this waits for ever. It must not hold a lock of the stream or of a handler
    of `logging` meanwhile: Python takes those when it ends, and would wait as well.
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
    """Write the lines of this service, and what uvicorn has to say, while the block runs.

    The end waits a moment for the last lines: where nobody reads them, they are lost.
    """
    waiting, formatter = _Waiting(), JsonLines() if as_json else PlainLines()
    # A daemon: the process can end while it waits for a reader.
    writer = threading.Thread(
        target=_write_lines,
        args=(waiting.lines, stream, formatter),
        name="ttapca log",
        daemon=True,
    )
    before = {}
    for logger, level in ((LOGGER, logging.INFO), (SERVER_LOGGER, logging.WARNING)):
        before[logger] = (logger.level, logger.propagate)
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(waiting)
    writer.start()
    try:
        yield
    finally:
        for logger, (level, propagate) in before.items():
            logger.removeHandler(waiting)
            logger.setLevel(level)
            logger.propagate = propagate
        waiting.lines.put(None)
        writer.join(LAST_SECONDS)
