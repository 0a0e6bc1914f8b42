"""The files of a form, as browsers and `curl --form` send them; parsed in memory, within limits."""

from __future__ import annotations

import logging
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ttapca._checks import shown
from ttapca.errors import DataFormatError

FIELD = "images"
# It would write a line to standard error for every damaged form; the refusal says as much.
logging.getLogger(MultipartParser.__module__).addHandler(logging.NullHandler())


class _Files:
    """Collects the parts of a form; the parser calls its methods."""

    def __init__(self, most: int) -> None:
        self.files: list[bytes] = []
        self.ended = False
        self._most = most
        self._header, self._value = bytearray(), bytearray()
        self._name: str | None = None
        self._data: list[bytes] = []

    def on_part_begin(self) -> None:
        if len(self.files) == self._most:
            raise DataFormatError(
                f"A request has at most {self._most:,} images; this form has more. Send several "
                "requests."
            )
        self._name, self._data = None, []

    def on_header_begin(self) -> None:
        self._header.clear()
        self._value.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")

    def on_headers_finished(self) -> None:
        if self._name != FIELD:
            raise DataFormatError(
                f"A form has pictures only, in fields called `{FIELD}`; found "
                f"{shown(self._name or '')}. With curl: --form {FIELD}=@picture.png"
            )

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def on_part_end(self) -> None:
        self.files.append(b"".join(self._data))

    def on_end(self) -> None:
        self.ended = True

    def callbacks(self) -> Any:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}


def files_of_form(body: bytes, content_type: str, most: int) -> list[bytes]:
    r"""Return the files of a form, in their order.

    Args:
        body: The whole form.
        content_type: As the request states it, with the boundary.
        most: How many files there may be.

    Raises:
        DataFormatError: It is no form, has another field than `images`, or too many files.

    Example:
        >>> head = b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\n'
        >>> files_of_form(head + b"PNG\r\n--x--", "multipart/form-data; boundary=x", 5)
        [b'PNG']
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise DataFormatError(
            "A form states its boundary: `Content-Type: multipart/form-data; boundary=...`; this "
            "one does not. Let your client make the header."
        )
    found = _Files(most)
    try:
        parser = MultipartParser(boundary, found.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise DataFormatError(f"The form cannot be read: {str(error)[:200]}.") from error
    if not found.ended:
        raise DataFormatError("The form is cut short: its last boundary is missing. Send it whole.")
    return found.files
