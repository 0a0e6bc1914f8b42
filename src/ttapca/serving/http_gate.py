"""What surrounds every request: an id, a line in the log, headers for browsers, a closed door.

The gate is plain ASGI, around all routes. It also answers what the routes raise, so that nothing
leaves the service without a reason that a client can read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttapca.errors import TtapcaError
from ttapca.serving.refusals import SHORT_WAIT, Refusal, refusal_of
from ttapca.serving.request_log import LOGGER, RequestRecord, log_request
from ttapca.serving.service import RECORD, Service

API = "/v1/"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
DISCARD_SECONDS = 0.5  # for a client that is still sending what was refused, to see the answer

SECURITY_HEADERS = {
    # `blob:` and `data:` for pictures that the page fetches with its token.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FAILURE = Refusal(
    500,
    "failure",
    "The service has failed; this is a fault of its own, and its log says more under the id in the "
    "header X-Request-ID.",
)


class Gate:
    """Puts a service around its routes.

    Args:
        app: The routes.
        service: Counts the requests, and says whether it is draining.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # lifespan; there are no websockets
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        record = scope[RECORD] = RequestRecord(request_id, scope["method"])
        exchange = _Exchange(receive, send, record, headers)
        start = time.perf_counter()
        self.service.running += 1
        try:
            await self._answer(scope, headers, exchange)
        finally:
            self.service.running -= 1
            record.route = getattr(scope.get("route"), "path", "other")
            record.seconds = time.perf_counter() - start
            self.service.metrics.finished(record)
            log_request(record)

    async def _answer(self, scope: Scope, headers: Headers, exchange: _Exchange) -> None:
        try:
            self._check_door(scope["path"], headers)
            await self.app(scope, exchange.receive, exchange.send)
        except Refusal as refusal:
            await self._refuse(refusal, scope, exchange)
        except Exception as error:
            meant = refusal_of(error) if isinstance(error, TtapcaError) else None
            if meant is None:
                LOGGER.exception("request %s has failed", exchange.record.request)
            await self._refuse(meant or FAILURE, scope, exchange)

    async def _refuse(self, refusal: Refusal, scope: Scope, exchange: _Exchange) -> None:
        exchange.record.code = refusal.code
        if exchange.record.status:  # the answer has begun: it can only be cut off
            return
        await exchange.discard()
        response = JSONResponse(refusal.body, refusal.status, refusal.headers)
        await response(scope, exchange.receive, exchange.send)

    def _check_door(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse what no route should see.

        Without tokens, everybody on this machine may do everything; that must not include pages
        of other sites in a browser on this machine, whose requests name another host or origin.
        """
        service = self.service
        if not service.tokens:
            host, origin = headers.get("host", "localhost"), headers.get("origin")
            if not _is_loopback(host):
                raise Refusal(
                    403,
                    "foreign_host",
                    "Without tokens, this service answers to localhost only; the request names "
                    "another host. Start it with --tokens FILE to use it from elsewhere.",
                )
            if origin is not None and origin.partition("://")[2] != host:
                raise Refusal(
                    403,
                    "foreign_origin",
                    "Without tokens, this service answers no pages of other sites. Start it with "
                    "--tokens FILE to use it from there.",
                )
        if not path.startswith(API):
            return
        if service.draining:
            raise Refusal(
                503,
                "closing",
                "The service is about to end and takes no new requests. Use another one, or wait "
                "until it is back.",
                retry_after=SHORT_WAIT,
            )
        if service.running > service.limits.max_running:
            raise Refusal(
                503,
                "busy",
                f"The service works on {service.limits.max_running:,} requests at once, and has as "
                "many. Try again in a moment.",
                retry_after=SHORT_WAIT,
            )


class _Exchange:
    """The two directions of one request: what was received, and what is added to the answer."""

    def __init__(
        self, receive: Receive, send: Send, record: RequestRecord, headers: Mapping[str, str]
    ) -> None:
        self._receive, self._send, self.record = receive, send, record
        self._unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        # Such a client asks before it sends, and sends nothing after a refusal.
        self._waits = "expect" in headers

    async def receive(self) -> Message:
        self._waits = False
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self.record.request
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            if self._unread:  # what is still on its way must not be taken for the next request
                headers["Connection"] = "close"
        await self._send(message)

    async def discard(self) -> None:
        """Read what a refused client is still sending, for a moment, and keep none of it.

        Otherwise closing the connection would reset it, and many clients would never see why.
        """
        try:
            async with asyncio.timeout(DISCARD_SECONDS):
                while self._unread and not self._waits:
                    await self.receive()
        except TimeoutError:
            pass


def _is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
