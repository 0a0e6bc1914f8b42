"""The JSON of the API, as answers have it (without models: these take time) and as OpenAPI."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, get_args

from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from ttapca.serving.batched_network import Pixels
from ttapca.serving.decoding import FORM, NPY, PICTURE_TYPES
from ttapca.serving.http_errors import CODES
from ttapca.serving.request_queue import Answer
from ttapca.serving.stream_record import Mode, StreamGlance, StreamStatus
from ttapca.serving.tokens import Token
from ttapca.support.outputs import OutputKind, Outputs
from ttapca.support.parsing import finite

BYTES, JSON = "application/octet-stream", "application/json"
BINARY = {"schema": {"type": "string", "format": "binary"}}


def json_bytes(content: object) -> bytes:
    """Return JSON; numbers that are not finite, which JSON does not have, become null."""
    return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode()


def status_facts(status: StreamStatus, token: Token) -> dict[str, Any]:
    """Return a `StreamStatus`, with the name that the holder of a token knows the stream by."""
    facts = status.to_dict()
    facts["health"]["stream"] = token.own_name(status.health.stream)
    return facts


def glance_facts(glance: StreamGlance, token: Token) -> dict[str, Any]:
    """Return a `StreamGlance`, with the name that the holder of a token knows the stream by."""
    return {**vars(glance), "stream": token.own_name(glance.stream)}


def answer_facts(answer: Answer, token: Token, classes: Sequence[str]) -> dict[str, Any]:
    """Return a `PredictAnswer`."""
    return {
        "stream": token.own_name(answer.stream),
        "mode": answer.mode,
        "adapted": answer.adapted,
        "predictions": predicted(answer.logits, classes, answer.outputs),
        "differ": answer.differ,
        "health": glance_facts(answer.glance, token),
    }


def predicted(
    logits: Tensor, classes: Sequence[str], outputs: OutputKind = "multiclass"
) -> list[dict[str, Any]]:
    """Return a `Prediction` for each row of logits."""
    found = probabilities(logits, outputs)

    def likely(number: int, probability: float) -> dict[str, Any]:
        name = classes[number] if number < len(classes) else None
        return {"class": number, "name": name, "probability": probability}

    if outputs == "multilabel":
        rows = [[likely(*each) for each in enumerate(row)] for row in found.tolist()]
        return [
            max(row, key=_probability)
            | {"labels": [each for each in row if _probability(each) > 0.5]}
            for row in rows
        ]
    best, numbers = found.max(dim=1)
    return list(map(likely, numbers.tolist(), best.tolist()))


def probabilities(logits: Tensor, outputs: OutputKind) -> Tensor:
    """Return the probability of each class, or label, (images, classes)."""
    found: Tensor = Outputs(outputs, reads="probabilities")(logits).softmax(dim=1)
    return found[:, 1] if outputs == "multilabel" else found


_probability = itemgetter("probability")


def picture_url(pixels: Pixels) -> str:
    """Return pixels, uint8 (height, width, 3), as a `data:` URL of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


class LikelyClass(BaseModel):
    """A class, or a label, and how probable it is; the name is null if classes have no names."""

    class_: int = Field(alias="class", examples=[3])
    name: str | None = Field(examples=["cat"])
    probability: float | None = Field(examples=[0.91], ge=0, le=1)


class Prediction(LikelyClass):
    """The most probable class of one image; `labels` if classes do not exclude each other."""

    labels: list[LikelyClass] | None = None


class PredictAnswer(BaseModel):
    """Predictions for the images of a request, in their order; see `ttapca.serving.Answer`."""

    stream: str = Field(examples=["camera-7"])
    mode: Mode
    adapted: bool
    predictions: list[Prediction]
    differ: int | None
    health: StreamGlance


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


class ErrorFacts(BaseModel):
    """Why a request was refused: a word for programs, a sentence for people."""

    code: str = Field(examples=["unknown_stream"])
    message: str = Field(examples=["There is no stream `camera-7`. Send images to begin it."])


class ErrorAnswer(BaseModel):
    """The form of every refusal."""

    error: ErrorFacts


class OpenError(BaseModel):
    """The form of refusals in the Open Inference Protocol, with our code."""

    error: str
    code: str


def body(content: Mapping[str, object]) -> dict[str, Any]:
    """Describe what a request has by type."""
    return {"requestBody": {"required": True, "content": content}}


_FILES = {"type": "array", "items": BINARY["schema"]}
_FORM = {"type": "object", "required": ["images"], "properties": {"images": _FILES}}
IMAGES_BODY = body({FORM: {"schema": _FORM}, **dict.fromkeys((*PICTURE_TYPES, NPY), BINARY)})
_MODES = {"mode": {"enum": list(get_args(Mode))}}
MODE_BODY = body({JSON: {"schema": {"type": "object", "required": ["mode"], "properties": _MODES}}})
STATE_BODY = body({BYTES: BINARY})

ALWAYS = (401, 403, 422, 429, 503)
WITH_BODY = (400, 408, 413)


def refusals(
    *statuses: int, model: type[BaseModel] = ErrorAnswer
) -> dict[int | str, dict[str, Any]]:
    """Describe these refusals of a route, and those of every route."""
    return {
        status: {"model": model, "description": f"With a code: {', '.join(CODES[status])}."}
        for status in sorted({*ALWAYS, *statuses})
    }
