"""Errors of HTTP: a status, a code for programs and a sentence for people.

Every error leaves the service as `{"error": {"code": ..., "message": ...}}`. A message states the
rule, what was found and the way out, as all errors of ttapca do; it never repeats a token or the
content of an image.
"""

from __future__ import annotations

import math

from starlette.responses import JSONResponse

from ttapca import errors
from ttapca.errors import TtapcaError

SHORT_WAIT = 1.0  # seconds after which a full queue or a long answer is worth another try

# Status and code of the errors of the library.
STATUS_OF_ERROR: dict[type[TtapcaError], tuple[int, str]] = {
    errors.PoolFullError: (503, "queue_full"),
    errors.PoolClosedError: (503, "closing"),
    errors.TooManyStreamsError: (429, "too_many_streams"),
    errors.UnknownStreamError: (404, "unknown_stream"),
    errors.StreamNameError: (422, "bad_stream_name"),
    errors.SavedStreamError: (422, "bad_state"),
    errors.DamagedStreamError: (409, "damaged_stream"),  # waiting does not mend it
    errors.StorageError: (503, "storage"),
    errors.ShapeError: (422, "bad_images"),
    errors.DataFormatError: (422, "bad_images"),
    errors.InputTypeError: (422, "bad_images"),
    errors.NonFiniteError: (422, "bad_images"),
}


class HttpError(TtapcaError, ValueError):
    """A request that is refused.

    Args:
        status: The status of HTTP.
        code: A word for programs; it stays the same when the message is improved.
        message: For people.
        retry_after: Seconds after which the same request may be answered.
        headers: More headers of the answer.

    Example:
        >>> HttpError(429, "too_many_requests", "Wait.", retry_after=0.2).headers
        {'Retry-After': '1'}
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})
        if retry_after is not None:  # whole seconds, and 0 would be an invitation to hurry
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def response(self) -> JSONResponse:
        """Return the answer."""
        content = {"error": {"code": self.code, "message": str(self)}}
        return JSONResponse(content, self.status, self.headers)


def http_error(error: Exception) -> HttpError | None:
    """Return the error of HTTP for an error of the library; None for a fault of the service.

    Example:
        >>> http_error(errors.ShapeError("Images have 3 axes.")).status
        422
        >>> http_error(TtapcaError("Something else.")) is None
        True
    """
    if isinstance(error, HttpError):
        return error
    for kind, (status, code) in STATUS_OF_ERROR.items():
        if isinstance(error, kind):
            wait = SHORT_WAIT if status == 503 else None
            return HttpError(status, code, str(error), retry_after=wait)
    return None


def closing() -> HttpError:
    """Return the error of a service that is about to end."""
    message = (
        "The service is about to end and takes no new requests. Use another one, or wait until it "
        "is back."
    )
    return HttpError(503, "closing", message, retry_after=SHORT_WAIT)
