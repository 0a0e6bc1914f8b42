"""Errors of HTTP: a status, a code for programs, and a sentence without tokens or images."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ttapca import errors
from ttapca.errors import TtapcaError
from ttapca.serving.fairness import GaveWayError

SHORT_WAIT = 1.0  # seconds after which a full queue or a long answer is worth another try
_TABLES = tomllib.loads(Path(__file__).with_name("http_codes.toml").read_text("utf-8"))
CODES: dict[int, list[str]] = {int(status): codes for status, codes in _TABLES["codes"].items()}
STATUSES = {code: status for status, codes in CODES.items() for code in codes}
CODE_OF_ERROR: dict[type[TtapcaError], str] = {GaveWayError: "busy"}
CODE_OF_ERROR |= {getattr(errors, name): code for name, code in _TABLES["errors"].items()}


class HttpError(TtapcaError, ValueError):
    """A request that is refused, by a code that stays the same if the message is improved."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.status, self.headers = code, STATUSES[code], dict(headers or {})
        if self.status == 401:
            self.headers["WWW-Authenticate"] = 'Bearer realm="ttapca"'
        if self.status == 503:
            retry_after = SHORT_WAIT
        if retry_after is not None:  # whole seconds, and 0 would be an invitation to hurry
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))


def http_error(error: Exception) -> HttpError | None:
    """Return the error of HTTP for an error of the library; None for a fault of the service."""
    if isinstance(error, HttpError):
        return error
    for kind, code in CODE_OF_ERROR.items():
        if isinstance(error, kind):
            return HttpError(code, str(error))
    return None


def closing() -> HttpError:
    """Return the error of a service that is about to end."""
    return HttpError(
        "closing", "The service is about to end and takes no new requests. Wait until it is back."
    )
