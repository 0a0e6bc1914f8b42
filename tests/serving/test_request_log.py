"""A line for each request, whatever the reader of the log does."""

from __future__ import annotations

import io
import json
import logging
import os

import numpy as np
import pytest

from serving.clients import SECRETS, npy, token
from serving.conftest import Serving
from ttapca.serving.http_app import LOGGER, RequestRecord
from ttapca.serving.http_server import logging_to

DIGITS = np.zeros((1, 8, 8, 1), np.uint8)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_for_each_request_and_no_token_in_it(as_json: bool, serving: Serving) -> None:
    client = serving(token("shop", "predict"), token("hall", "read"))
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


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot tell whether a pipe has room")
def test_a_log_without_a_reader_loses_lines_and_stops_nothing() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, logging_to(stream, as_json=False):  # noqa: PTH123
        for number in range(2_000):
            RequestRecord(str(number), "GET", route="x" * 100).log()
        first = os.read(reading, 1 << 20).decode().splitlines()
        RequestRecord("last", "GET").log()
        assert os.read(reading, 1 << 20).decode().endswith("(last)\n")
    os.close(reading)
    assert 100 < len(first) < 2_000
    assert first[-1].endswith(f"({len(first) - 1})")
