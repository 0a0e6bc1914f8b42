from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serving.scripted_server import Asked, Reply, prediction, refusal, reply, scripted
from ttapca.errors import FeedError, OptionError
from ttapca.serving.feeding import ServerClient

IMAGES = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)


class Waiting:
    """Stands for time and for the event that ends it: waiting takes none."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, []  # type: ignore[var-annotated]
        self.ends = False  # whether somebody sets the event meanwhile

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.now += seconds
        return self.ends


def client(url: str, **options: Any) -> tuple[ServerClient, Waiting]:
    time: Any = Waiting()
    return ServerClient(url, stopped=time, clock=time, **options), time


def in_turn(*answers: Reply) -> Any:
    left: Iterator[Reply] = iter(answers)
    return lambda asked: next(left)


def test_images_arrive_as_they_are_with_the_token() -> None:
    with scripted(lambda asked: prediction([3])) as server:
        ours, _ = client(f"{server.url}/", token="a-secret-word")
        answer = ours.predict("hall 1/door", IMAGES)
        ours.info()
    assert answer["predictions"][0]["class"] == 3
    first, second = server.asked
    assert (first.method, first.path) == ("POST", "/v1/predict?stream=hall%201%2Fdoor")
    assert first.headers["Content-Type"] == "application/x-npy"
    assert np.array_equal(first.images, IMAGES)
    assert (second.method, second.path) == ("GET", "/v1/info")
    assert {each.headers["Authorization"] for each in server.asked} == {"Bearer a-secret-word"}
    assert "a-secret-word" not in repr(ours)


def test_it_waits_as_long_as_the_server_says() -> None:
    answers = in_turn(
        refusal(503, Retry_After="3"),
        refusal(429, Retry_After="2"),
        refusal(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        refusal(502),
        prediction([1]),
    )
    with scripted(answers) as server:
        ours, time = client(server.url)
        assert ours.predict("a", IMAGES)["adapted"]
    assert ours.retries == 4
    assert time.waited[:2] == [3, 2]
    assert all(0 < seconds <= 5 for seconds in time.waited[2:])
    assert len(server.asked) == 5


def test_patience_ends() -> None:
    with scripted(lambda asked: refusal(503, "The queue is full.", Retry_After="4")) as server:
        ours, time = client(server.url, patience=10.0)
        with pytest.raises(FeedError, match="refuses with 503: The queue is full"):
            ours.predict("a", IMAGES)
    assert time.waited == [4, 4]


def test_who_stops_waiting_asks_no_more() -> None:
    with scripted(lambda asked: refusal(503, Retry_After="4")) as server:
        ours, time = client(server.url)
        time.ends = True
        with pytest.raises(FeedError, match="refuses with 503"):
            ours.predict("a", IMAGES)
    assert len(server.asked) == 1


def test_a_token_is_sent_as_the_server_hashes_it() -> None:
    with scripted(lambda asked: prediction([3])) as server:
        ours, _ = client(server.url, token="ein-Schlüssel-für-später-Å")
        ours.info()
    sent = server.asked[0].headers["Authorization"].encode("latin-1")  # as http.server decodes it
    assert sent == "Bearer ein-Schlüssel-für-später-Å".encode()


@pytest.mark.parametrize("token", ["a secret\n", "a\rb", "\0"])
def test_tokens_that_no_header_can_hold(token: str) -> None:
    with pytest.raises(OptionError, match="A token is one line of text") as caught:
        ServerClient("http://host", token)
    assert token not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as taken:  # it stays taken, so that nobody else listens there meanwhile
        taken.bind(("127.0.0.1", 0))
        ours, time = client(f"127.0.0.1:{taken.getsockname()[1]}", patience=3.0)
        with pytest.raises(FeedError, match="cannot be reached: connection refused"):
            ours.info()
    assert time.waited == sorted(time.waited)
    assert 2 < sum(time.waited) <= 3


def test_a_connection_that_breaks_is_opened_again() -> None:
    def answer(asked: Asked) -> Reply:
        if len(server.asked) == 1:
            raise ConnectionResetError  # closes the connection without an answer
        return prediction([1])

    with scripted(answer) as server:
        ours, _ = client(server.url)
        assert ours.predict("a", IMAGES)["predictions"][0]["class"] == 1
    assert ours.retries == 1


@pytest.mark.parametrize(
    ("answer", "token", "complaint"),
    [
        (refusal(401), None, "asks for a token. Give one with --token"),
        (refusal(401), "mine", "refuses this token. Give one with --token"),
        (refusal(403, "Reading only."), "mine", "refuses with 403: Reading only."),
        (refusal(422, "x" * 9000), None, f"422: {'x' * 500}$"),
        ((500, {}, b"<html>"), None, "refuses with 500: Internal Server Error"),
        ((404, {}, b"[1]"), None, "refuses with 404: Not Found"),
        ((200, {}, b"<html>"), None, "answers with something else"),
        (reply([1]), None, "answers with something else"),
    ],
)
def test_what_is_final_is_said_at_once(answer: Reply, token: str | None, complaint: str) -> None:
    with scripted(lambda asked: answer) as server:
        ours, time = client(server.url, token=token)
        with pytest.raises(FeedError, match=complaint) as caught:
            ours.predict("a", IMAGES)
    assert time.waited == []
    assert "mine" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://host", "http://", "http://host:port", "http://host:0", "http://a?b", "a@b"),
        *("http://[::1", "http://a]b"),
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(OptionError, match="A server has an address such as http"):
        ServerClient(url)
