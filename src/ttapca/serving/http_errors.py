"""Errors of HTTP: a status, a code for programs, and a sentence without tokens or images."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ttapca import errors
from ttapca.errors import TtapcaError
from ttapca.serving.fairness import GaveWayError

SHORT_WAIT = 1.0  # seconds after which a full queue or a long answer is worth another try
CODES = {
    400: ("bad_length", "disconnected"),
    401: ("token_missing", "token_unknown"),
    403: ("right_missing", "foreign_host", "foreign_origin"),
    404: ("not_found", "unknown_stream", "unknown_model"),
    405: ("method_not_allowed",),
    408: ("body_too_slow",),
    409: ("damaged_stream",),
    413: ("body_too_large", "too_many_pixels"),
    415: ("unsupported_type",),
    422: ("bad_images", "bad_stream_name", "bad_state", "bad_body", "bad_parameter"),
    429: ("too_many_requests", "too_many_images", "too_many_streams"),
    500: ("failure",),
    503: ("queue_full", "busy", "too_late", "closing", "storage"),
}
STATUSES = {code: status for status, codes in CODES.items() for code in codes}
# Errors of the library that a request can cause.
CODE_OF_ERROR: dict[type[TtapcaError], str] = {
    errors.PoolFullError: "queue_full",
    GaveWayError: "busy",
    errors.PoolClosedError: "closing",
    errors.TooManyStreamsError: "too_many_streams",
    errors.UnknownStreamError: "unknown_stream",
    errors.StreamNameError: "bad_stream_name",
    errors.SavedStreamError: "bad_state",
    errors.OptionError: "bad_body",  # a mode that this filter does not allow
    errors.DamagedStreamError: "damaged_stream",  # waiting does not mend it
    errors.StorageError: "storage",
    errors.ShapeError: "bad_images",
    errors.DataFormatError: "bad_images",
    errors.InputTypeError: "bad_images",
    errors.NonFiniteError: "bad_images",
}


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
