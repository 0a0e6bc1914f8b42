"""What `/openapi.json` says about bodies and refusals; `api_models` has the answers."""

from __future__ import annotations

from typing import Any, get_args

from ttapca.serving.answers import Mode
from ttapca.serving.api_models import ErrorAnswer, ModeChange
from ttapca.serving.decoding import FORM, JSON, NPY, PICTURE_TYPES

BYTES = "application/octet-stream"
PNG = "image/png"
BINARY = {"schema": {"type": "string", "format": "binary"}}

_NUMBERS = {"type": "array", "minItems": 1, "items": {"type": "array", "items": {}}}

IMAGES_BODY = {
    "requestBody": {
        "required": True,
        "description": "One or many images: PNG or JPEG files as a form (`curl --form "
        "images=@a.png`) or a single one as it is; an array of numpy, uint8 by (images, height, "
        "width, channels) or floating point from 0 to 1 by (images, channels, height, width); or "
        "the same as lists in JSON, with `scale` 255 for whole numbers from 0 to 255. Pictures of "
        "another size are resized, with their proportions kept, and cut to their centre.",
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": {"type": "array", "items": BINARY["schema"]}},
                }
            },
            **dict.fromkeys(PICTURE_TYPES, BINARY),
            NPY: BINARY,
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": _NUMBERS, "scale": {"const": 255}},
                    "additionalProperties": False,
                },
                "examples": {
                    "shares": {"value": {"images": [[[[0.0, 0.5], [1.0, 0.25]]]]}},
                    "bytes": {"value": {"images": [[[[0, 128], [255, 64]]]], "scale": 255}},
                },
            },
        },
    }
}
MODE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": ModeChange.model_json_schema(),
                "examples": {mode: {"value": {"mode": mode}} for mode in get_args(Mode)},
            }
        },
    }
}
STATE_BODY = {"requestBody": {"required": True, "content": {BYTES: BINARY}}}

REFUSALS = {
    400: "The request is cut short.",
    401: "A token is missing or unknown.",
    403: "The token lacks a right.",
    404: "There is no such stream.",
    408: "The body comes too slowly.",
    409: "What is kept of the stream is damaged, or the service keeps no streams.",
    413: "The body, or its pictures, are too large.",
    415: "The body has another type.",
    422: "Something in the request cannot be.",
    429: "Too many requests or streams; see Retry-After.",
    503: "Busy, late or closing; see Retry-After.",
}
ALWAYS = (401, 403, 422, 429, 503)
WITH_BODY = (400, 408, 413)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route may refuse with: these, and what every route may.

    Example:
        >>> sorted(refusals(404))
        [401, 403, 404, 422, 429, 503]
    """
    wanted = sorted({*ALWAYS, *statuses})
    return {status: {"model": ErrorAnswer, "description": REFUSALS[status]} for status in wanted}


def file_answer(kind: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route that answers with a file may answer."""
    return {200: {"content": {kind: BINARY}}, **refusals(*statuses)}
