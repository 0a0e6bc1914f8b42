"""The JSON of the API: how answers are made, and how `/openapi.json` describes them.

Answers are not built from the models, which would cost time at every request; tests compare them.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ttapca.serving.answers import Answer, Mode, StreamGlance, StreamStatus
from ttapca.serving.batched_network import Pixels
from ttapca.serving.decoding import FORM, JSON, NPY, PICTURE_TYPES
from ttapca.serving.tokens import Token
from ttapca.support.outputs import OutputKind, Outputs
from ttapca.support.parsing import finite

BYTES, PNG = "application/octet-stream", "image/png"
BINARY = {"schema": {"type": "string", "format": "binary"}}
Share = Annotated[float, Field(ge=0, le=1)]

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
    """Return `StreamFacts`, with the name that the holder of a token knows the stream by."""
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
    """Return `Pictures`: an image before and after the filter.

    Example:
        >>> picture_urls(None)
        {'before': None, 'after': None}
    """
    if pictures is None:
        return {"before": None, "after": None}
    before, after = (
        f"data:{PNG};base64,{b64encode(png_bytes(each)).decode()}" for each in pictures
    )
    return {"before": before, "after": after}


# Describing answers ------------------------------------------------------------------------------


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorFacts(_Answer):
    """Why a request was refused."""

    code: str = Field(description="A word for programs.", examples=["unknown_stream"])
    message: str = Field(
        description="For people: the rule, what was found, the way out.",
        examples=["There is no stream `camera-7`. Send images to begin it."],
    )


class ErrorAnswer(_Answer):
    """What every refusal looks like."""

    error: ErrorFacts


class BandFacts(_Answer):
    """One band of components of the filter in one stream."""

    layer: str = Field(examples=["conv1"])
    first: int = Field(examples=[8], description="Its first component, counting from 1.")
    last: int = Field(examples=[15])
    ratio: float | None = Field(
        examples=[2.6], description="Variance in the stream over that in the source."
    )
    p_value: Share | None = Field(examples=[0.01])


class HealthFacts(_Answer):
    """What is seen of the images of a stream; null if it cannot be known."""

    stream: str = Field(examples=["camera-7"])
    images: int = Field(examples=[1200])
    skipped: int = Field(examples=[0], description="Requests whose numbers were not finite.")
    shifted: bool | None = Field(examples=[True], description="Whether the alarm is on.")
    p_value: Share | None = Field(examples=[0.002])
    shift: Share | None = Field(examples=[0.97], description="How surely images have shifted.")
    size: float | None = Field(examples=[1.5], description="Size of the shift, in doublings.")
    bands: list[BandFacts]
    composition: list[float] | None = Field(description="Share of each class of late.")
    ordered: Share | None = Field(description="How surely classes stay for a while.")
    run_length: float | None = Field(description="For how many images a class stays, if so.")
    skew: Share | None = Field(description="How surely classes are not those of the source.")
    conditions: int = Field(examples=[1])
    outliers: float | None = Field(examples=[0.004])
    batch_weight: float | None = Field(examples=[0.2])
    implausible: int = Field(
        ge=0, description="Images that no shift explains, answered by the network as it is."
    )


class StreamFacts(_Answer):
    """How a stream is and what was done with it."""

    health: HealthFacts
    mode: Mode = Field(examples=["on"])
    gains: list[float | None] = Field(
        examples=[[1.0, 0.98, 0.41]], description="What each band is scaled by."
    )
    requests: int = Field(examples=[400])
    adapted_share: Share = Field(examples=[0.6])
    disagreement: Share | None = Field(description="Share of images that differ in shadow.")
    shifted_since: float | None = Field(
        examples=[1763300000.0], description="When the alarm went on, in seconds since 1970."
    )
    last_seen: float | None = Field(examples=[1763300100.0])


class LikelyClass(_Answer):
    """A class, or a label, and how probable it is."""

    class_: int = Field(alias="class", examples=[3])
    name: str | None = Field(examples=["cat"], description="Null if classes have no names.")
    probability: Share | None = Field(examples=[0.91])


class Prediction(LikelyClass):
    """The most probable class or label of one image."""

    labels: list[LikelyClass] = Field(
        default=[],
        description="Of a network whose labels do not exclude each other: all that are more "
        "probable than not. Other networks leave it out.",
    )


class PredictAnswer(_Answer):
    """Predictions for the images of a request, in their order."""

    stream: str = Field(examples=["camera-7"])
    mode: Mode = Field(examples=["on"])
    adapted: bool = Field(examples=[True], description="Whether a filter changed what is answered.")
    predictions: list[Prediction]
    differ: int | None = Field(
        description="In shadow: how many images have another class when adapted."
    )
    health: StreamGlance | StreamFacts = Field(description="All about it with `full=true`.")


class StreamList(_Answer):
    """A page of streams, by name."""

    streams: list[StreamFacts] | list[StreamGlance]
    damaged: list[str] = Field(description="Streams of this page that cannot be read from disk.")
    total: int = Field(examples=[1])


class Pictures(_Answer):
    """The last image of a stream as `data:` URLs; null if none is kept."""

    before: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])
    after: str | None = Field(examples=["data:image/png;base64,iVBORw0KGgo="])


class Info(_Answer):
    """What is served."""

    model: str = Field(examples=["cifar10-resnet20"])
    filter: str = Field(examples=["conv1, 2000 components"])
    classes: list[str] = Field(description="Empty if they have no names.")
    input_shape: list[int] = Field(examples=[[3, 32, 32]])
    version: str = Field(examples=["0.2.0"])
    bands: list[dict[str, int]] = Field(
        examples=[[{"first": 8, "last": 15}]], description="Components of each, counting from 1."
    )


# Describing requests and refusals ----------------------------------------------------------------


def _body(content: dict[str, Any], description: str = "") -> dict[str, Any]:
    """Describe a body that a route reads itself, with `Service.body`."""
    return {"requestBody": {"required": True, "description": description, "content": content}}


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)[:1]
    return {"type": "object", "required": required, "properties": properties}


_LISTS = {"type": "array", "minItems": 1, "items": {"type": "array", "items": {}}}
IMAGES_BODY = _body(
    {
        FORM: {"schema": _object(images={"type": "array", "items": BINARY["schema"]})},
        **dict.fromkeys((*PICTURE_TYPES, NPY), BINARY),
        JSON: {
            "schema": {
                **_object(images=_LISTS, scale={"const": 255}),
                "additionalProperties": False,
            },
            "examples": {
                "shares": {"value": {"images": [[[[0.0, 0.5], [1.0, 0.25]]]]}},
                "bytes": {"value": {"images": [[[[0, 128], [255, 64]]]], "scale": 255}},
            },
        },
    },
    "One or many images: PNG or JPEG files as a form (`curl --form images=@a.png`) or a single one "
    "as it is; an array of numpy, uint8 by (images, height, width, channels) or floating point "
    "from 0 to 1 by (images, channels, height, width); or the same as lists in JSON, with `scale` "
    "255 for whole numbers from 0 to 255. Pictures of another size are resized, with their "
    "proportions kept, and cut to their centre.",
)
STATE_BODY = _body({BYTES: BINARY})


class ModeChange(_Answer):
    """The mode that a stream is switched to."""

    mode: Mode = Field(examples=["shadow"])


MODE_BODY = _body({JSON: {"schema": ModeChange.model_json_schema()}})

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
    """Describe these refusals of a route, and those of every route.

    Example:
        >>> sorted(refusals(404))
        [401, 403, 404, 422, 429, 503]
    """
    return {
        status: {"model": ErrorAnswer, "description": REFUSALS[status]}
        for status in sorted({*ALWAYS, *statuses})
    }


def file_answer(kind: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe a route that answers with a file."""
    return {200: {"content": {kind: BINARY}}, **refusals(*statuses)}
