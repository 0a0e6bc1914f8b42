"""The rules that routes share: tokens and their rights, bodies within limits, work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.requests import ClientDisconnect, Request

from ttapca.serving.decoding import ImageDecoder
from ttapca.serving.http_errors import HttpError
from ttapca.serving.limits import RequestLimits, RequestRate
from ttapca.serving.metrics import Metrics
from ttapca.serving.tokens import ANYBODY, Right, Token, Tokens

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ttapca.datasets.pictures import PictureSize
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.request_queue import Answer

Result = TypeVar("Result")

LONGEST_LENGTH = 18  # digits of a Content-Length
DECODERS = 4  # threads: each holds one decoded picture of at most `max_pixels`


@dataclass(frozen=True)
class ServiceFacts:
    """Facts for `/v1/info`."""

    model: str
    filter: str  # in words
    classes: tuple[str, ...] = ()  # empty if they have no names
    bands: tuple[tuple[int, int], ...] = ()  # first and last component, counting from 1


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
        self.running = 0  # requests that are worked on
        self._held = 0  # bytes of bodies
        self._rates = {
            token.name: RequestRate(token.requests_per_second)
            for token in self.tokens.all
            if token.requests_per_second is not None
        }
        self._decoders = ThreadPoolExecutor(DECODERS, "ttapca-decoder")

    def close(self) -> None:
        """End the threads; the pool is left open."""
        self._decoders.shutdown(cancel_futures=True)

    def admit(self, request: Request, *rights: Right) -> Token:
        """Return the token of a request, which must have some rights, and count the request."""
        token = self._shown(request) if self.tokens.all else ANYBODY
        request.state.record.token = token.name if self.tokens.all else None
        if not token.rights.issuperset(rights):
            raise HttpError(
                "right_missing",
                f"This needs the right{'s' * (len(rights) > 1)} {' and '.join(rights)}; the token "
                f"`{token.name}` has {', '.join(sorted(token.rights))}. Use another one.",
            )
        rate = self._rates.get(token.name)
        wait = 0.0 if rate is None else rate.wait()
        if wait:
            raise HttpError(
                "too_many_requests",
                f"The token `{token.name}` may send {token.requests_per_second:g} requests a "
                "second, and has sent more. Wait as long as the header Retry-After says.",
                retry_after=wait,
            )
        return token

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
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body of a request, and count it as held until the block ends."""
        own = 0

        def hold(size: int) -> None:
            """Make room for this number of bytes of the body."""
            nonlocal own
            if size > self.limits.max_body:
                raise HttpError(
                    "body_too_large",
                    f"The body of a request has at most {self.limits.max_body:,} bytes; this one "
                    "has more. Send several requests, or smaller pictures.",
                )
            more = max(0, size - own)
            if self._held + more > self.limits.max_held:
                raise HttpError(
                    "busy",
                    "Too many large requests are being worked on. Try again in a moment.",
                )
            own += more
            self._held += more

        try:
            content = await self._read(request, hold)
            request.state.record.bytes = len(content)
            yield content
        finally:
            self._held -= own

    async def _read(self, request: Request, hold: Callable[[int], None]) -> bytes:
        stated = request.headers.get("content-length", "0")
        if not stated.isdecimal() or len(stated) > LONGEST_LENGTH:
            raise HttpError("bad_length", "The header Content-Length must be a number.")
        hold(int(stated))
        content = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    hold(len(content) + len(part))  # a body in chunks does not state its length
                    content += part
        except TimeoutError:
            raise HttpError(
                "body_too_slow",
                f"The body of a request arrives within {self.limits.body_seconds:g} s; this one "
                "did not. Send less at once, or over a faster connection.",
            ) from None
        except ClientDisconnect:
            raise HttpError("disconnected", "The client went away.") from None
        return bytes(content)

    async def answer(self, token: Token, stream: str, content_type: str, body: bytes) -> Answer:
        """Decode the images of a request, and return the answer of the pool."""

        def submit() -> Future[Answer]:
            images = self.decoder.images(content_type, body)
            return self.pool.submit(stream, images, admit=token.check_quota)

        async with self._in_time():
            decoding = self._decoders.submit(submit)
            try:
                future = await asyncio.wrap_future(decoding)
            except asyncio.CancelledError:
                decoding.add_done_callback(_give_up)  # it goes on, but needs no pass any more
                raise
            return await asyncio.wrap_future(future)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Do work of the pool, which may read the disk or wait for a pass."""
        async with self._in_time():
            return await asyncio.to_thread(work)

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


def _give_up(decoding: Future[Future[Answer]]) -> None:
    """Cancel the request that a thread has given to the pool, if it has."""
    if not decoding.cancelled() and decoding.exception() is None:
        decoding.result().cancel()


def service_of(request: Request) -> Service:
    """Return the service that a request is for."""
    return cast(Service, request.app.state.service)
