"""`ttapca feed` as a user types it, against a server that a test scripts."""

from __future__ import annotations

import json
import socket

import pytest

from serving.scripted_server import INFO, Asked, Reply, prediction, refusal, scripted
from ttapca.serving.feeding import Feeder

FAST = "--rate 100000 --data digits --order stored"


def answer(asked: Asked) -> Reply:
    return INFO if asked.path == "/v1/info" else prediction([0] * len(asked.images))


def test_it_prints_what_was_right_under_each_condition(command) -> None:
    with scripted(answer) as server:
        words = '--schedule "clean 100 images, fog:2 20 images" --batch 25 --limit 50'
        said = command(f"feed {server.url} {FAST} {words}")
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["stream", "condition", "mode", "images", "right", "adapted"]
    clean, fog = lines[1:]
    assert clean[:4] == ["camera-1", "clean", "on", "100"]
    assert fog[:4] == ["camera-1", "fog:2", "on", "20"]
    assert clean[-2:] == ["100.0", "%"]
    assert "the first 50 of 596 samples of `digits`" in said.err
    assert "(scripted)" in said.err
    assert "camera-1: fog:2" in said.err


def test_many_streams_and_json(command) -> None:
    with scripted(answer) as server:
        words = '--stream door --streams 3 --schedule "clean 4 images" --schedule "fog 6 images"'
        said = command(f"feed {server.url} {FAST} {words} --json --stagger 0.01s")
    found = json.loads(said.out)
    told = [(each["stream"], each["condition"], each["images"]) for each in found]
    assert told == [("door-1", "clean", 4), ("door-2", "fog:5", 6), ("door-3", "clean", 4)]
    assert {asked.path.partition("=")[2] for asked in server.asked[1:]} == {
        "door-1",
        "door-2",
        "door-3",
    }


def test_the_token_comes_from_the_command_line_or_the_environment(
    command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTAPCA_TOKEN", "from-the-environment")
    for words, token in (("", "from-the-environment"), ("--token given", "given")):
        with scripted(answer) as server:
            command(f'feed {server.url} {FAST} --schedule "clean 1 images" {words}')
        assert {each.headers["Authorization"] for each in server.asked} == {f"Bearer {token}"}


def test_what_does_not_fit_exits_with_2(command) -> None:
    content = {"model": "cifar10", "classes": [], "input_shape": [3, 32, 32]}
    with scripted(lambda asked: (200, {}, json.dumps(content).encode())) as server:
        said = command(f"feed {server.url} {FAST}", code=2)
    assert "takes images of 3x32x32; these are 1x8x8" in said.err
    assert "--size N" in said.err


def test_a_server_that_refuses_or_is_not_there_exits_with_1(command) -> None:
    with scripted(lambda asked: refusal(401)) as server:
        assert "asks for a token" in command(f"feed {server.url} {FAST}", code=1).err
    with socket.socket() as taken:  # it stays taken, so that nobody else listens there meanwhile
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = command(f"feed {url} {FAST} --wait 0s", code=1)
    assert f"error: {url} cannot be reached: connection refused" in said.err
    assert said.out == ""


def test_what_was_found_is_printed_also_when_the_server_goes_away(command) -> None:
    def gone(asked: Asked) -> Reply:
        return answer(asked) if len(server.asked) < 6 else refusal(500, "Broken.")

    with scripted(gone) as server:
        said = command(f'feed {server.url} {FAST} --schedule "clean 50 images"', code=1)
    assert "refuses with 500: Broken." in said.err
    assert said.out.splitlines()[1].split()[:4] == ["camera-1", "clean", "on", "4"]


def test_ctrl_c_ends_with_a_summary(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def running(feeder: Feeder, seconds: float) -> bool:
        while feeder.streams[0].sent < 3:
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(Feeder, "running", running)
    with scripted(answer) as server:
        said = command(f'feed {server.url} {FAST} --schedule "clean 3 images" --loop', code=130)
    assert said.err.endswith("interrupted\n")
    assert said.out.splitlines()[1].split()[:2] == ["camera-1", "clean"]
