"""The service as an ASGI application: routes of streams, facts, measurements and the page."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ttapca import __version__
from ttapca._checks import shown
from ttapca.serving.api_description import refusals
from ttapca.serving.api_models import Alive, Info
from ttapca.serving.http_gate import Gate
from ttapca.serving.metrics import CONTENT_TYPE
from ttapca.serving.page_files import INDEX, PageFile, page_files
from ttapca.serving.refusals import SHORT_WAIT, Refusal
from ttapca.serving.service import Service
from ttapca.serving.stream_routes import StreamRoutes

DESCRIPTION = (
    "Predicts classes of images with a network that adapts to each stream of them. Refusals have "
    'the form `{"error": {"code": ..., "message": ...}}`; every answer has an `X-Request-ID`.'
)
BEARER = HTTPBearer(auto_error=False, description="A token of this service, if it has tokens.")


def create_app(service: Service) -> FastAPI:
    """Return the application of a service, for any ASGI server.

    The caller closes the service and its pool when the server has ended.
    """
    app = FastAPI(
        title="ttapca",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(HTTPException, cast(Any, _refuse_address))
    app.add_exception_handler(RequestValidationError, cast(Any, _refuse_parameter))
    routes = StreamRoutes(service).router()
    app.include_router(routes, dependencies=[Depends(BEARER)], tags=["streams"])
    _add_facts(app, service)
    _add_page(app)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    facts = service.facts
    info = {
        "model": facts.model,
        "filter": facts.filter,
        "classes": list(facts.classes),
        "input_shape": list(service.pool.input_shape),
        "version": __version__,
        "bands": [{"first": first, "last": last} for first, last in facts.bands],
    }

    @app.get(
        "/v1/info",
        summary="Tell what is served",
        response_model=Info,
        responses=refusals(),
        dependencies=[Depends(BEARER)],
        tags=["service"],
    )
    async def tell(request: Request) -> Response:
        service.admit(request)
        return JSONResponse(info)

    @app.get(
        "/metrics",
        summary="Show measurements to Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **refusals()},
        dependencies=[Depends(BEARER)],
        tags=["service"],
    )
    async def measurements(request: Request) -> Response:
        service.admit(request, "read", "all")
        text = await service.in_thread(service.metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    @app.get(
        "/healthz", summary="Tell whether the service runs", response_model=Alive, tags=["service"]
    )
    async def alive() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get(
        "/readyz",
        summary="Tell whether the service takes requests",
        response_model=Alive,
        responses={503: refusals()[503]},
        tags=["service"],
    )
    async def ready() -> Response:
        if service.draining or service.pool.closed:
            message = "The service is about to end and takes no new requests."
            raise Refusal(503, "closing", message, retry_after=SHORT_WAIT)
        return JSONResponse({"status": "ready"})


def _add_page(app: FastAPI) -> None:
    files = page_files()

    def show(file: PageFile) -> Response:
        return Response(file.content, media_type=file.media_type)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return show(files[INDEX])

    @app.get("/static/{file}", include_in_schema=False)
    async def static(file: str) -> Response:
        if file not in files:
            raise HTTPException(404)
        return show(files[file])


async def _refuse_address(request: Request, error: HTTPException) -> Response:
    """Refuse what fits no route, in the form of all refusals."""
    del request
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "others")
        message = f"This address takes {methods}; the request has another method."
        refusal = Refusal(405, "method_not_allowed", message)
        refusal.headers.update(error.headers or {})
    else:
        message = "There is nothing at this address. `/openapi.json` lists what there is."
        refusal = Refusal(error.status_code, "not_found", message)
    raise refusal


async def _refuse_parameter(request: Request, error: RequestValidationError) -> Response:
    """Refuse a parameter that FastAPI finds wrong, in the form of all refusals."""
    del request
    first = error.errors()[0]
    name = first["loc"][-1]
    if first["type"] == "missing":
        message = f"The parameter `{name}` is missing: add `?{name}=...` to the address."
    else:
        message = f"The parameter `{name}` is wrong: {first['msg']}; found {shown(first['input'])}."
    raise Refusal(422, "bad_parameter", message)
