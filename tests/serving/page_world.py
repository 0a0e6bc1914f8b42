"""The live page in a browser whose server is a dict: any state of any stream, without waiting.

Everything that the page asks for is answered in the test's own thread, and the page's clock moves
when a test says so.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from PIL import Image
from starlette.responses import Response

from browsing import PATIENCE
from ttapca.serving.http_app import page_files
from ttapca.serving.stream_record import StreamGlance

HOME = "http://page.test/"
NOON = 1_763_294_400.0  # 16 November 2025, 12:00:00 UTC
POLICY = "default-src 'self'; img-src 'self' data:"
STEP = 0.5  # seconds
# Counts the requests that are under way.
COUNTED = """
    window.underWay = 0;
    const ask = window.fetch;
    window.fetch = (...given) => {
        window.underWay += 1;
        return ask(...given).finally(() => { window.underWay -= 1; });
    };
"""
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse"]


def status(name: str, **changes: Any) -> dict[str, Any]:
    """How a stream is, as `GET /v1/streams/NAME` answers."""
    ratios = (0.9, 1.1, 0.7, 1.3, 2.4, 9.5)
    health = {
        "stream": name,
        "images": 1234,
        "skipped": 2,
        "shifted": False,
        "p_value": 0.4,
        "shift": 0.05,
        "size": 0.3,
        "bands": [
            {"layer": "conv1", "first": 2**n, "last": 2 ** (n + 1) - 1, "ratio": ratio}
            | {"p_value": 0.002 if ratio > 2 else 0.5}
            for n, ratio in enumerate(ratios)
        ],
        "composition": [0.4, 0.2, 0.15, 0.1, 0.06, 0.05, 0.03, 0.01],
        "skew": 0.1,
        "conditions": 1,
        "outliers": None,
        "batch_weight": None,
        "expected_error": None,
        "expected_error_untouched": None,
    }
    outer = {
        "mode": "on",
        "adapting": True,
        "switches": 0,
        "harmful": False,
        "gains": [1.0, 1.0, 1.02, 0.98, 0.6, 0.12],
        "requests": 1234,
        "adapted_share": 0.25,
        "disagreement": None,
        "shifted_since": None,
        "last_seen": NOON,
        "alarm_after": 128,
    }
    inner = {key: value for key, value in changes.items() if key in health}
    return {
        "health": {**health, **inner},
        **outer,
        **{key: value for key, value in changes.items() if key not in health},
    }


def shifted(name: str, since: float, **changes: Any) -> dict[str, Any]:
    return status(
        name, shifted=True, shifted_since=since, shift=0.97, p_value=0.002, size=1.5, **changes
    )


def _brief(status: dict[str, Any]) -> dict[str, Any]:
    """What the list of streams tells about one."""
    everything = {**status["health"], **status}
    return {each.name: everything[each.name] for each in fields(StreamGlance)}


def picture(side: int = 8) -> str:
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), 120, np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass
class World:
    """The server that the page sees.

    Attributes:
        streams: By name.
        damaged: Names of those that it cannot read.
        token: What it asks for; None for nothing.
        away: Whether nobody answers.
        refusing: Status, headers and message of what every request gets, if any.
        changes: Requests that would change something: method, path, body.
        tokens: What was in the header of requests to the API.
        said: What the browser's console said, and addresses elsewhere that were asked for.
        provoked: Whether a request was refused or not answered, which the console tells.
    """

    streams: dict[str, dict[str, Any]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    token: str | None = None
    away: bool = False
    refusing: tuple[int, dict[str, str], str] | None = None
    may_control: bool = True
    pictures: dict[str, str | None] = field(
        default_factory=lambda: {"before": picture(), "after": picture()}
    )
    changes: list[tuple[str, str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    provoked: bool = False
    files: dict[str, Response] = field(default_factory=page_files)

    def add(self, *streams: dict[str, Any]) -> World:
        self.streams |= {each["health"]["stream"]: each for each in streams}
        return self

    def answer(self, route: Any, request: Any) -> None:
        url = urlsplit(request.url)
        if not request.url.startswith(HOME):
            self.said.append(f"asked for {request.url}")
            route.abort()
        elif url.path.startswith("/v1/"):
            self._api(route, request, url)
        else:
            name = url.path.removeprefix("/static/").strip("/") or "index.html"
            file = self.files[name]
            headers = {**file.headers, "Content-Security-Policy": POLICY}
            route.fulfill(status=200, headers=headers, body=file.body)

    def _api(self, route: Any, request: Any, url: Any) -> None:
        self.asked.append(url.path)
        self.tokens.append(request.headers.get("authorization"))
        if self.away:
            self.provoked = True
            route.abort()
        elif self.token and self.tokens[-1] != f"Bearer {self.token}":
            self._refuse(route, 401, {}, "A token is needed.")
        elif self.refusing:
            self._refuse(route, *self.refusing)
        else:
            self._reply(route, request, url)

    def _reply(self, route: Any, request: Any, url: Any) -> None:
        if url.path == "/v1/info":
            info = {"model": "small-network", "filter": "conv1, 61 components", "version": "1"}
            route.fulfill(json={**info, "classes": CLASSES})
            return
        if url.path == "/v1/streams":
            query = parse_qs(url.query)
            assert query["brief"] == ["true"]
            offset, limit = (int(query[name][0]) for name in ("offset", "limit"))
            some = [_brief(each) for each in self.streams.values()]
            if query.get("shifted") == ["true"]:
                some = [each for each in some if each["shifted"]]
            part = some[offset:][:limit]
            route.fulfill(
                json={
                    "streams": [each for each in part if each["stream"] not in self.damaged],
                    "damaged": [each["stream"] for each in part if each["stream"] in self.damaged],
                    "total": len(some),
                }
            )
            return
        name, _, rest = unquote(url.path.removeprefix("/v1/streams/")).partition("/")
        if name not in self.streams:
            self._refuse(route, 404, {}, f"There is no stream `{name}`.")
        elif rest == "pictures":
            route.fulfill(json=self.pictures)
        elif request.method != "GET":
            self._change(route, request, name, url.path)
        else:
            route.fulfill(json=self.streams[name])

    def _change(self, route: Any, request: Any, name: str, path: str) -> None:
        body = json.loads(request.post_data) if request.post_data else None
        self.changes.append((request.method, path, body))
        if not self.may_control:
            self._refuse(route, 403, {}, "This token may not control streams.")
            return
        self.streams[name] = status(name) if body is None else {**self.streams[name], **body}
        route.fulfill(json=self.streams[name])

    def _refuse(self, route: Any, code: int, headers: dict[str, str], message: str) -> None:
        self.provoked = True
        route.fulfill(status=code, headers=headers, json={"error": {"message": message}})


@contextmanager
def opened(
    browser: Any,
    world: World,
    *,
    at: str = "",
    width: int = 1280,
    height: int = 900,
    ready: str = "#live",
    **context_options: Any,
) -> Iterator[Any]:
    """Open the page at noon, in Reykjavik, where it is noon by the server's clock too.

    At the end, whatever the console said that the world did not provoke is an error.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        timezone_id="Atlantic/Reykjavik",
        device_scale_factor=1,
        **context_options,
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: world.said.append(message.text))
    page.on("pageerror", lambda error: world.said.append(str(error)))
    page.route("**/*", world.answer)
    page.add_init_script(COUNTED)
    page.clock.install(time=NOON - 600)  # it goes on until it is paused
    page.clock.pause_at(NOON)
    page.goto(HOME + at)
    page.locator(ready).wait_for()
    yield page
    context.close()
    # The browser itself writes a line for every answer that is no success.
    assert [each for each in world.said if not (world.provoked and "Failed to load" in each)] == []


def pass_time(page: Any, seconds: float = 1.0) -> None:
    """Let the page's time pass; between two steps, answers arrive, however slow the browser is."""
    for _ in range(round(seconds / STEP)):
        page.clock.run_for(int(1000 * STEP))
        _wait(page, lambda: page.evaluate("window.underWay") == 0)
        page.wait_for_timeout(10)  # of real time, to draw them


def soon(page: Any, check: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let the page's time pass until something is so; it must be so at last."""
    for _ in range(round(seconds / STEP)):
        if check():
            return
        pass_time(page, STEP)
    _wait(page, check)  # what is left to do takes none of the page's time


def _wait(page: Any, check: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE / 1000
    while not check():
        assert time.monotonic() < end
        page.wait_for_timeout(5)  # in which requests are answered
