"""The service as an ASGI application: routes of streams, facts, measurements and the page."""

from __future__ import annotations

from importlib import resources
from typing import Any, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ttapca import __version__
from ttapca._checks import shown
from ttapca.serving import stream_routes
from ttapca.serving.api_models import Info, refusals
from ttapca.serving.http_errors import HttpError, closing
from ttapca.serving.metrics import CONTENT_TYPE
from ttapca.serving.middleware import ServiceMiddleware
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
    app.include_router(router)
    return app


@router.get("/v1/info", response_model=Info, responses=refusals(), dependencies=[BEARER])
async def info(request: Request) -> Response:
    """Tell what is served."""
    service = service_of(request)
    service.admit(request)
    facts = service.facts
    return JSONResponse(
        {
            "model": facts.model,
            "filter": facts.filter,
            "classes": facts.classes,
            "input_shape": service.pool.input_shape,
            "version": __version__,
            "bands": [{"first": first, "last": last} for first, last in facts.bands],
        }
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **refusals()},
    dependencies=[BEARER],
)
async def metrics(request: Request) -> Response:
    """Show measurements to Prometheus."""
    service = service_of(request)
    service.admit(request, "read", "all")
    text = await service.in_thread(service.metrics.text)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Tell whether the service runs."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: refusals()[503]})
async def ready(request: Request) -> dict[str, str]:
    """Tell whether the service takes requests."""
    service = service_of(request)
    if service.draining or service.pool.closed:
        raise closing()
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


async def _refuse_address(_request: Request, error: HTTPException) -> Response:
    """Refuse an address or a method without a route, in the form of all refusals."""
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "others")
        message = f"This address takes {methods}; the request has another method."
        raise HttpError("method_not_allowed", message, headers=dict(error.headers or {}))
    message = "There is nothing at this address. `/openapi.json` lists what there is."
    raise HttpError("not_found", message)


async def _refuse_parameter(_request: Request, error: RequestValidationError) -> Response:
    """Refuse a parameter that FastAPI finds wrong, in the form of all refusals."""
    first = error.errors()[0]
    name = first["loc"][-1]
    if first["type"] == "missing":
        message = f"The parameter `{name}` is missing: add `?{name}=...` to the address."
    else:
        message = f"The parameter `{name}` is wrong: {first['msg']}; found {shown(first['input'])}."
    raise HttpError("bad_parameter", message)
