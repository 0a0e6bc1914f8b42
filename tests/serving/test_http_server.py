"""The service behind real sockets: what clients do to them, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from serving.clients import npy_bytes
from serving.conftest import Serving
from serving.servers import PATIENCE, Running, started, until
from ttapca.errors import OptionError
from ttapca.serving import StreamStore, http_server
from ttapca.serving.decoding import NPY
from ttapca.serving.http_app import is_loopback
from ttapca.serving.http_server import (
    DrainingServer,
    listen,
    signals_put_back,
    url_of,
)

DIGITS = npy_bytes(np.zeros((2, 8, 8, 1), np.uint8))


@pytest.fixture
def running(serving: Serving) -> Iterator[Callable[..., Running]]:
    started = []

    def start(**limits: Any) -> Running:
        server = DrainingServer(serving(**limits).service)
        started.append(Running(server, listen("127.0.0.1", 0)))
        return started[-1]

    yield start
    for each in started:
        each.end()


def head(length: int, *more: str) -> bytes:
    lines = (
        "POST /v1/predict?stream=a HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {NPY}",
        f"Content-Length: {length}",
        *more,
    )
    return "\r\n".join((*lines, "", "")).encode()


def answered(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Read one answer."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    content = response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, json.loads(content)


def test_a_connection_is_kept(running: Callable[..., Running]) -> None:
    with closing(running().http()) as connection:
        for _ in range(3):
            connection.request("POST", "/v1/predict?stream=a", DIGITS, {"Content-Type": NPY})
            response = connection.getresponse()
            assert response.status == 200
            assert len(json.loads(response.read())["predictions"]) == 2
            assert response.getheader("server") is None


def test_a_large_body_is_refused_before_it_is_read(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running(max_body=1_000)
    with server.connect() as connection:  # it says how much it would send, and waits
        connection.sendall(head(10**9, "Expect: 100-continue"))
        status, headers, content = answered(connection)
        assert (status, content["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"
        assert connection.recv(1) == b""
    # Half a second may be too short for a busy machine; the rest would meet a closed connection.
    monkeypatch.setattr("ttapca.serving.http_app.DISCARD_SECONDS", PATIENCE)
    with server.connect() as connection:  # it sends all, and then looks
        connection.sendall(head(10**6) + bytes(10**6))
        assert answered(connection)[0] == 413
    monkeypatch.setattr("ttapca.serving.http_app.DISCARD_SECONDS", 0.1)
    with server.connect() as connection:  # it sends some, and waits
        connection.sendall(head(10**9) + bytes(10))
        status, headers, _ = answered(connection)
        assert (status, headers["connection"]) == (413, "close")
    until(lambda: not server.server.service.running)
    assert server.server.service._bodies.size == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",  # a client that speaks TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000,
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(sent: bytes, running: Callable[..., Running]) -> None:
    server = running()
    with server.connect() as connection:
        connection.sendall(sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    with closing(server.http()) as client:
        client.request("GET", "/healthz")
        assert client.getresponse().status == 200


def test_a_head_that_does_not_end_is_not_waited_for(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.0)
    server = running()
    with server.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert connection.recv(1) == b""  # the server closes it


def test_a_request_that_runs_is_not_taken_for_a_slow_head(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.0)
    server = running()
    with server.connect() as connection:
        connection.sendall(head(len(DIGITS)))
        until(lambda: server.server.service.running)
        for _ in range(3):
            server.server._close_connections()
        connection.sendall(DIGITS)
        assert answered(connection)[0] == 200


def test_a_client_that_goes_away_leaves_nothing(running: Callable[..., Running]) -> None:
    server = running()
    service = server.server.service
    with server.connect() as connection:
        connection.sendall(head(len(DIGITS)) + DIGITS[:50])
        until(lambda: service.running)
    until(lambda: not service.running)
    assert service._bodies.size == 0
    assert service.pool.names() == []
    assert b'ttapca_refused_total{code="disconnected"} 1.0' in generate_latest(
        service.metrics.registry
    )


def healthy(connection: socket.socket) -> bool:
    """Ask on a connection whether the service runs; False if it was closed."""
    try:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers, _ = answered(connection)
    except (ConnectionError, http.client.HTTPException):
        return False
    return status == 200 and "x-request-id" in headers


def test_of_too_many_connections_those_without_a_request_are_closed(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 4)
    server = running()
    connections = server.server.server_state.connections
    with ExitStack() as opened:

        def connect() -> socket.socket:
            count = len(connections)
            made = opened.enter_context(server.connect())
            until(lambda: len(connections) > count)
            server.server._close_connections()  # sees it; those that come later wait less
            return made

        camera, half = connect(), connect()
        assert healthy(camera)
        half.sendall(head(len(DIGITS)))
        until(lambda: server.server.service.running)
        idle = [connect() for _ in range(2)]
        for _ in range(2):
            new = opened.enter_context(server.connect())
            assert idle.pop(0).recv(1) == b""  # the one that waits for longest makes room
            until(lambda: len(connections) == 4)
            server.server._close_connections()
            idle.append(new)
        assert all(healthy(each) for each in (camera, *idle))  # as JSON, as ever
        half.sendall(DIGITS)
        assert answered(half)[0] == 200
        assert healthy(half)


def test_many_halves_of_bodies_make_room_before_a_new_connection_does(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DrainingServer(serving().service)
    closed: list[str] = []

    class Fake(SimpleNamespace):
        __hash__ = object.__hash__

    def connection(name: str, cycle: Any) -> Fake:
        return Fake(cycle=cycle, transport=SimpleNamespace(abort=lambda: closed.append(name)))

    def body(*, comes: bool, answered: bool = False) -> SimpleNamespace:
        return SimpleNamespace(more_body=comes, response_complete=answered)

    halves = [connection(name, body(comes=True)) for name in ("half", "another half")]
    idle = connection("idle", body(comes=False, answered=True))
    works = connection("works", body(comes=False))
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 1e9)
    for each in (halves[0], idle, works, halves[1], connection("new", None)):
        server.server_state.connections.add(each)
        server._close_connections()  # sees it; those that come later wait less
    for most, last in ((4, "half"), (3, "another half"), (2, "new"), (1, "idle"), (0, "idle")):
        monkeypatch.setattr(http_server, "MOST_CONNECTIONS", most)
        closed.clear()
        server._close_connections()
        assert closed[-1] == last


def test_a_second_signal_ends_it_at_once(running: Callable[..., Running]) -> None:
    server = running()
    with server.connect() as connection:
        connection.sendall(head(100))
        until(lambda: server.server.service.running)
        server.server.handle_exit(signal.SIGINT, None)
        assert server.server.service.draining
        server.end(signal.SIGINT)
        assert server.server.signal == signal.SIGINT


def test_requests_that_never_end_are_given_up(running: Callable[..., Running]) -> None:
    server = running()
    server.server.grace = 0.1
    with server.connect() as connection:
        connection.sendall(head(100))
        until(lambda: server.server.service.running)
        server.end()


def test_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "127.9.9.9")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "no.such.host.invalid", "")] == [False] * 3
    with listen("127.0.0.1", 0) as listening:
        host, port = listening.getsockname()
        assert url_of(listening) == f"http://{host}:{port}"
        assert listening.proto == socket.IPPROTO_TCP  # else every answer takes 40 ms
        with pytest.raises(OptionError, match=f"127.0.0.1, port {port}: .* another port"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6() -> None:
    try:
        listening = listen("::1", 0)
    except OptionError:
        pytest.skip("this machine has no IPv6 address of its own")
    with listening:
        assert url_of(listening).startswith("http://[::1]:")
        assert is_loopback("[::1]")


def test_sigterm_answers_what_runs_saves_and_ends(filter_folder: Path, tmp_path: Path) -> None:
    """The command itself, as systemd starts and stops it."""
    words = f"digits --filter {filter_folder} --state streams.sqlite --log-json"
    with started(words, tmp_path) as (process, port):

        def connect() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

        def ask(request: bytes) -> tuple[int, dict[str, str], Any]:
            with connect() as connection:
                connection.sendall(request)
                return answered(connection)

        ready = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert ask(ready)[0] == 200
        with connect() as half:
            half.sendall(head(len(DIGITS)) + DIGITS[:50])
            # The next answer shows that the loop has seen the first half.
            assert ask(ready)[0] == 200
            process.send_signal(signal.SIGTERM)
            until(lambda: ask(ready)[0] == 503)
            status, headers, content = ask(head(len(DIGITS)) + DIGITS)
            assert (status, content["error"]["code"]) == (503, "closing")
            assert "retry-after" in headers
            half.sendall(DIGITS[50:])
            status, _, content = answered(half)
            assert (status, len(content["predictions"])) == (200, 2)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {"POST", "GET"} == {line["method"] for line in lines if "method" in line}
    assert_kept(tmp_path)


def assert_kept(folder: Path) -> None:
    """Check that the stream `a` was saved."""
    with StreamStore(folder / "streams.sqlite") as store:
        assert store.names() == ["a"]
        assert store.read("a")


def begin_stream(port: int) -> None:
    """Send the first images of the stream `a`."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(head(len(DIGITS)) + DIGITS)
        assert answered(connection)[0] == 200


@contextmanager
def full_pipe() -> Iterator[int]:
    """Yield the end of a pipe that nobody reads and that takes no more."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(1))
        os.set_blocking(writing, True)
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_a_log_that_nobody_reads_keeps_no_stream_from_being_saved(
    filter_folder: Path, tmp_path: Path
) -> None:
    words = f"digits --filter {filter_folder} --state streams.sqlite --save-every 1000"
    with full_pipe() as stderr, started(words, tmp_path, stderr=stderr) as (process, port):
        begin_stream(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert_kept(tmp_path)


# A pool that gets another signal when it is about to save.
INTERRUPTED = """
import signal
from ttapca.cli import main
from ttapca.serving import StreamPool
close = StreamPool.close
def interrupted(pool):
    signal.raise_signal(signal.{name})
    close(pool)
StreamPool.close = interrupted
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_another_signal_does_not_cut_saving_short(
    name: str, code: int, filter_folder: Path, tmp_path: Path
) -> None:
    words = f"digits --filter {filter_folder} --state streams.sqlite --save-every 1000"
    program = ("-c", INTERRUPTED.format(name=name))
    with started(words, tmp_path, program=program) as (process, port):
        begin_stream(port)
        process.send_signal(signal.Signals[name])
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert_kept(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_signals_do_what_they_did_before_once_all_is_over(serving: Serving) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    with signals_put_back(), listen("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        threading.Thread(target=end_what_runs_here, args=address).start()
        assert http_server.serve(serving().service, listening) == signal.SIGTERM
        assert all(now != then for now, then in zip(handlers(), before, strict=True))
    assert handlers() == before


def end_what_runs_here(host: str, port: int) -> None:
    """Wait for a server of this process, and send it the signal to end."""
    with closing(http.client.HTTPConnection(host, port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/readyz")
        connection.getresponse()
    os.kill(os.getpid(), signal.SIGTERM)
