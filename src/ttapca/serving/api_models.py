"""The JSON of the API: how answers are made, and how `/openapi.json` describes them.

FastAPI derives the description of a stream from `StreamStatus` and `StreamGlance`. Answers are not
built from the models, which would cost time at every request; tests compare them.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from ttapca.serving.answers import Answer, Mode, StreamGlance, StreamStatus
from ttapca.serving.batched_network import Pixels
from ttapca.serving.decoding import FORM, JSON, NPY, PICTURE_TYPES
from ttapca.serving.http_errors import CODES
from ttapca.serving.tokens import Token
from ttapca.support.outputs import OutputKind, Outputs
from ttapca.support.parsing import finite

BYTES, PNG = "application/octet-stream", "image/png"
BINARY = {"schema": {"type": "string", "format": "binary"}}

# Making answers ----------------------------------------------------------------------------------


def json_bytes(content: object) -> bytes:
    """Return JSON; numbers that are not finite, which JSON does not have, become null.

    Example:
        >>> json_bytes({"ratio": float("inf"), "images": 3})
        b'{"ratio":null,"images":3}'
    """
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return text.encode()


def status_facts(status: StreamStatus, token: Token) -> dict[str, Any]:
    """Return a `StreamStatus`, with the name that the holder of a token knows the stream by."""
    facts = status.to_dict()
    facts["health"]["stream"] = token.own_name(status.health.stream)
    return facts


def glance_facts(glance: StreamGlance, token: Token) -> dict[str, Any]:
    """Return a `StreamGlance`, with the name that the holder of a token knows the stream by."""
    return {**vars(glance), "stream": token.own_name(glance.stream)}


def answer_facts(
    answer: Answer, token: Token, classes: Sequence[str], *, full: bool = False
) -> dict[str, Any]:
    """Return a `PredictAnswer`.

    In full it takes a millisecond: as long as a small network needs for an image in a large batch.
    """
    health = status_facts(answer.status, token) if full else glance_facts(answer.glance, token)
    return {
        "stream": token.own_name(answer.stream),
        "mode": answer.mode,
        "adapted": answer.adapted,
        "predictions": predicted(answer.logits, classes, answer.outputs),
        "differ": answer.differ,
        "health": health,
    }


def predicted(
    logits: Tensor, classes: Sequence[str], outputs: OutputKind = "multiclass"
) -> list[dict[str, Any]]:
    """Return a `Prediction` for each row of logits.

    Example:
        >>> import torch
        >>> predicted(torch.tensor([[0.0, 100.0]]), ("cat", "dog"))
        [{'class': 1, 'name': 'dog', 'probability': 1.0}]
        >>> predicted(torch.tensor([-100.0]), ("calm", "alarm"), "binary")
        [{'class': 0, 'name': 'calm', 'probability': 1.0}]
    """
    probabilities = Outputs(outputs, reads="probabilities")(logits).softmax(dim=1)
    if outputs == "multilabel":
        return [_labelled(row, classes) for row in probabilities[:, 1].tolist()]
    best, found = probabilities.max(dim=1)
    pairs = zip(found.tolist(), best.tolist(), strict=True)
    return [_named(number, probability, classes) for number, probability in pairs]


def _named(number: int, probability: float, classes: Sequence[str]) -> dict[str, Any]:
    name = classes[number] if number < len(classes) else None
    return {"class": number, "name": name, "probability": probability}


def _labelled(probabilities: list[float], classes: Sequence[str]) -> dict[str, Any]:
    """Return the most probable label of an image, and all that are more probable than not."""
    labels = [_named(number, each, classes) for number, each in enumerate(probabilities)]
    likely = [each for each in labels if each["probability"] > 0.5]
    return {**max(labels, key=lambda each: each["probability"]), "labels": likely}


def png_bytes(pixels: Pixels) -> bytes:
    """Return pixels, uint8 (height, width, 3), as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture_urls(pictures: tuple[Pixels, Pixels] | None) -> dict[str, str | None]:
    """Return `Pictures`: an image before and after the filter."""
    if pictures is None:
        return {"before": None, "after": None}
    before, after = (
        f"data:{PNG};base64,{b64encode(png_bytes(each)).decode()}" for each in pictures
    )
    return {"before": before, "after": after}


# Describing answers ------------------------------------------------------------------------------


class LikelyClass(BaseModel):
    """A class, or a label, and how probable it is; the name is null if classes have no names."""

    class_: int = Field(alias="class", examples=[3])
    name: str | None = Field(examples=["cat"])
    probability: float | None = Field(examples=[0.91], ge=0, le=1)


class Prediction(LikelyClass):
    """The most probable class or label of one image.

    `labels` are all labels that are more probable than not, of a network whose labels do not
    exclude each other. Other networks leave it out.
    """

    labels: list[LikelyClass] | None = None


class PredictAnswer(BaseModel):
    """Predictions for the images of a request, in their order.

    `adapted` says whether a filter changed the images that are answered for; `differ` is, in
    shadow, how many images have another class when adapted. `health` is in full with `full=true`.
    """

    stream: str = Field(examples=["camera-7"])
    mode: Mode
    adapted: bool
    predictions: list[Prediction]
    differ: int | None
    health: StreamGlance | StreamStatus


class StreamList(BaseModel):
    """A page of streams, by name; damaged ones are on disk and cannot be read."""

    streams: list[StreamStatus] | list[StreamGlance]
    damaged: list[str]
    total: int = Field(examples=[1])


class Pictures(BaseModel):
    """The last image of a stream as `data:` URLs; null if none is kept."""

    before: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])
    after: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])


class Info(BaseModel):
    """The network that is served; bands have their first and last component, counting from 1."""

    model: str = Field(examples=["cifar10-resnet20"])
    filter: str = Field(examples=["conv1, 2000 components"])
    classes: list[str]
    input_shape: list[int] = Field(examples=[[3, 32, 32]])
    version: str
    bands: list[dict[str, int]] = Field(examples=[[{"first": 8, "last": 15}]])


class ModeChange(BaseModel):
    """The mode that a stream is switched to."""

    mode: Mode = Field(examples=["shadow"])


class ErrorFacts(BaseModel):
    """Why a request was refused: a word for programs, a sentence for people."""

    code: str = Field(examples=["unknown_stream"])
    message: str = Field(examples=["There is no stream `camera-7`. Send images to begin it."])


class ErrorAnswer(BaseModel):
    """The form of every refusal."""

    error: ErrorFacts


# Describing requests and refusals ----------------------------------------------------------------


def _body(content: dict[str, Any]) -> dict[str, Any]:
    """Describe a body that a route reads itself, with `Service.body`."""
    return {"requestBody": {"required": True, "content": content}}


_LISTS = {"type": "array", "minItems": 1, "items": {"type": "array", "items": {}}}
_FILES = {"type": "array", "items": BINARY["schema"]}
IMAGES_BODY = _body(
    {
        FORM: {
            "schema": {"type": "object", "required": ["images"], "properties": {"images": _FILES}}
        },
        **dict.fromkeys((*PICTURE_TYPES, NPY), BINARY),
        JSON: {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {"images": _LISTS, "scale": {"const": 255}},
                "additionalProperties": False,
            },
            "examples": {
                "shares": {"value": {"images": [[[[0.0, 0.5], [1.0, 0.25]]]]}},
                "bytes": {"value": {"images": [[[[0, 128], [255, 64]]]], "scale": 255}},
            },
        },
    }
)
MODE_BODY = _body({JSON: {"schema": ModeChange.model_json_schema()}})
STATE_BODY = _body({BYTES: BINARY})

ALWAYS = (401, 403, 422, 429, 503)
WITH_BODY = (400, 408, 413)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe these refusals of a route, and those of every route."""
    return {
        status: {"model": ErrorAnswer, "description": f"With a code: {', '.join(CODES[status])}."}
        for status in sorted({*ALWAYS, *statuses})
    }


def file_answer(kind: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe a route that answers with a file."""
    return {200: {"content": {kind: BINARY}}, **refusals(*statuses)}
