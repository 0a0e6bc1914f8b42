"""Middleware around every request: an id, a log line, headers for browsers, admission.

It is plain ASGI, around all routes. It also answers the errors that routes raise, so that every
refusal has a reason that a client can read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttapca.serving.http_errors import HttpError, closing, http_error
from ttapca.serving.request_log import LOGGER, RequestRecord
from ttapca.serving.service import Service

API = "/v1/"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
DISCARD_SECONDS = 0.5  # for a client that is still sending a refused body, to see the answer

SECURITY_HEADERS = {
    # `blob:` and `data:` for pictures that the page fetches with its token.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FAILURE = HttpError(
    "failure",
    "The service has failed; this is a fault of its own, and its log says more under the id in the "
    "header X-Request-ID.",
)


class ServiceMiddleware:
    """Puts the rules of a service around its routes."""

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
        record = RequestRecord(request_id, scope["method"])
        scope["state"] = {**scope.get("state", {}), "record": record}
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
            record.log()

    async def _answer(self, scope: Scope, headers: Headers, exchange: _Exchange) -> None:
        try:
            self._admit(scope["path"], headers)
            await self.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            refusal = http_error(error)
            if refusal is None:
                LOGGER.exception("request %s has failed", exchange.record.request)
                refusal = FAILURE
            exchange.record.code = refusal.code
            if exchange.record.status:  # the answer has begun: it can only be cut off
                return
            await exchange.discard()
            await refusal.response()(scope, exchange.receive, exchange.send)

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse foreign pages, and requests to the API that the service cannot take now."""
        service = self.service
        if not service.tokens:
            _check_origin(headers)
        if path.startswith(API):
            if service.draining:
                raise closing()
            if service.running > service.limits.max_running:
                raise HttpError(
                    "busy",
                    f"The service works on {service.limits.max_running:,} requests at once, and "
                    "has as many. Try again in a moment.",
                )


def _check_origin(headers: Mapping[str, str]) -> None:
    """Refuse pages of other sites: a browser on this machine may show any page."""
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    if not _is_loopback(host):
        raise HttpError(
            "foreign_host",
            "Without tokens, this service answers to localhost only; the request names another "
            "host. Start it with --tokens FILE to use it from elsewhere.",
        )
    if origin is not None and origin.partition("://")[2] != host:
        raise HttpError(
            "foreign_origin",
            "Without tokens, this service answers no pages of other sites. Start it with --tokens "
            "FILE to use it from there.",
        )


def _is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Exchange:
    """The two directions of one request: it follows the body, and adds headers to the answer."""

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
            if self._unread:  # the rest of the body must not be taken for the next request
                headers["Connection"] = "close"
        await self._send(message)

    async def discard(self) -> None:
        """Read what a refused client still sends, for a moment: a reset would hide the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while self._unread and not self._waits:
                    await self.receive()
