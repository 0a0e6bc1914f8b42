"""The routes of streams: predict, look, switch, reset, save, load, delete."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from ttapca._checks import OneOf, Record, conform
from ttapca.errors import DamagedStreamError, UnknownStreamError
from ttapca.serving.answers import Mode, StreamStatus
from ttapca.serving.api_description import (
    BYTES,
    IMAGES_BODY,
    MODE_BODY,
    PNG,
    STATE_BODY,
    WITH_BODY,
    file_answer,
    refusals,
)
from ttapca.serving.api_models import Pictures, PredictAnswer, StreamFacts, StreamList
from ttapca.serving.decoding import JSON
from ttapca.serving.refusals import Refusal
from ttapca.serving.rendering import (
    answer_facts,
    glance_facts,
    json_bytes,
    picture_urls,
    png_bytes,
    status_facts,
)
from ttapca.serving.service import Service, record_of
from ttapca.serving.stream_record import LONGEST_NAME, NAME_PATTERN
from ttapca.serving.tokens import Right, Token
from ttapca.support.parsing import parse_json

CHANGE = Record({"mode": OneOf(get_args(Mode))})
MOST_LISTED = 500

# Said to clients; names are checked with the token, which has its part in them.
_NAME: dict[str, Any] = {
    "pattern": f"^{NAME_PATTERN}$",
    "minLength": 1,
    "maxLength": LONGEST_NAME,
}
StreamName = Annotated[
    str,
    Query(description="Whose images these are.", examples=["camera-7"], json_schema_extra=_NAME),
]
Name = Annotated[
    str, Path(description="The stream.", examples=["camera-7"], json_schema_extra=_NAME)
]
Offset = Annotated[int, Query(ge=0, le=10**9, description="How many streams to leave out.")]
Brief = Annotated[bool, Query(description="Whether to tell only what costs nothing.")]
Shifted = Annotated[
    bool | None, Query(description="Only streams whose alarm is on, or only those whose is off.")
]
Full = Annotated[
    bool,
    Query(description="Whether to tell all about the stream, as `GET /v1/streams/NAME` does."),
]
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED, description="How many to list at most.")]


class StreamRoutes:
    """Answers requests about streams.

    Whatever the pool does is done in other threads: it may read the disk, or wait for a pass.

    Args:
        service: Knows the pool, and who may do what.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.pool = service, service.pool

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/v1")
        one = "/streams/{name}"
        router.post(
            "/predict",
            summary="Predict the classes of images, and adapt to their stream",
            response_model=PredictAnswer,
            responses=refusals(409, 415, *WITH_BODY),
            openapi_extra=IMAGES_BODY,
        )(self.predict)
        router.get(
            "/streams",
            summary="List streams by name",
            response_model=StreamList,
            responses=refusals(),
        )(self.list_streams)
        router.get(
            one,
            summary="Tell how a stream is",
            response_model=StreamFacts,
            responses=refusals(404, 409),
        )(self.look)
        router.put(
            one,
            summary="Switch a stream off, to shadow or on; a new one begins in that mode",
            response_model=StreamFacts,
            responses=refusals(409, *WITH_BODY),
            openapi_extra=MODE_BODY,
        )(self.switch)
        router.delete(
            one,
            summary="Forget a stream, also on disk",
            status_code=204,
            responses=refusals(404),
        )(self.drop)
        router.post(
            f"{one}/reset",
            summary="Let a stream begin anew, in its mode",
            response_model=StreamFacts,
            responses=refusals(404, 409),
        )(self.reset)
        router.post(
            f"{one}/save",
            summary="Write all that has changed to disk now",
            response_model=StreamFacts,
            responses=refusals(404, 409),
        )(self.save)
        router.get(
            f"{one}/state",
            summary="Read all that is kept of a stream",
            response_class=Response,
            responses=file_answer(BYTES, 404, 409),
        )(self.read_state)
        router.put(
            f"{one}/state",
            summary="Load a stream that was read before, here or elsewhere",
            response_model=StreamFacts,
            responses=refusals(*WITH_BODY),
            openapi_extra=STATE_BODY,
        )(self.load_state)
        router.get(
            f"{one}/pictures",
            summary="Show the last image before and after the filter, as URLs with the data",
            response_model=Pictures,
            responses=refusals(404),
        )(self.both_pictures)
        for which, show in (("before", self.picture_before), ("after", self.picture_after)):
            router.get(
                f"{one}/pictures/{which}.png",
                summary=f"Show the last image {which} the filter",
                response_class=Response,
                responses=file_answer(PNG, 404),
            )(show)
        return router

    async def predict(self, request: Request, stream: StreamName, full: Full = False) -> Response:
        """Send images of a stream, and get their classes and how the stream is."""
        service = self.service
        token, name = self._named(request, stream, "predict")
        kind = request.headers.get("content-type", "")
        async with service.body(request) as body, service.quotas.beginning(token, name):
            answer = await service.answer(name, kind, body)
        record_of(request).images = len(answer.logits)
        facts = partial(answer_facts, answer, token, service.facts.classes)
        if not full:
            return _json(json_bytes(facts()))  # takes less time than another thread would
        return _json(await service.in_thread(lambda: json_bytes(facts(full=True))))

    async def list_streams(
        self,
        request: Request,
        offset: Offset = 0,
        limit: Limit = 100,
        brief: Brief = False,
        shifted: Shifted = None,
    ) -> Response:
        """List the streams that the token can name, sorted by name, a page at a time."""
        token = self.service.admit(request, "read")

        def told(name: str) -> dict[str, Any]:
            if brief:
                return glance_facts(self.pool.glance(name), token)
            return status_facts(self.pool.status(name), token)

        def work() -> bytes:
            names = [name for name in self.pool.names(shifted=shifted) if token.owns(name)]
            found, damaged = [], []
            for name in names[offset : offset + limit]:
                try:
                    found.append(told(name))
                except UnknownStreamError:
                    continue  # deleted in this moment
                except DamagedStreamError:
                    damaged.append(token.own_name(name))
            return json_bytes({"streams": found, "damaged": damaged, "total": len(names)})

        return _json(await self.service.in_thread(work))

    async def look(self, request: Request, name: Name) -> Response:
        """Tell health, mode and history of a stream."""
        token, full = self._named(request, name, "read")
        return await self._told(token, partial(self.pool.status, full))

    async def switch(self, request: Request, name: Name) -> Response:
        """Answer from now on with the adapted network, the untouched one, or that and compare."""
        token, full = self._named(request, name, "control")
        service = self.service
        async with service.body(request) as body, service.quotas.beginning(token, full):
            change = parse_json(body, "The body", _bad_body)
            conform(change, CHANGE, "The body", _bad_body)
            return await self._told(token, partial(self.pool.set_mode, full, change["mode"]))

    async def drop(self, request: Request, name: Name) -> Response:
        """Forget all that was seen of a stream; images of that name begin a new one."""
        _, full = self._named(request, name, "control")
        await self.service.in_thread(self.pool.drop, full)
        return Response(status_code=204)

    async def reset(self, request: Request, name: Name) -> Response:
        """Forget what was seen of a stream, and keep its mode."""
        token, full = self._named(request, name, "control")
        return await self._told(token, partial(self.pool.reset, full))

    async def save(self, request: Request, name: Name) -> Response:
        """Do now what is done every few seconds."""
        token, full = self._named(request, name, "control")
        if not self.service.facts.saves:
            raise Refusal(
                409,
                "no_store",
                "Streams are kept in the file that the service was started with; this one was "
                "started without. Start it with --state FILE, or read the stream's `state`.",
            )

        def work() -> StreamStatus:
            status = self.pool.status(full)  # an unknown stream is refused, not ignored
            self.pool.save()
            return status

        return await self._told(token, work)

    async def read_state(self, request: Request, name: Name) -> Response:
        """Get a stream as safetensors; the same bytes load it again, bit for bit."""
        _, full = self._named(request, name, "read")
        content = await self.service.in_thread(self.pool.dump, full)
        return Response(content, media_type=BYTES)

    async def load_state(self, request: Request, name: Name) -> Response:
        """Put back a stream; the network and the filter must be those that it was read from."""
        token, full = self._named(request, name, "control")
        service = self.service
        async with service.body(request) as body, service.quotas.beginning(token, full):
            return await self._told(token, partial(self.pool.restore, full, body))

    async def both_pictures(self, request: Request, name: Name) -> Response:
        """Get both pictures of one image at once, for a page, whose images can send no token."""
        _, full = self._named(request, name, "read")
        work = self.service.in_thread(lambda: json_bytes(picture_urls(self.pool.pictures(full))))
        return _json(await work)

    async def picture_before(self, request: Request, name: Name) -> Response:
        """Get the last image of a stream as it came, in the network's size."""
        return await self._picture(request, name, 0)

    async def picture_after(self, request: Request, name: Name) -> Response:
        """Get the last image of a stream as the filter leaves it."""
        return await self._picture(request, name, 1)

    async def _picture(self, request: Request, name: str, place: int) -> Response:
        _, full = self._named(request, name, "read")

        def work() -> bytes:
            pictures = self.pool.pictures(full)
            if pictures is None:
                raise Refusal(
                    404,
                    "no_picture",
                    "A stream has pictures once it was sent images; this one was not since the "
                    "service was started.",
                )
            return png_bytes(pictures[place])

        return Response(await self.service.in_thread(work), media_type=PNG)

    def _named(self, request: Request, name: str, right: Right) -> tuple[Token, str]:
        """Return the token of a request and the full name of its stream, or refuse."""
        token = self.service.admit(request, right)
        return token, self.service.stream(request, token, name)

    async def _told(self, token: Token, work: Callable[[], StreamStatus]) -> Response:
        """Do something with a stream, and answer with how it is then."""

        def done() -> bytes:
            status = work()
            self.service.metrics.noticed(status)
            return json_bytes(status_facts(status, token))

        return _json(await self.service.in_thread(done))


def _json(content: bytes) -> Response:
    return Response(content, media_type=JSON)


def _bad_body(message: str) -> Refusal:
    return Refusal(422, "bad_body", message)
