"""The rules that routes share: tokens and their rights, bodies within limits, work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from starlette.requests import ClientDisconnect, Request

from ttapca.serving.decoding import ImageDecoder, OpenedImages
from ttapca.serving.fairness import FairThreads, GaveWayError, Room, Share
from ttapca.serving.http_errors import HttpError, closing
from ttapca.serving.limits import Rate, RequestLimits
from ttapca.serving.metrics import Metrics
from ttapca.serving.tokens import ANYBODY, Right, Token, Tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ttapca.datasets.pictures import PictureSize
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.request_queue import Answer

Result = TypeVar("Result")

LONGEST_LENGTH = 18  # digits of a Content-Length
LARGE = 1 << 24  # pixels of a request from which on its pictures have threads of their own
# Threads for images; large ones have a single one, so that one request's are decoded at a time.
DECODERS, LARGE_DECODERS = 3, 1
OTHERS = 8  # threads for other work, which may have to wait for a pass


@dataclass(frozen=True)
class ServiceFacts:
    """Facts for `/v1/info`."""

    model: str
    filter: str  # in words
    classes: tuple[str, ...] = ()  # empty if they have no names
    bands: tuple[tuple[int, int], ...] = ()  # first and last component, counting from 1


@dataclass(frozen=True)
class Asked:
    """The images of a request, and their stream, which may begin anew or end with them."""

    stream: str  # its full name
    images: OpenedImages
    starts: bool = False
    ends: bool = False


@dataclass(eq=False)
class Body:
    """The body of a request, and what it holds of the room for all."""

    share: Share
    content: bytearray = field(default_factory=bytearray)


class Service:
    """A pool, which its owner closes, with tokens, limits, decoding and measurements."""

    def __init__(
        self,
        pool: StreamPool,
        facts: ServiceFacts,
        *,
        tokens: Tokens | None = None,
        limits: RequestLimits | None = None,
        metrics: Metrics | None = None,
        size: PictureSize | None = None,
    ) -> None:
        self.pool, self.facts = pool, facts
        self.tokens = tokens or Tokens()
        self.limits = limits or RequestLimits()
        self.metrics = metrics or Metrics(facts.model)
        self.metrics.watch(pool)
        self.decoder = ImageDecoder(tuple(pool.input_shape), self.limits, size)
        self.draining = False  # whether new requests are refused, because the service will end
        self.running = 0  # requests that have begun and not ended
        self._bodies = Room(self.limits.max_held)  # in bytes
        self._others = Room(self.limits.max_running)  # requests that send no images
        self._rates = {
            (token.name, unit): Rate(per_second)
            for token in self.tokens.all
            for unit in ("requests", "images")
            if (per_second := getattr(token, f"{unit}_per_second")) is not None
        }
        self._decoders = FairThreads("ttapca-decoder", DECODERS)
        self._large_decoders = FairThreads("ttapca-large-decoder", LARGE_DECODERS)
        self._workers = FairThreads("ttapca-worker", OTHERS)

    def close(self) -> None:
        """End the threads; the pool is left open."""
        for threads in (self._decoders, self._large_decoders, self._workers):
            threads.close()

    def admit(self, request: Request, *rights: Right) -> Token:
        """Return the token of a request, which must have some rights, and count the request."""
        token = self._shown(request) if self.tokens.all else ANYBODY
        request.state.record.token = token.name if self.tokens.all else None
        self.check_rights(token, *rights)
        self._count(token, "requests", 1)
        return token

    def check_rights(self, token: Token, *rights: Right) -> None:
        """Refuse a token without some rights."""
        if not token.rights.issuperset(rights):
            raise HttpError(
                "right_missing",
                f"This needs the right{'s' * (len(rights) > 1)} {' and '.join(rights)}; the token "
                f"`{token.name}` has {', '.join(sorted(token.rights))}. Use another one.",
            )

    def check_ready(self) -> None:
        """Raise unless the service takes requests."""
        if self.draining or self.pool.closed:
            raise closing()

    def _count(self, token: Token, unit: Literal["requests", "images"], count: int) -> None:
        rate = self._rates.get((token.name, unit))
        wait = 0.0 if rate is None else rate.wait(count)
        if wait:
            raise HttpError(
                "too_many_requests" if unit == "requests" else "too_many_images",
                f"The token `{token.name}` may send {getattr(token, f'{unit}_per_second'):g} "
                f"{unit} a second, and has sent more. Wait as long as the header Retry-After says.",
                retry_after=wait,
            )

    def _shown(self, request: Request) -> Token:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        secret = secret.strip(" ")  # nothing else: bytes of UTF-8 look like other blanks here
        if scheme.lower() != "bearer" or not secret:
            raise HttpError(
                "token_missing",
                "Requests show a token in the header `Authorization: Bearer TOKEN`; this one shows "
                "none. Ask the operator of this service for one.",
            )
        token = self.tokens.find(secret.encode("latin-1"))
        if token is None:
            raise HttpError(
                "token_unknown",
                "The token is not one of this service. Check that it was copied as a whole, or ask "
                "the operator of this service for a new one.",
            )
        return token

    @asynccontextmanager
    async def body(self, request: Request, token: Token, stream: str) -> AsyncIterator[Body]:
        """Read the body of a request, and count it as held until the block ends.

        While it comes and while it waits, it may have to give way to those of others.
        """
        body = Body(Share(token.client, stream))
        try:
            await self._read(request, body)
            request.state.record.bytes = len(body.content)
            yield body
        finally:
            self._bodies.leave(body.share)

    async def _read(self, request: Request, body: Body) -> None:
        stated = request.headers.get("content-length", "0")
        if not stated.isdecimal() or len(stated) > LONGEST_LENGTH:
            raise HttpError("bad_length", "The header Content-Length must be a number.")
        self._check_size(int(stated))
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(self.limits.body_seconds)
        body.share.give_way = lambda: scope.reschedule(loop.time())
        try:
            async with scope:
                async for part in request.stream():
                    self._check_size(len(body.content) + len(part))  # one in chunks states no size
                    # Only what has come takes room: a client could state any size.
                    self._bodies.grow(body.share, len(part))
                    body.content += part
        except TimeoutError:
            if body.share.size < len(body.content):
                raise GaveWayError from None
            raise HttpError(
                "body_too_slow",
                f"The body of a request arrives within {self.limits.body_seconds:g} s; this one "
                "did not. Send less at once, or over a faster connection.",
            ) from None
        except ClientDisconnect:
            raise HttpError("disconnected", "The client went away.") from None
        finally:
            body.share.give_way = None

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_body:
            raise HttpError(
                "body_too_large",
                f"The body of a request has at most {self.limits.max_body:,} bytes; this one has "
                "more. Send several requests, or smaller pictures.",
            )

    async def answer(self, token: Token, body: Body, read: Callable[[bytes], Asked]) -> Answer:
        """Decode the images that `read` finds in a body, and return the answer of the pool."""

        def submit(asked: Asked) -> Future[Answer]:
            return self.pool.submit(
                asked.stream,
                asked.images.decode(),
                admit=token.check_quota,
                client=token.client,
                starts=asked.starts,
                ends=asked.ends,
            )

        def begin() -> Asked | Future[Answer]:
            asked = read(bytes(body.content))
            # Small ones at once: another thread would take longer than the pictures.
            return asked if limited or asked.images.pixels > LARGE else submit(asked)

        limited = (token.name, "images") in self._rates
        async with self._in_time():
            cost = max(1, len(body.content))
            future = await self._decoders.run(begin, body.share, cost, _give_up)
            if isinstance(future, Asked):
                images = future.images
                self._count(token, "images", images.count)
                large = images.pixels > LARGE
                future = await (self._large_decoders if large else self._decoders).run(
                    partial(submit, future), body.share, images.pixels if large else cost, _give_up
                )
            self._bodies.leave(body.share)
            body.content = bytearray()
            return await asyncio.wrap_future(future)

    async def in_thread(self, token: Token, work: Callable[[], Result], stream: str = "") -> Result:
        """Do work of the pool, which may read the disk or wait for a pass."""
        share = Share(token.client, stream)
        self._others.grow(share, 1)
        try:
            async with self._in_time():
                return await self._workers.run(work, share)
        finally:
            self._others.leave(share)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                yield
        except TimeoutError:
            raise HttpError(
                "too_late",
                f"A request is answered within {self.limits.answer_seconds:g} s; this one was not. "
                "It may still be worked on: look at the stream before you send it again.",
            ) from None


def _give_up(decoding: Future[Any]) -> None:
    """Cancel the request that a thread has given to the pool, if it has."""
    if not decoding.cancelled() and decoding.exception() is None:
        result = decoding.result()
        if not isinstance(result, Asked):
            result.cancel()


def service_of(request: Request) -> Service:
    """Return the service that a request is for."""
    return cast(Service, request.app.state.service)
