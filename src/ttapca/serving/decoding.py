"""From the body of a request to images: pictures or `.npy` arrays, never pickles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from torch import Tensor

from ttapca._checks import shown
from ttapca.datasets.pictures import PictureSize, open_picture, picture_pixels
from ttapca.datasets.reading import parse_npy, reading
from ttapca.errors import DataFormatError, OptionError, ShapeError
from ttapca.serving.http_errors import HttpError
from ttapca.serving.limits import RequestLimits

FORMATS = ("PNG", "JPEG")
PICTURE_TYPES = ("image/png", "image/jpeg")
FORM, NPY = "multipart/form-data", "application/x-npy"
CONTENT_TYPES = (FORM, *PICTURE_TYPES, NPY)
FLOATS = ("float16", "float32", "float64")
FIELD = "images"  # of a form
# It would write lines to standard error for damaged forms; the answer says as much.
logging.getLogger(FormParser.__module__).addHandler(logging.NullHandler())


@dataclass(frozen=True)
class OpenedImages:
    """The images of a request: how many, how many pixels are still to be decoded, and how."""

    count: int
    pixels: int
    decode: Callable[[], Tensor]


@dataclass(frozen=True)
class ImageDecoder:
    """Turns bodies of requests into images of one network."""

    shape: tuple[int, ...]  # of one image as the network takes it: (channels, height, width)
    limits: RequestLimits = field(default_factory=RequestLimits)
    size: PictureSize | None = None  # how pictures get the network's size; by default cut least

    def __post_init__(self) -> None:
        """Check that pictures get the network's size."""
        sides = None if self.size is None else self.size.size
        sides = (sides, sides) if isinstance(sides, int) else sides
        if self.size is not None and not (self._takes_pictures and sides == self.shape[1:]):
            raise OptionError(
                f"Pictures get the size that the network takes, {self._shapes()}, not {self.size}."
            )

    def images(self, content_type: str, body: bytes) -> Tensor:
        """Return the images of a request, float32 in [0, 1], (images, channels, height, width)."""
        return self.open(content_type, body).decode()

    def open(self, content_type: str, body: bytes) -> OpenedImages:
        """Return the images of a request before they are decoded: their headers are checked."""
        kind = content_type.partition(";")[0].strip().lower()
        if kind == FORM:
            return self._pictures(files_of_form(body, content_type, self.limits.max_images))
        if kind in PICTURE_TYPES:
            return self._pictures([body])
        if kind == NPY:
            advice = "Send what numpy.save writes."
            with reading(Path("The body"), "is not a plain `.npy` array", advice):
                array = parse_npy(body)
            return self.opened(array)
        raise HttpError(
            "unsupported_type",
            f"Images are sent as one of {', '.join(CONTENT_TYPES)}; found {shown(kind)}.",
        )

    def opened(self, array: NDArray[Any]) -> OpenedImages:
        """Return images that came as numbers, which are checked."""
        tensor = self._tensor(array)
        return OpenedImages(len(tensor), 0, lambda: tensor)

    @property
    def _takes_pictures(self) -> bool:
        return len(self.shape) == 3 and self.shape[0] in (1, 3)

    def _pictures(self, files: Sequence[bytes]) -> OpenedImages:
        """Open pictures, which are decoded and brought to the network's size later."""
        if not self._takes_pictures:
            raise ShapeError(
                "Pictures have 1 or 3 channels, height and width; this network takes "
                f"{self._shapes()}. Send arrays as `.npy`."
            )
        self._check_count(len(files))
        channels, height, width = self.shape
        size = self.size or PictureSize(height if height == width else (height, width))
        opened = []
        for number, content in enumerate(files):
            with _reading_picture(number):
                opened.append(open_picture(content, FORMATS))
        # Pictures that are large, or would be while they are resized, are refused undecoded.
        sides = [(each.size, size.resized(*each.size)) for each in opened]
        pixels = sum(max(w * h, rw * rh) for (w, h), (rw, rh) in sides)
        if pixels > self.limits.max_pixels:
            raise HttpError(
                "too_many_pixels",
                f"The pictures of a request have at most {self.limits.max_pixels:,} pixels "
                f"together; these have {pixels:,}. Make them smaller, or send several requests.",
            )

        def decode() -> Tensor:
            images = np.empty((len(opened), height, width, channels), np.uint8)
            for number, picture in enumerate(opened):
                with _reading_picture(number), picture:
                    pixels_of = picture_pixels(picture, size, "L" if channels == 1 else "RGB")
                    images[number] = pixels_of.reshape(height, width, channels)
            return self._tensor(images)

        return OpenedImages(len(opened), pixels, decode)

    def _tensor(self, found: NDArray[Any]) -> Tensor:
        """Return an array as the network takes it, or raise if it cannot be images."""
        kind = found.dtype.newbyteorder("=").name
        if kind not in ("uint8", *FLOATS):
            raise DataFormatError(
                f"Images must be uint8 (0 to 255) or {', '.join(FLOATS)} (0 to 1); found {kind}."
            )
        self._check_count(len(found) if found.ndim else 0)
        if found.shape[1:] not in (self.shape, self._by_pixel):
            raise ShapeError(
                f"Images must have the shape {self._shapes()}; found "
                f"({', '.join(map(str, found.shape))})."
            )
        if kind != "uint8":
            low, high = float(found.min()), float(found.max())
            if not (low >= 0 and high <= 1):  # also if they are NaN
                raise DataFormatError(
                    f"Numbers of images must be finite, from 0 to 1; found {low:g} to {high:g}. "
                    "Divide pixels by 255, or send them as uint8."
                )
        # If both fit, bytes are as pictures are stored, and numbers as networks take them.
        stored = found.shape[1:] == self._by_pixel and len(self.shape) == 3
        moved = stored and (kind == "uint8" or self._by_pixel != self.shape)
        planes = np.moveaxis(found, -1, 1) if moved else found
        tensor = torch.from_numpy(planes.astype(np.float32, order="C"))
        return tensor.div_(255) if kind == "uint8" else tensor

    @property
    def _by_pixel(self) -> tuple[int, ...]:
        """The shape of an image as pictures are stored: height, width, channels."""
        return (*self.shape[1:], self.shape[0]) if len(self.shape) == 3 else self.shape

    def _shapes(self) -> str:
        shapes = dict.fromkeys((self.shape, self._by_pixel))
        return " or ".join(f"(images, {', '.join(map(str, shape))})" for shape in shapes)

    def _check_count(self, found: int) -> None:
        if not 1 <= found <= self.limits.max_images:
            raise DataFormatError(
                f"A request must have 1 to {self.limits.max_images:,} images; found {found:,}. "
                "Send several requests."
            )


def _reading_picture(number: int) -> AbstractContextManager[None]:
    return reading(Path(f"Picture {number + 1}"), "cannot be read", "Send PNG or JPEG files.")


def files_of_form(body: bytes, content_type: str, most: int) -> list[bytes]:
    """Return the files of a form, in their order, `most` at most; other fields are an error."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise DataFormatError(
            "A form states its boundary: `Content-Type: multipart/form-data; boundary=...`; this "
            "one does not. Let your client make the header."
        )
    files: list[bytes] = []
    ends: list[bool] = []

    def add(part: Field | File) -> None:
        if part.field_name != FIELD.encode():
            name = (part.field_name or b"").decode("utf-8", "replace")
            raise DataFormatError(
                f"A form has pictures only, in fields called `{FIELD}`; found {shown(name)}. With "
                f"curl: --form {FIELD}=@picture.png"
            )
        if len(files) == most:
            raise DataFormatError(
                f"A request has at most {most:,} images; this form has more. Send several requests."
            )
        if isinstance(part, File):
            part.file_object.seek(0)
            files.append(part.file_object.read())
        else:
            files.append(part.value or b"")

    # A part stays in memory: the body is bounded, and is there as a whole.
    memory = {"MAX_MEMORY_FILE_SIZE": len(body)}
    try:
        parser = FormParser(
            FORM, add, add, on_end=lambda: ends.append(True), boundary=boundary, config=memory
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise DataFormatError(
            f"The form cannot be read: {str(error)[:200].rstrip('.')}. Send pictures in fields "
            f"called `{FIELD}`; with curl: --form {FIELD}=@picture.png"
        ) from error
    if not ends:
        raise DataFormatError("The form is cut short: its last boundary is missing. Send it whole.")
    return files
