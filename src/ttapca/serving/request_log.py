"""One line for each request, for people or as JSON, without tokens, queries or images."""

from __future__ import annotations

import io
import json
import logging
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

LOGGER = logging.getLogger("ttapca.serving")
SERVER_LOGGER = logging.getLogger("uvicorn.error")


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

    def log(self) -> None:
        """Write a line for a person: `GET /healthz 200 in 1.2 ms  (1f)`; the facts are for JSON."""
        parts = [f"{self.method} {self.route} {self.status} in {1000 * self.seconds:.1f} ms"]
        parts += [part for part in (self.code, self.token, self.stream) if part]
        if self.images is not None:
            parts.append(f"{self.images} image{'s' * (self.images != 1)}")
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        facts["seconds"] = round(self.seconds, 6)
        LOGGER.info("%s  (%s)", ", ".join(parts), self.request, extra={"facts": facts})


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
