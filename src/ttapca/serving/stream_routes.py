"""The routes of streams: predict, look, switch, reset, read, load, delete."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ttapca._checks import OneOf, Record, conform
from ttapca.errors import DamagedStreamError, UnknownStreamError
from ttapca.serving import api_models as api
from ttapca.serving.api_models import BINARY, BYTES, JSON, WITH_BODY, refusals
from ttapca.serving.http_errors import HttpError
from ttapca.serving.service import Asked, Service, service_of
from ttapca.serving.stream_record import LONGEST_NAME, NAME_PATTERN, Mode, StreamStatus
from ttapca.serving.tokens import Right, Token
from ttapca.support.parsing import parse_json

CHANGE = Record({"mode": OneOf(get_args(Mode))})
MOST_LISTED = 500

# For clients to read; names are checked with the token, whose name is a part of them.
_NAME: dict[str, Any] = {"pattern": f"^{NAME_PATTERN}$", "minLength": 1, "maxLength": LONGEST_NAME}
_STREAM: dict[str, Any] = {"description": "The stream.", "examples": ["camera-7"]}
StreamName = Annotated[str, Query(**_STREAM, json_schema_extra=_NAME)]
Name = Annotated[str, Path(**_STREAM, json_schema_extra=_NAME)]
Offset = Annotated[int, Query(ge=0, le=10**9, description="How many streams to leave out.")]
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED, description="How many to list at most.")]
Brief = Annotated[bool, Query(description="Whether to tell only what costs nothing.")]
Shifted = Annotated[
    bool | None, Query(description="Only streams whose alarm is on, or only those whose is off.")
]

router = APIRouter(prefix="/v1")
STREAM = "/streams/{name}"


def told(*statuses: int) -> dict[str, Any]:
    """Describe a route that answers with how a stream is, or refuses."""
    return {"response_model": StreamStatus, "responses": refusals(*statuses)}


@router.post(
    "/predict",
    response_model=api.PredictAnswer,
    responses=refusals(409, 415, *WITH_BODY),
    openapi_extra=api.IMAGES_BODY,
)
async def predict(request: Request, stream: StreamName) -> Response:
    """Predict the classes of images, adapt to their stream, and tell how it is.

    Images are PNG or JPEG files as a form (`curl --form images=@a.png`) or a single one as it is;
    or an array of numpy, uint8 by (images, height, width, channels) or floating point from 0 to 1
    by (images, channels, height, width). Pictures of another size are resized, with their
    proportions kept, and cut to their centre.
    """
    service, token, name = _named(request, stream, "predict")
    kind = request.headers.get("content-type", "")
    async with service.body(request, token, name) as body:
        service.pool.check_admission(name, token.check_quota)
        answer = await service.answer(
            token, body, lambda content: Asked(name, service.decoder.open(kind, content))
        )
    request.state.record.images = len(answer.logits)
    facts = api.answer_facts(answer, token, service.facts.classes)
    return _json(api.json_bytes(facts))  # takes less time than another thread would


@router.get("/streams", response_model=api.StreamList, responses=refusals())
async def list_streams(
    request: Request,
    offset: Offset = 0,
    limit: Limit = 100,
    brief: Brief = False,
    shifted: Shifted = None,
) -> Response:
    """List the streams that the token can name, sorted by name, a page at a time."""
    service = service_of(request)
    pool, token = service.pool, service.admit(request, "read")

    def told(name: str) -> dict[str, Any]:
        if brief:
            return api.glance_facts(pool.glance(name), token)
        return api.status_facts(pool.status(name), token)

    def work() -> bytes:
        names = [name for name in pool.names(shifted=shifted) if token.owns(name)]
        found, damaged = [], []
        for name in names[offset : offset + limit]:
            try:
                found.append(told(name))
            except UnknownStreamError:
                continue  # deleted in this moment
            except DamagedStreamError:
                damaged.append(token.own_name(name))
        return api.json_bytes({"streams": found, "damaged": damaged, "total": len(names)})

    return _json(await service.in_thread(token, work))


@router.get(STREAM, **told(404, 409))
async def look(request: Request, name: Name) -> Response:
    """Tell health, mode and history of a stream."""
    service, token, full = _named(request, name, "read")
    return await _told(service, token, partial(service.pool.status, full))


@router.put(STREAM, **told(409, *WITH_BODY), openapi_extra=api.MODE_BODY)
async def switch(request: Request, name: Name) -> Response:
    """Switch a stream off, to shadow, to auto or on; a new one begins in that mode."""
    service, token, full = _named(request, name, "control")
    async with service.body(request, token, full) as body:
        service.pool.check_admission(full, token.check_quota)
        bad_body = partial(HttpError, "bad_body")
        change = parse_json(bytes(body.content), "The body", bad_body)
        conform(change, CHANGE, "The body", bad_body)
    work = partial(service.pool.set_mode, full, change["mode"], admit=token.check_quota)
    return await _told(service, token, work)


@router.delete(STREAM, status_code=204, responses=refusals(404))
async def drop(request: Request, name: Name) -> Response:
    """Forget a stream, also on disk; images of that name begin a new one."""
    service, token, full = _named(request, name, "control")
    await service.in_thread(token, partial(service.pool.drop, full), full)
    return Response(status_code=204)


@router.post(f"{STREAM}/reset", **told(404, 409))
async def reset(request: Request, name: Name) -> Response:
    """Let a stream begin anew, in its mode."""
    service, token, full = _named(request, name, "control")
    return await _told(service, token, partial(service.pool.reset, full))


@router.get(
    f"{STREAM}/state",
    response_class=Response,
    responses={200: {"content": {BYTES: BINARY}}, **refusals(404, 409)},
)
async def read_state(request: Request, name: Name) -> Response:
    """Read a stream as safetensors; the same bytes load it again, bit for bit."""
    service, token, full = _named(request, name, "read")
    content = await service.in_thread(token, partial(service.pool.dump, full), full)
    return Response(content, media_type=BYTES)


@router.put(f"{STREAM}/state", **told(*WITH_BODY), openapi_extra=api.STATE_BODY)
async def load_state(request: Request, name: Name) -> Response:
    """Load a stream that was read before, here or elsewhere, with this network and filter."""
    service, token, full = _named(request, name, "control")
    async with service.body(request, token, full) as body:
        service.pool.check_admission(full, token.check_quota)
        work = partial(service.pool.restore, full, bytes(body.content), admit=token.check_quota)
        return await _told(service, token, work)


@router.get(f"{STREAM}/pictures", response_model=api.Pictures, responses=refusals(404))
async def pictures(request: Request, name: Name) -> Response:
    """Show the last image before and after the filter: for a page, whose images send no token."""
    service, token, full = _named(request, name, "read")

    def work() -> bytes:
        both = service.pool.pictures(full)
        before, after = (None, None) if both is None else map(api.picture_url, both)
        return api.json_bytes({"before": before, "after": after})

    return _json(await service.in_thread(token, work, full))


def _named(request: Request, name: str, right: Right) -> tuple[Service, Token, str]:
    service = service_of(request)
    token = service.admit(request, right)
    full = token.full_name(name)
    request.state.record.stream = full
    return service, token, full


async def _told(service: Service, token: Token, work: Callable[[], StreamStatus]) -> Response:

    def done() -> bytes:
        status = work()
        service.metrics.streams.used(status.health.stream)
        return api.json_bytes(api.status_facts(status, token))

    return _json(await service.in_thread(token, done))


def _json(content: bytes) -> Response:
    return Response(content, media_type=JSON)
