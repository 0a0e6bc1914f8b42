"""Why a request is not answered: a status, a code for programs and a sentence for people.

Every refusal leaves the service as `{"error": {"code": ..., "message": ...}}`. A message states the
rule, what was found and the way out, as all errors of ttapca do; it never repeats a token or what
was in an image.
"""

from __future__ import annotations

import math
from typing import Any

from ttapca.errors import (
    DamagedStreamError,
    DataFormatError,
    InputTypeError,
    NonFiniteError,
    PoolClosedError,
    PoolFullError,
    SavedStreamError,
    ShapeError,
    StorageError,
    StreamNameError,
    TooManyStreamsError,
    TtapcaError,
    UnknownStreamError,
)

SHORT_WAIT = 1.0  # seconds after which a full queue or a long answer is worth another try

# What the library says about a request, as status and code.
STATUS_OF_ERROR: dict[type[TtapcaError], tuple[int, str]] = {
    PoolFullError: (503, "queue_full"),
    PoolClosedError: (503, "closing"),
    TooManyStreamsError: (429, "too_many_streams"),
    UnknownStreamError: (404, "unknown_stream"),
    StreamNameError: (422, "bad_stream_name"),
    SavedStreamError: (422, "bad_state"),
    DamagedStreamError: (409, "damaged_stream"),  # waiting does not mend it
    StorageError: (503, "storage"),
    ShapeError: (422, "bad_images"),
    DataFormatError: (422, "bad_images"),
    InputTypeError: (422, "bad_images"),
    NonFiniteError: (422, "bad_images"),
}


class Refusal(TtapcaError, ValueError):  # noqa: N818 - an answer, not a failure of the service
    """A request that is not answered.

    Args:
        status: The status of HTTP.
        code: A word for programs; it stays the same when the message is improved.
        message: For people.
        retry_after: Seconds after which the same request may be answered.
        challenge: Whether a token would help: adds `WWW-Authenticate`.

    Example:
        >>> Refusal(429, "too_many_requests", "Wait.", retry_after=0.2).headers
        {'Retry-After': '1'}
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        challenge: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers: dict[str, str] = {}
        if retry_after is not None:  # whole seconds, and 0 would be an invitation to hurry
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
        if challenge:
            self.headers["WWW-Authenticate"] = 'Bearer realm="ttapca"'

    @property
    def body(self) -> dict[str, Any]:
        """The answer, as every refusal has it."""
        return {"error": {"code": self.code, "message": self.message}}


def refusal_of(error: TtapcaError) -> Refusal | None:
    """Return the refusal that an error of the library means; None if it is a failure of ours.

    Example:
        >>> refusal_of(ShapeError("Images have 3 axes.")).status
        422
        >>> refusal_of(TtapcaError("Something else.")) is None
        True
    """
    for kind, (status, code) in STATUS_OF_ERROR.items():
        if isinstance(error, kind):
            wait = SHORT_WAIT if status == 503 else None
            return Refusal(status, code, str(error), retry_after=wait)
    return None
