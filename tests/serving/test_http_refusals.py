"""Whatever is refused has a reason, and leaves every stream as it was."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from serving.clients import Kept, described, in_pieces, npy, npy_bytes, picture, token
from serving.conftest import Serving
from serving.servers import PATIENCE, until
from serving.test_decoding import bomb
from ttapca.serving import decoding
from ttapca.serving.api_models import ErrorAnswer
from ttapca.serving.decoding import NPY
from ttapca.serving.http_app import RequestRecord, create_app

PREDICT = "/v1/predict?stream=camera-7"
STREAM = "/v1/streams/camera-7"
DIGITS = np.zeros((2, 8, 8, 1), np.uint8)


def refused(response: Any, status: int, code: str, message: str = "") -> Any:
    assert response.status_code == status, response.text
    content = described(response, ErrorAnswer)
    assert content["error"]["code"] == code
    assert message in content["error"]["message"]
    return response


def post(content: bytes, kind: str = NPY) -> tuple[str, str, dict[str, Any]]:
    return "POST", PREDICT, {"content": content, "headers": {"Content-Type": kind}}


def get(path: str, method: str = "GET") -> tuple[str, str, dict[str, Any]]:
    return method, path, {}


def switch(mode: Any, path: str = STREAM) -> tuple[str, str, dict[str, Any]]:
    return "PUT", path, {"json": mode}


TWO_FILES = {"files": [("images", picture(DIGITS[0, ..., 0])), ("images", b"no")]}
LONG = f"/v1/predict?stream={'x' * 101}"
LARGE = b"x" * 5_000
REFUSED: list[tuple[tuple[str, str, dict[str, Any]], int, str, str]] = [
    (get("/v3/predict"), 404, "not_found", "`/openapi.json` lists"),
    (get("/v1/streams/"), 404, "not_found", ""),
    (get(PREDICT), 405, "method_not_allowed", "This address takes POST"),
    (get(STREAM, "POST"), 405, "method_not_allowed", "This address takes DELETE, GET, PUT"),
    (get(f"{STREAM}/state", "DELETE"), 405, "method_not_allowed", "GET, PUT;"),
    (get("/openapi.json", "POST"), 405, "method_not_allowed", "GET, HEAD"),
    (("POST", "/v1/predict", npy(DIGITS)), 422, "bad_parameter", "`stream` is missing"),
    (
        ("POST", "/v1/predict?stream=..%2Fetc", npy(DIGITS)),
        422,
        "bad_stream_name",
        "letters of A-Z",
    ),
    (("POST", LONG, npy(DIGITS)), 422, "bad_stream_name", "1 to 100"),
    (get("/v1/streams/.hidden"), 422, "bad_stream_name", ""),
    (("POST", PREDICT, {"content": b"x"}), 415, "unsupported_type", "found ''"),
    (post(b""), 422, "bad_images", "`.npy`"),
    (post(npy_bytes(DIGITS[:, :7])), 422, "bad_images", "(images, 1, 8, 8)"),
    (post(npy_bytes(np.full((1, 1, 8, 8), np.nan))), 422, "bad_images", "nan"),
    (post(b"\x80\x04."), 422, "bad_images", ""),
    (post(b"{}", "application/json"), 415, "unsupported_type", "application/json"),
    (("POST", PREDICT, TWO_FILES), 422, "bad_images", "Picture 2"),
    (post(bomb(200, 200), "image/png"), 413, "too_many_pixels", "these have 40,000"),
    (post(npy_bytes(np.zeros((9, 8, 8, 1), np.uint8))), 422, "bad_images", "1 to 8"),
    (post(LARGE), 413, "body_too_large", "at most 4,000 bytes"),
    (("PUT", f"{STREAM}/state", {"content": LARGE}), 413, "body_too_large", ""),
    (("PUT", f"{STREAM}/state", {"content": b"x" * 50}), 422, "bad_state", "no saved stream"),
    (switch({}), 422, "bad_body", "an object with `mode`"),
    (switch({"mode": "of"}), 422, "bad_body", "Did you mean `off`"),
    (switch({"mode": "on", "a": 1}), 422, "bad_body", "'a'"),
    (switch({"mode": 3}, "/v1/streams/n"), 422, "bad_body", ""),
    (get("/v1/streams?limit=0"), 422, "bad_parameter", "`limit` is wrong"),
    (get("/v1/streams?limit=501"), 422, "bad_parameter", "500"),
    (get("/v1/streams?offset=x"), 422, "bad_parameter", "found 'x'"),
    (get("/v1/streams/no"), 404, "unknown_stream", "no stream `no`"),
    (get("/v1/streams/no/reset", "POST"), 404, "unknown_stream", ""),
    (get("/v1/streams/no/state"), 404, "unknown_stream", ""),
    (get("/v1/streams/no/pictures"), 404, "unknown_stream", ""),
    (get(f"{STREAM}/pictures/x.png"), 404, "not_found", ""),
]


def test_every_refusal_has_a_reason_and_changes_nothing(
    serving: Serving, images: NDArray[np.uint8]
) -> None:
    client = serving(max_images=8, max_body=4_000, max_pixels=30_000)
    pool = client.service.pool
    pool.predict("camera-7", torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    pool.predict("camera-8", torch.tensor(images[:5] / 255).permute(0, 3, 1, 2).float())
    pool.set_mode("quiet", "shadow")
    before = Kept.of(pool)
    for (method, path, rest), *due in REFUSED:
        response = refused(client.ask(method, path, **rest), *due)
        assert Kept.of(pool) == before, due
        assert response.headers["x-request-id"]
        if due[0] == 405:
            assert response.headers["allow"] == {
                PREDICT: "POST",
                STREAM: "DELETE, GET, PUT",
                f"{STREAM}/state": "GET, PUT",
                "/openapi.json": "GET, HEAD",
            }.get(path)
    _, path, rest = post(LARGE)
    unstated = rest | {"content": in_pieces(LARGE)}  # the head does not state its length
    refused(client.ask("POST", path, **unstated), 413, "body_too_large")
    assert Kept.of(pool) == before


def test_a_full_queue_asks_to_come_back(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serving(pool_limits={"max_queue": 4})
    monkeypatch.setattr(client.service.pool._queue._room, "size", 3)  # images that wait
    response = refused(client.predict("new", DIGITS), 503, "queue_full", "3 do already")
    assert response.headers["retry-after"] == "1"
    assert client.service.pool.names() == []


def test_too_many_streams(serving: Serving) -> None:
    client = serving(pool_limits={"max_streams": 1})
    assert client.predict("one", DIGITS).status_code == 200
    refused(client.predict("two", DIGITS), 429, "too_many_streams", "at most 1 streams")
    refused(client.ask("PUT", "/v1/streams/two", json={"mode": "on"}), 429, "too_many_streams")
    assert client.service.pool.names() == ["one"]


def test_a_closed_pool(serving: Serving) -> None:
    client = serving()
    client.service.pool.close()
    response = refused(client.predict("one", DIGITS), 503, "closing")
    assert "retry-after" in response.headers


@pytest.mark.parametrize("where", ["in the pool", "while it is decoded"])
def test_an_answer_that_takes_too_long(
    where: str, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serving(answer_seconds=0.05)
    never: Future[Any] = Future()
    decoded = threading.Event()

    def submit(*_: object, **_admit: object) -> Future[Any]:
        assert where == "in the pool" or decoded.wait(PATIENCE)
        return never

    monkeypatch.setattr(client.service.pool, "submit", submit)
    response = refused(client.predict("one", DIGITS), 503, "too_late", "within 0.05 s")
    assert response.headers["retry-after"] == "1"
    decoded.set()
    until(never.cancelled)  # the pool need not work on it any more


def test_a_body_that_comes_too_slowly(serving: Serving) -> None:
    client = serving(body_seconds=0.05)

    async def slow() -> Any:
        yield npy_bytes(DIGITS)[:100]
        await asyncio.sleep(60)
        yield b""

    response = client.ask("POST", PREDICT, content=slow(), headers={"Content-Type": NPY})
    refused(response, 408, "body_too_slow", "within 0.05 s")
    assert client.service.pool.names() == []
    assert client.service._bodies.size == 0


def test_bodies_together_are_bounded(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request holds its body while another one comes; the larger one gives way."""
    client = serving(max_body=3_000, max_held=4_000)
    monkeypatch.setattr("ttapca.serving.http_app.DISCARD_SECONDS", 0.01)
    over = asyncio.Event()

    async def pieces(size: int) -> Any:
        yield b"x" * size
        await over.wait()

    async def second(size: int) -> Any:
        while client.service._bodies.size < 2_000:
            await asyncio.sleep(0.001)
        yield b"y" * size
        over.set()

    for sizes, codes in (((2_000, 2_500), ("", "busy")), ((2_900, 1_500), ("busy", ""))):
        over.clear()
        kind = {"headers": {"Content-Type": NPY}}
        paths = [PREDICT, PREDICT.replace("7", "8")]
        answers = client.together(
            ("POST", paths[0], None, {"content": pieces(sizes[0]), **kind}),
            ("POST", paths[1], None, {"content": second(sizes[1]), **kind}),
        )
        for answer, code in zip(answers, codes, strict=True):
            due = (503, "busy", "Too much") if code else (422, "bad_images")
            refused(answer, *due)
        assert client.service._bodies.size == 0


def test_who_only_states_a_large_body_holds_no_room(serving: Serving) -> None:
    """Half-sent bodies take neither the room nor the turns of others."""
    client = serving(max_body=3_000, max_held=3_000, max_running=1)
    answered = asyncio.Event()

    async def half() -> Any:
        yield b"x"
        await answered.wait()

    async def camera() -> Any:
        while client.service._bodies.size < 5:  # all the others have begun
            await asyncio.sleep(0.001)
        yield npy_bytes(DIGITS)

    async def last() -> Any:
        async for part in camera():
            yield part
        answered.set()

    head = {"Content-Type": NPY, "Content-Length": "2900"}
    requests = [
        ("POST", f"/v1/predict?stream=slow-{n}", None, {"content": half(), "headers": head})
        for n in range(5)
    ]
    mine = ("POST", PREDICT, None, {"content": last(), "headers": {"Content-Type": NPY}})
    assert client.together(*requests, mine)[-1].status_code == 200


@pytest.mark.parametrize("others", ["shop", "hall"])
def test_requests_at_once_are_bounded(
    others: str, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a token with many requests some give way to another one."""
    monkeypatch.setattr("ttapca.serving.service.OTHERS", 1)
    client = serving(token("shop", "read"), token("hall", "read"), max_running=4)
    names, release = client.service.pool.names, threading.Event()
    refusals = client.service.metrics.finished
    records: list[RequestRecord] = []

    def slow_names(**options: Any) -> list[str]:
        release.wait(PATIENCE)
        return names(**options)

    def some_have_ended(record: RequestRecord) -> None:
        refusals(record)
        records.append(record)
        if len(records) == 2:
            release.set()

    monkeypatch.setattr(client.service.pool, "names", slow_names)
    monkeypatch.setattr(client.service.metrics, "finished", some_have_ended)
    secrets = ["shop"] * 4 + [others] * 2
    found = client.together(*(("GET", "/v1/streams", secret, {}) for secret in secrets))
    statuses = [each.status_code for each in found]
    assert statuses.count(503) == 2
    # Two each; the first of all has begun, and so cannot give way.
    assert statuses == (
        [200] * 4 + [503] * 2 if others == "shop" else [200, 200, 503, 503, 200, 200]
    )


def test_large_pictures_are_decoded_apart_and_small_ones_go_on(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four large ones come first: they have one thread, one after the other."""
    monkeypatch.setattr("ttapca.serving.service.LARGE", 1_000)
    client = serving()
    threads: list[str] = []
    go_on, pixels_of = threading.Event(), decoding.picture_pixels

    def slow(opened: Any, *rest: Any) -> NDArray[np.uint8]:
        if opened.width > 8:
            threads.append(threading.current_thread().name)
            assert go_on.wait(PATIENCE)
        return pixels_of(opened, *rest)

    monkeypatch.setattr(decoding, "picture_pixels", slow)
    finished = client.service.metrics.finished

    def one_has_ended(record: RequestRecord) -> None:
        finished(record)
        if record.stream == "small":  # while all the others are there
            assert len(threads) == 1
            go_on.set()

    monkeypatch.setattr(client.service.metrics, "finished", one_has_ended)
    large, small = (picture(np.zeros((side, side), np.uint8)) for side in (50, 8))
    sent = [("large", large)] * 4 + [("small", small)]
    kind = {"Content-Type": "image/png"}
    requests = [
        ("POST", f"/v1/predict?stream={name}", None, {"content": content, "headers": kind})
        for name, content in sent
    ]
    assert [each.status_code for each in client.together(*requests)] == [200] * 5
    assert len(threads) == 4
    assert len(set(threads)) == 1


def test_quotas_count_images(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serving(token("shop", "predict", images_per_second=0.01), token("hall", "predict"))
    one = DIGITS[:1]
    assert client.predict("a", DIGITS, "shop").status_code == 200  # more than a second's worth
    late = refused(client.predict("a", one, "shop"), 429, "too_many_images", "0.01 images a second")
    assert int(late.headers["retry-after"]) > 190  # two are owed
    assert client.predict("a", one, "hall").status_code == 200
    pool = client.service.pool
    assert [pool.status(each).health.images for each in pool.names()] == [1, 2]


def test_while_it_ends_nothing_new_begins(serving: Serving) -> None:
    client = serving()
    client.service.draining = True
    for method, path in (("POST", PREDICT), ("GET", "/v1/streams"), ("GET", "/v1/info")):
        response = refused(client.ask(method, path), 503, "closing", "about to end")
        assert "retry-after" in response.headers
    assert client.ask("GET", "/metrics").status_code == 200


def test_a_fault_of_the_service_tells_nothing(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = serving()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(client.service.pool, "status", fail)
    response = refused(client.ask("GET", STREAM), 500, "failure")
    assert "secret detail" not in response.text
    assert response.headers["x-request-id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_server_may_announce_its_start_and_end(serving: Serving) -> None:
    """Some ASGI servers do; the application has nothing to do then."""
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    asyncio.run(create_app(serving().service)(scope, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize("length", ["x", "-1", "9" * 30])
def test_a_length_that_is_none(length: str, serving: Serving) -> None:
    client = serving()
    headers = {"Content-Type": NPY, "Content-Length": length}
    refused(client.ask("POST", PREDICT, content=b"abc", headers=headers), 400, "bad_length")
