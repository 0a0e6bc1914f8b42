"""The Open Inference Protocol (KServe v2), with Triton's binary tensors and sequences.

It is another form of `/v1`: a sequence is a stream, and all else goes the same way through the
service. https://github.com/kserve/open-inference-protocol and, for the two extensions,
https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Never

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from ttapca import __version__
from ttapca._checks import FLAG, Either, ListOf, OneOf, Record, Text, Whole, conform, instance_of
from ttapca.serving import api_models as api
from ttapca.serving.api_models import BINARY, BYTES, JSON, WITH_BODY
from ttapca.serving.http_errors import HttpError
from ttapca.serving.request_queue import Answer
from ttapca.serving.service import LONGEST_LENGTH, Asked, service_of
from ttapca.serving.stream_record import LONGEST_NAME
from ttapca.support.parsing import parse_json

VERSION = "1"  # of the model; a service has one
LENGTH = "Inference-Header-Content-Length"  # bytes of JSON, which tensors follow
DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "UINT8": np.dtype("u1")}
INPUT, OUTPUTS = "images", ("logits", "probabilities")

# A parameter that would have no effect is refused.
TENSOR = Record(
    {"name": OneOf([INPUT]), "shape": ListOf(Whole(1), 1, 8), "datatype": OneOf([*DTYPES])},
    {"data": instance_of(list), "parameters": Record(optional={"binary_data_size": Whole()})},
)
WANTED = Record({"name": OneOf(OUTPUTS)}, {"parameters": Record(optional={"binary_data": FLAG})})
REQUEST = Record(
    {
        "inputs": ListOf(TENSOR, 1, 1),
        "parameters": Record(
            {"sequence_id": Either([Text(LONGEST_NAME), Whole(1, 2**64 - 1)])},
            dict.fromkeys(("sequence_start", "sequence_end", "binary_data_output"), FLAG),
        ),
    },
    {"id": Text(), "outputs": ListOf(WANTED, 1, 8)},
)
bad_body = partial(HttpError, "bad_body")

router = APIRouter(prefix="/v2")
MODEL, VERSIONED = "/models/{model}", "/models/{model}/versions/{version}"
_TENSORS = {JSON: {"schema": {"type": "object"}}, BYTES: BINARY}
refusals = partial(api.refusals, model=api.OpenError)


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """Tell whether the service runs."""
    return {"live": True}


@router.get("/health/ready", responses={503: refusals()[503]})
async def ready(request: Request) -> dict[str, bool]:
    """Tell whether the service takes requests."""
    service_of(request).check_ready()
    return {"ready": True}


@router.get("", responses=refusals())
async def server(request: Request) -> dict[str, Any]:
    """Tell what the service is, and which extensions of the protocol it knows."""
    service_of(request).admit(request)
    extensions = ["binary_tensor_data", "sequence"]
    return {"name": "ttapca", "version": __version__, "extensions": extensions}


@router.get(f"{VERSIONED}/ready", include_in_schema=False)
@router.get(f"{MODEL}/ready", responses=refusals(404))
async def model_ready(request: Request, model: str) -> dict[str, Any]:
    """Tell whether the model takes requests."""
    _check_model(request, model)
    service_of(request).check_ready()
    return {"name": model, "ready": True}


@router.get(VERSIONED, include_in_schema=False)
@router.get(MODEL, responses=refusals(404))
async def metadata(request: Request, model: str) -> dict[str, Any]:
    """Tell which tensors the model takes and gives; -1 stands for any number."""
    service = service_of(request)
    service.admit(request)
    _check_model(request, model)

    def tensor(name: str, *shape: int) -> dict[str, Any]:
        return {"name": name, "datatype": "FP32", "shape": [-1, *shape]}

    return {
        "name": model,
        "versions": [VERSION],
        "platform": "pytorch_ttapca",
        "inputs": [tensor(INPUT, *service.pool.input_shape)],
        "outputs": [tensor(name, -1) for name in OUTPUTS],
    }


@router.post(f"{VERSIONED}/infer", include_in_schema=False)
@router.post(
    f"{MODEL}/infer",
    response_class=Response,
    responses={200: {"content": _TENSORS}, **refusals(404, 409, 415, *WITH_BODY)},
    openapi_extra=api.body(_TENSORS),
)
async def infer(request: Request, model: str) -> Response:
    """Predict the classes of images, and adapt to their stream, which `sequence_id` names.

    `images` are FP32 from 0 to 1, or UINT8. `sequence_start` lets a stream begin anew and
    `sequence_end` forgets it, which take the right to control.
    """
    service = service_of(request)
    token = service.admit(request, "predict")
    _check_model(request, model)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HttpError("unsupported_type", "Bodies are sent as they are, without compression.")
    asked: dict[str, Any] = {}

    def read(content: bytes) -> Asked:
        length = request.headers.get(LENGTH, str(len(content)))
        if not length.isdecimal() or len(length) > LONGEST_LENGTH:
            raise HttpError("bad_length", f"The header {LENGTH} must be a number.")
        size = int(length)
        if size > len(content):
            raise bad_body(f"{LENGTH} says {size:,} bytes; the body has {len(content):,}.")
        found = parse_json(content[:size], "The request", bad_body, largest=size)
        conform(found, REQUEST, "The request", bad_body)
        asked.update(found)
        given = asked["parameters"]
        starts, ends = (given.get(f"sequence_{word}", False) for word in ("start", "end"))
        if starts or ends:
            service.check_rights(token, "control")
        stream = request.state.record.stream = token.full_name(str(given["sequence_id"]))
        service.pool.check_admission(stream, token.check_quota)
        numbers = _numbers(asked["inputs"][0], content[size:])
        return Asked(stream, service.decoder.opened(numbers), starts, ends)

    # Until its stream is known, a request belongs to its connection.
    connection = ":".join(map(str, request.client or ()))
    async with service.body(request, token, connection) as body:
        answer = await service.answer(token, body, read)
    request.state.record.images = len(answer.logits)
    return _response(asked, answer, model)


def _check_model(request: Request, model: str) -> None:
    # Its name as an address can have it.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", service_of(request).facts.model).strip("-.") or "model"
    if (model, request.path_params.get("version", VERSION)) != (name, VERSION):
        raise HttpError("unknown_model", f"This service has version {VERSION} of `{name}` only.")


def _numbers(tensor: Mapping[str, Any], binary: bytes) -> NDArray[Any]:

    def refuse(found: object, error: Exception | None = None) -> Never:
        raise bad_body(
            f"`{INPUT}` has {count:,} numbers by its shape, {tensor['datatype']}: either as `data`,"
            f" or behind the JSON, where `binary_data_size` says how many bytes; found {found}."
        ) from error

    dtype, count = DTYPES[tensor["datatype"]], math.prod(tensor["shape"])
    size, data = tensor.get("parameters", {}).get("binary_data_size"), tensor.get("data")
    if (size is None) == (data is None):
        refuse("both or neither")
    if len(binary) != (size or 0):
        refuse(f"{len(binary):,} bytes behind the JSON")
    if data is None:
        if size != count * dtype.itemsize:
            refuse(f"{size:,} bytes")
        return np.frombuffer(binary, dtype).reshape(tensor["shape"])
    try:
        numbers = np.array(data, np.float64)
    except (TypeError, ValueError) as error:
        refuse("something else in `data`", error)
    if numbers.size != count:
        refuse(f"{numbers.size:,} in `data`")
    if dtype == np.uint8:
        if not ((numbers >= 0) & (numbers <= 255) & (numbers % 1 == 0)).all():
            refuse("others than 0 to 255")
        numbers = numbers.astype(np.uint8)
    return numbers.reshape(tensor["shape"])


def _response(asked: Mapping[str, Any], answer: Answer, model: str) -> Response:
    """Return the tensors that were asked for, as JSON or as bytes behind it."""
    given, glance = asked["parameters"], answer.glance
    facts = {name: getattr(glance, name) for name in ("mode", "shift", "shifted", "alarm_after")}
    facts |= {
        "adapted": answer.adapted,
        "differ": answer.differ,
        "sequence_id": given["sequence_id"],
    }
    tensors = {
        "logits": answer.logits.reshape(len(answer.logits), -1),
        "probabilities": api.probabilities(answer.logits, answer.outputs),
    }
    outputs, binary = [], b""
    for wanted in asked.get("outputs") or [{"name": name} for name in OUTPUTS]:
        tensor = tensors[wanted["name"]]
        output = {"name": wanted["name"], "datatype": "FP32", "shape": list(tensor.shape)}
        as_bytes = given.get("binary_data_output", False)
        if wanted.get("parameters", {}).get("binary_data", as_bytes):
            content = tensor.numpy().astype(DTYPES["FP32"]).tobytes()
            output["parameters"] = {"binary_data_size": len(content)}
            binary += content
        else:
            output["data"] = tensor.flatten().tolist()
        outputs.append(output)
    content = api.json_bytes(
        {
            "model_name": model,
            "model_version": VERSION,
            **({"id": asked["id"]} if "id" in asked else {}),
            "parameters": {name: value for name, value in facts.items() if value is not None},
            "outputs": outputs,
        }
    )
    headers = {LENGTH: str(len(content))} if binary else {}
    return Response(content + binary, media_type=BYTES if binary else JSON, headers=headers)
