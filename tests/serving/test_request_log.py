"""A line for each request, whatever the reader of the log does."""

from __future__ import annotations

import io
import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from serving.clients import SECRETS, npy, token
from serving.conftest import Serving
from serving.servers import PATIENCE
from ttapca.serving.request_log import LOGGER, RequestRecord, logging_to

DIGITS = np.zeros((1, 8, 8, 1), np.uint8)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_for_each_request_and_no_token_in_it(
    as_json: bool, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serving(token("shop", "predict"), token("hall", "read"))
    monkeypatch.setattr("ttapca.serving.request_log.LAST_SECONDS", PATIENCE)
    written = io.StringIO()
    with logging_to(written, as_json=as_json):
        client.predict("camera", DIGITS, "shop")
        client.ask("GET", f"/v1/streams/x?token={SECRETS['shop']}", "hall")
        client.ask("GET", f"/v1/{SECRETS['shop'].replace(' ', '-')}", "a wrong secret")
        client.ask("BREW", "/healthz%0Aforged", headers={"X-Request-ID": "mine"})
        try:
            raise ValueError("broken")
        except ValueError:
            LOGGER.exception("something else")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    lines = written.getvalue().splitlines()
    assert len(lines) == (6 if as_json else 10)
    for secret in (*SECRETS.values(), "a wrong secret", "the-long-secret", "forged"):
        assert secret not in written.getvalue()
    if not as_json:
        assert "POST /v1/predict 200 in " in lines[0]
        assert "ms, shop, shop.camera, 1 image  (" in lines[0]
        assert lines[3].endswith("(mine)")
        return
    first, second, third, fourth, fifth, _ = map(json.loads, lines)
    assert (
        first.items()
        >= {
            "level": "info",
            "method": "POST",
            "route": "/v1/predict",
            "status": 200,
            "token": "shop",
            "stream": "shop.camera",
            "images": 1,
            "bytes": len(npy(DIGITS)["content"]),
        }.items()
    )
    assert first["seconds"] > 0
    assert (second["status"], second["code"], second["stream"]) == (404, "unknown_stream", "hall.x")
    assert (third["route"], third["status"]) == ("other", 404)
    assert (fourth["request"], fourth["status"]) == ("mine", 404)
    assert (fifth["level"], fifth["message"]) == ("error", "something else")
    assert "ValueError: broken" in fifth["traceback"]


def test_lines_go_to_the_file_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttapca.serving.request_log.LAST_SECONDS", PATIENCE)
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        with logging_to(file, as_json=False):
            LOGGER.info("%d and no number", "one")  # a line that cannot be made stops no other
            LOGGER.info("é")
        assert (tmp_path / "log").read_text(encoding="ascii").endswith(" \\xe9\n")


def test_a_log_that_nobody_reads_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttapca.serving.request_log.LAST_SECONDS", PATIENCE)
    monkeypatch.setattr("ttapca.serving.request_log.MOST_WAITING", 3)
    written = io.StringIO()

    stuck = threading.Semaphore(0)

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            stuck.acquire()
            return written.write(text)

    with logging_to(Stuck(), as_json=False):
        for number in range(50):
            RequestRecord(str(number), "GET").log()
        for _ in range(50):
            stuck.release()
    assert 3 <= len(written.getvalue().splitlines()) <= 5


def test_a_log_that_nobody_reads_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttapca.serving.request_log.LAST_SECONDS", 0.01)
    read = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            read.wait()
            return len(text)

    with logging_to(Stuck(), as_json=False):
        RequestRecord("1", "GET").log()
    read.set()
