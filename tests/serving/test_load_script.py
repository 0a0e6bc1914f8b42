"""`scripts/load_service.py` in seconds; by hand it runs for half an hour."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from scripts import load_service
from scripts.load_service import BROKEN, Minute

from serving.conftest import Serving
from serving.scripted_server import INFO, Asked, Reply, prediction, refusal, reply, scripted
from serving.servers import Running
from ttapca.serving.http_server import DrainingServer, listen

# Two lines and one of each other phase; any machine may be slow, and other tests need memory.
SHORT = "--minutes 0.034 --overload 0.017 --after 0.017 --interval 1 --slowest 60 --growth 1000"
OPTIONS = [*SHORT.split(), "--streams", "6"]


def minute(memory: float = 100.0, waits: tuple[float, ...] = (0.1,), **statuses: int) -> Minute:
    counts = Counter({int(name[1:]): count for name, count in statuses.items()})
    return Minute("at capacity", 60.0, memory, Counter({200: 1}) + counts, list(waits))


def test_a_service_bears_load_and_overload(
    serving: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both ends are in this process, which may have 1,024 open files; 256 requests run at once.
    monkeypatch.setattr(load_service, "MOST_CONNECTIONS", 300)
    client = serving()
    client.predict(
        "first", np.zeros((1, 8, 8, 1), np.uint8)
    )  # takes longest, and a line is a second
    server = Running(DrainingServer(client.service), listen("127.0.0.1", 0))
    host, port = server.address
    code = load_service.main(["--url", f"http://{host}:{port}", *OPTIONS])
    server.end()
    said = capsys.readouterr().out
    assert code == 0, said
    lines = [line.split("  ")[0].strip() for line in said.splitlines()]
    assert lines[1:5] == ["at capacity", "at capacity", "overload", "after"]
    assert said.splitlines()[-1].split() == ["verdict", "good"]


def test_a_service_that_fails_or_breaks_off_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    memory = (200, {}, b"# HELP\nttapca_resident_bytes 3e6\n")
    replies = {"/v1/info": INFO, "/metrics": memory}
    count = itertools.count()

    def answer(asked: Asked) -> Reply:
        if asked.path in replies:
            return replies[asked.path]
        number = next(count)
        if number == 3:
            return reply({}, Connection="close")  # which is no fault
        return refusal(500) if number == 5 else prediction([1])

    with scripted(answer) as server:
        assert load_service.main(["--url", server.url, *OPTIONS, "--overload", "0"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].split(maxsplit=1) == ["verdict", "1 requests were answered with 500"]
    assert "3.0 MB" in said[1]


def test_what_a_service_must_not_do() -> None:
    fine = [minute(), minute(149.0, s503=7, s429=2)]
    filling = [minute(memory) for memory in (50.0, 100.0, 110.0, 149.0, 100.0, 120.0)]
    assert load_service.faults(filling, growth=50, slowest=1) == []
    assert load_service.growth_of(filling) == 49
    assert load_service.faults(fine, growth=50, slowest=1) == []
    bad = [minute(), minute(151.0, (0.1, 9.0), s500=3, s0=1)]
    assert load_service.faults(bad, growth=50, slowest=1) == [
        "1 requests were answered with broken off",
        "3 requests were answered with 500",
        "memory has grown by 51.0 MB; at most 50 are allowed",
        "a p99 is 8.9 s; at most 1 are allowed",
    ]
    idle = Minute("overload", 60.0, 100.0, Counter({503: 9}))
    assert load_service.faults([minute(), idle], 50, 1) == [
        "there was a minute without a prediction"
    ]
    assert BROKEN not in load_service.ALLOWED
