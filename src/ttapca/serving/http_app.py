"""The service as an ASGI application: routes, the page, and middleware around every request."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from typing import Any, cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttapca import __version__
from ttapca._checks import shown
from ttapca.serving import open_inference, stream_routes
from ttapca.serving.api_models import Info, refusals
from ttapca.serving.http_errors import HttpError, closing, http_error
from ttapca.serving.metrics import CONTENT_TYPE
from ttapca.serving.service import Service, service_of

DESCRIPTION = (
    "Predicts classes of images with a network that adapts to each stream of them. Refusals have "
    'the form `{"error": {"code": ..., "message": ...}}`; every answer has an `X-Request-ID`.'
)
BEARER = Depends(
    HTTPBearer(auto_error=False, description="A token of this service, if it has tokens.")
)
# The table of the system may say otherwise, and browsers run no script of another type.
PAGE_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}

LOGGER = logging.getLogger("ttapca.serving")
# What takes images and tells of streams; what a page of another site may not load at all.
API, DATA, OPEN = ("/v1/", "/v2/models"), ("/v1/", "/v2", "/metrics"), "/v2"
UNTRACED = "healthz,readyz,v2/health,metrics"  # what machines ask all the time
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
DISCARD_SECONDS = 0.5  # for a client that is still sending a refused body, to see the answer

SECURITY_HEADERS = {
    # `blob:` and `data:` for pictures that the page fetches with its token.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",  # no page of another site shows what is here
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FAILURE = HttpError(
    "failure", "The service has failed by its own fault; its log says more under this X-Request-ID."
)

router = APIRouter(tags=["service"])


def create_app(service: Service) -> FastAPI:
    """Return the application of a service, for any ASGI server; the caller closes the service."""
    app = FastAPI(
        title="ttapca",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service, app.state.page_files = service, page_files()
    app.add_middleware(ServiceMiddleware, service=service)
    app.add_exception_handler(HTTPException, cast(Any, _refuse_address))
    app.add_exception_handler(RequestValidationError, cast(Any, _refuse_parameter))
    app.include_router(stream_routes.router, dependencies=[BEARER], tags=["streams"])
    app.include_router(open_inference.router, dependencies=[BEARER], tags=["open inference"])
    app.include_router(router)
    with suppress(ImportError):  # OpenTelemetry, if its packages are installed
        from opentelemetry.instrumentation import fastapi

        fastapi.FastAPIInstrumentor.instrument_app(app, excluded_urls=UNTRACED)
    return app


@router.get("/v1/info", response_model=Info, responses=refusals(), dependencies=[BEARER])
async def info(request: Request) -> Response:
    """Tell what is served."""
    service = service_of(request)
    service.admit(request)
    facts = vars(service.facts) | {"version": __version__, "input_shape": service.pool.input_shape}
    bands = [{"first": first, "last": last} for first, last in service.facts.bands]
    return JSONResponse(facts | {"bands": bands})


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **refusals()},
    dependencies=[BEARER],
)
async def metrics(request: Request) -> Response:
    """Show measurements to Prometheus."""
    service = service_of(request)
    token = service.admit(request, "read", "all")
    text = await service.in_thread(token, partial(generate_latest, service.metrics.registry))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Tell whether the service runs."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: refusals()[503]})
async def ready(request: Request) -> dict[str, str]:
    """Tell whether the service takes requests."""
    service_of(request).check_ready()
    return {"status": "ready"}


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """Show the live page."""
    return await page_file(request, "index.html")


@router.get("/static/{file}", include_in_schema=False)
async def page_file(request: Request, file: str) -> Response:
    """Show a file of the live page."""
    files: dict[str, Response] = request.app.state.page_files
    if file not in files:
        raise HTTPException(404)
    return files[file]


def page_files() -> dict[str, Response]:
    """Return the files of the page by name, read once: no address of a request becomes a path."""
    folder = resources.files("ttapca.serving") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    colours = resources.files("ttapca.support") / "page_colours.css"
    contents["page_colours.css"] = colours.read_bytes()
    return {
        name: Response(content, media_type=PAGE_TYPES[name.rpartition(".")[2]])
        for name, content in contents.items()
    }


async def _refuse_address(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405:
        # The error names the methods of the first route that has this address.
        routers = (stream_routes.router, open_inference.router, router)
        routes = cast(Iterable[Route], [each for one in routers for each in one.routes])
        fitting = [each for each in routes if each.path_regex.match(request.scope["path"])]
        names = {name for each in fitting for name in each.methods or ()}
        methods = ", ".join(sorted(names or (error.headers or {})["Allow"].split(", ")))
        message = f"This address takes {methods}; the request has another method."
        raise HttpError("method_not_allowed", message, headers={"Allow": methods})
    message = "There is nothing at this address. `/openapi.json` lists what there is."
    raise HttpError("not_found", message)


async def _refuse_parameter(_request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    name = first["loc"][-1]
    if first["type"] == "missing":
        message = f"The parameter `{name}` is missing: add `?{name}=...` to the address."
    else:
        message = f"The parameter `{name}` is wrong: {first['msg']}; found {shown(first['input'])}."
    raise HttpError("bad_parameter", message)


@dataclass
class RequestRecord:
    """The facts of one request for log and metrics; the routes fill them in."""

    request: str  # its id, from the client or drawn here
    method: str
    route: str = "other"  # the pattern that its address fits, such as `/v1/streams/{name}`
    status: int = 0
    seconds: float = 0.0  # from its head to the end of its answer
    token: str | None = None  # the name, never the secret
    stream: str | None = None  # the full name
    images: int | None = None
    bytes: int | None = None  # of its body
    code: str | None = None  # if it was refused

    def log(self) -> None:
        """Write a line for a person: `GET /healthz 200 in 1.2 ms  (1f)`; the facts are for JSON."""
        parts = [f"{self.method} {self.route} {self.status} in {1000 * self.seconds:.1f} ms"]
        parts += [part for part in (self.code, self.token, self.stream) if part]
        if self.images is not None:
            parts.append(f"{self.images} image{'s' * (self.images != 1)}")
        facts = {name: value for name, value in asdict(self).items() if value is not None}
        facts["seconds"] = round(self.seconds, 6)
        LOGGER.info("%s  (%s)", ", ".join(parts), self.request, extra={"facts": facts})


class ServiceMiddleware:
    """Gives requests ids, log lines and headers for browsers, and answers the errors of routes."""

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
            content: dict[str, Any] = {"error": {"code": refusal.code, "message": str(refusal)}}
            if scope["path"].startswith(OPEN):  # that protocol has text there
                content = {"error": str(refusal), "code": refusal.code}
            answer = JSONResponse(content, refusal.status, refusal.headers)
            await answer(scope, exchange.receive, exchange.send)

    def _admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse foreign pages, and requests to the API that the service cannot take now."""
        service = self.service
        if not service.tokens.all:
            _check_origin(headers, data=path.startswith(DATA))
        if path.startswith(API) and service.draining:
            raise closing()


def _check_origin(headers: Mapping[str, str], *, data: bool) -> None:
    # A browser on this machine may show any page. What that loads, as an image or a script, has no
    # `Origin`, but browsers say who asks. A link may lead to the live page.
    host, origin = headers.get("host", "localhost"), headers.get("origin")
    if not is_loopback(host):
        raise HttpError(
            "foreign_host",
            "Without tokens, this service answers to localhost only; give it --tokens FILE.",
        )
    foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    followed = headers.get("sec-fetch-mode") == "navigate" and not data
    if (foreign and not followed) or (origin is not None and origin.partition("://")[2] != host):
        raise HttpError(
            "foreign_origin",
            "Without tokens, this service answers no pages of other sites; give it --tokens FILE.",
        )


def is_loopback(host: str) -> bool:
    """Tell whether a host, as an address of a page has it, is this machine."""
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
