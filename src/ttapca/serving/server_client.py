"""A small client of `ttapca serve`, with nothing but the standard library.

It waits as long as `Retry-After` of a busy server says, and tries again for a while if the server
cannot be reached. A request whose answer was lost is sent again; its images then count twice.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np
from numpy.typing import NDArray

from ttapca.errors import FeedError, OptionError

# Answers after which the same request may succeed; a proxy says 502 or 504 for a missing server.
RETRIED = (429, 502, 503, 504)
TIMEOUT = 60.0  # seconds without an answer
LONGEST_MESSAGE = 500  # letters of a refusal that are shown
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0  # seconds between attempts at a server that is not there


def parse_address(url: str) -> SplitResult:
    """Return the parts of a server's address; `http://` may be left out."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        more = parts.query or parts.fragment or parts.username
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not more:
            return parts
    except ValueError:  # a port that is no number, or one bracket without the other
        pass
    raise OptionError(f"A server has an address such as http://127.0.0.1:8000; found `{url}`.")


@dataclass
class ServerClient:
    """Talks to one server, from one thread."""

    url: str
    token: str | None = field(default=None, repr=False)
    patience: float = 10.0  # seconds for which a request is tried again
    stopped: threading.Event = field(default_factory=threading.Event)  # ends waiting
    clock: Callable[[], float] = time.monotonic
    retries: int = field(default=0, init=False)
    _connection: http.client.HTTPConnection | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the address, and look at the token."""
        self._address = parse_address(self.url)
        if self.token and not self.token.isprintable():
            raise OptionError(
                "A token is one line of text; this one has a line break or a character that cannot "
                "be printed. Copy it again."
            )

    def __enter__(self) -> Self:
        """Use it; the connection is opened with the first request."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def info(self) -> dict[str, Any]:
        """Return the answer to `/v1/info`."""
        return self._ask("GET", "/v1/info")

    def predict(self, stream: str, images: NDArray[np.uint8]) -> dict[str, Any]:
        """Send images of a stream, uint8 (n, height, width, channels), and return the answer."""
        body = io.BytesIO()
        np.save(body, images, allow_pickle=False)
        path = f"/v1/predict?stream={quote(stream, safe='')}"
        return self._ask("POST", path, body.getvalue(), "application/x-npy")

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(
        self, method: str, path: str, body: bytes | None = None, kind: str | None = None
    ) -> dict[str, Any]:
        """Send a request until it is answered, refused for good, or patience is over."""
        headers: dict[str, str | bytes] = {"Accept": "application/json"}
        if kind is not None:
            headers["Content-Type"] = kind
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}".encode()  # as the server hashes it
        began, pause = self.clock(), FIRST_WAIT
        while True:
            wait = None
            try:
                status, wait, answer = self._once(method, path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                trouble = _unreachable(self.url, error)
            else:
                if status < 300:
                    return _parsed(answer, self.url)
                trouble = _refusal(status, answer, self.url, bool(self.token))
                if status not in RETRIED:
                    raise FeedError(trouble)
            if wait is None:
                wait, pause = pause, min(2 * pause, LONGEST_WAIT)
            if self.clock() - began + wait > self.patience or self.stopped.wait(wait):
                raise FeedError(trouble)
            self.retries += 1

    def _once(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str | bytes]
    ) -> tuple[int, float | None, bytes]:
        """Return the status, the seconds of `Retry-After`, and the answer."""
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request(method, self._address.path.rstrip("/") + path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        return response.status, _seconds(response.getheader("Retry-After")), answer

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address.hostname or "", self._address.port
        secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(host, port, timeout=TIMEOUT)


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After`; None if there is none, or it is a date."""
    try:
        seconds = float(retry_after or "nan")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _parsed(answer: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FeedError(
            f"A server of ttapca answers in JSON; {url} answers with something else. Name the "
            "address that `ttapca serve` prints."
        )
    return found


def _refusal(status: int, answer: bytes, url: str, token: bool) -> str:
    """Return why the server refused, in a sentence."""
    if status == 401:
        found = "refuses this token" if token else "asks for a token"
        return f"{url} {found}. Give one with --token, or in the variable TTAPCA_TOKEN."
    try:
        message = str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = http.client.responses.get(status, "an error without a name")
    return f"{url} refuses with {status}: {message[:LONGEST_MESSAGE]}"


def _unreachable(url: str, error: Exception) -> str:
    """Return why there was no answer, in a sentence."""
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = f"no answer within {TIMEOUT:.0f} s"
    elif isinstance(error, OSError) and error.strerror:
        reason = error.strerror.lower()
    return (
        f"{url} cannot be reached: {reason}. Start a server there with `ttapca serve`, or name "
        "another address."
    )
