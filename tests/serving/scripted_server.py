"""A server that answers what a test tells it to, and remembers what it was asked."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reply = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def images(self) -> NDArray[np.uint8]:
        return np.load(io.BytesIO(self.body))


@dataclass
class Scripted:
    url: str
    asked: list[Asked] = field(default_factory=list)


def reply(content: Any, status: int = 200, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps(content).encode()


def refusal(status: int, message: str = "No.", **headers: str) -> Reply:
    return reply({"error": {"code": "no", "message": message}}, status, **headers)


def prediction(classes: list[int], **status: Any) -> Reply:
    """An answer to images, with these classes."""
    predictions = [{"class": each, "name": str(each), "probability": 0.9} for each in classes]
    health = {"shift": 0.25, "shifted": False, "mode": "on", "shifted_since": None}
    health |= status
    answer = {"predictions": predictions, "adapted": True, "mode": health["mode"]}
    return reply({**answer, "health": health})


INFO = reply(
    {"model": "scripted", "classes": [str(n) for n in range(10)], "input_shape": [1, 8, 8]}
)


@contextmanager
def scripted(answer: Callable[[Asked], Reply]) -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(self.command, self.path, dict(self.headers), body)
            found.asked.append(asked)
            status, headers, content = answer(asked)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found = Scripted(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        server.shutdown()
