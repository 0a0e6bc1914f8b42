from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scripted_server import Asked, Reply, prediction, refusal, reply, scripted
from serving.servers import PATIENCE
from ttapca.benchmark.subject import ImageSource
from ttapca.corruptions import CORRUPTIONS
from ttapca.datasets import Images, choose, read_digits
from ttapca.errors import DataNotFoundError, FeedError, OptionError
from ttapca.serving import feeding
from ttapca.serving.feeding import (
    FedStream,
    Feeder,
    ServerClient,
    Step,
    StreamPlan,
    Tally,
    check_fits,
    parse_schedule,
    parse_seconds,
)

DIGITS = read_digits()[:60]
FAST = 100_000.0  # images a second: nothing waits


def plan(text: str, name: str = "camera-1", **options: Any) -> StreamPlan:
    return StreamPlan(name, parse_schedule(text), **options)


def feeder(url: str, *plans: StreamPlan, data: Images = DIGITS, **pace: Any) -> Feeder:
    return Feeder(data, plans, ServerClient(url, patience=0), rate=FAST, **pace)


def play(found: Feeder) -> None:
    with found:
        while found.running(0.05):
            pass


def always(answer: int) -> Any:
    return lambda asked: prediction([answer] * len(asked.images))


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_images_are_sent_in_order_and_corrupted_as_in_the_benchmark(order: Any) -> None:
    with scripted(always(4)) as server:
        found = feeder(
            server.url,
            plan("clean 50 images, frost:3 21 images, clean 4 images", seed=7),
            batch=8,
            order=order,
        )
        play(found)
    sent = [asked.images for asked in server.asked]
    assert [len(each) for each in sent] == [8, 8, 8, 8, 8, 8, 2, 8, 8, 5, 4]
    # The whole data set as the benchmark corrupts it; a second round begins after 60 images.
    rows = np.concatenate([choose(DIGITS.labels, order=order, seed=7 + n).rows for n in range(2)])
    frosty = ImageSource(DIGITS).images([("frost", 3)]).images
    expected = np.concatenate(
        [DIGITS.images[rows[:50]], frosty[rows[50:71]], DIGITS.images[rows[71:75]]]
    )
    assert np.array_equal(np.concatenate(sent), expected)
    (stream,) = found.streams
    labels = DIGITS.labels[rows]
    clean, frost = stream.totals["clean", "on"], stream.totals["frost:3", "on"]
    assert (clean.images, frost.images, stream.sent) == (54, 21, 75)
    assert frost.right == int((labels[50:71] == 4).sum())
    assert clean.right == int((labels[:50] == 4).sum() + (labels[71:75] == 4).sum())
    assert clean.adapted == 54
    assert stream.current is not None
    assert stream.current.images == 4  # since the last condition began
    assert stream.finished
    assert stream.health["mode"] == "on"


def test_streams_do_not_wait_for_each_other() -> None:
    gate, reached = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Reply:
        if asked.path.endswith("slow"):
            reached.set()
            assert gate.wait(PATIENCE)
        return prediction([0] * len(asked.images))

    slow, quick = plan("clean 3 images", "slow"), plan("clean 30 images", "quick", seed=1000)
    with scripted(answer) as server, feeder(server.url, slow, quick) as found:
        assert reached.wait(PATIENCE)
        while not found.streams[1].finished:
            assert found.running(0.02)
        assert found.streams[0].sent == 0
        gate.set()
        while found.running(0.02):
            pass
    assert [stream.sent for stream in found.streams] == [3, 30]


def test_a_loop_goes_on_until_it_is_stopped() -> None:
    with scripted(always(0)) as server, feeder(server.url, plan("fog 2 images"), loop=True) as two:
        while two.streams[0].sent < 11:
            assert two.running(0.01)
    assert not two.streams[0].finished
    assert list(two.streams[0].totals) == [("fog:5", "on")]
    count = len(server.asked)
    assert count >= 11
    assert not two.running(0)


def test_the_first_answer_is_no_switch() -> None:
    stream = FedStream(plan("clean 12 images"))
    step = stream.plan.schedule[0]
    begun = stream.current = Tally(step)
    answer = {"predictions": [{"class": 0}], "adapted": False, "mode": "shadow", "health": {}}
    stream.count(step, np.array([0]), answer)
    assert stream.current is begun
    assert (begun.mode, begun.images) == ("shadow", 1)


def test_what_comes_after_a_switch_is_counted_by_itself() -> None:
    def answer(asked: Asked) -> Reply:
        return prediction([0], mode="off" if 5 < len(server.asked) <= 9 else "on")

    with scripted(answer) as server:
        found = feeder(server.url, plan("clean 12 images"))
        play(found)
    (stream,) = found.streams
    assert {key: tally.images for key, tally in stream.totals.items()} == {
        ("clean", "on"): 8,
        ("clean", "off"): 4,
    }
    assert stream.current is not None
    assert (stream.current.mode, stream.current.images) == ("on", 3)


def test_a_delay_is_waited_for_and_can_be_ended() -> None:
    with scripted(always(0)) as server, feeder(server.url, plan("fog 2 images", delay=900)) as late:
        assert late.running(0.05)
        assert late.streams[0].current is None
    assert not late.running(0)
    assert server.asked == []


def test_time_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "LATE", 0.02)
    gate = threading.Event()

    def answer(asked: Asked) -> Reply:
        gate.wait(0.2)  # longer than a stream tries to make up for
        gate.set()
        return prediction([0])

    with scripted(answer) as server:
        found = feeder(server.url, plan("clean 3 images"))
        play(found)
    assert found.streams[0].late > 0.02
    assert found.streams[0].sent == 3


def test_a_refusal_ends_it() -> None:
    with (
        scripted(lambda asked: refusal(422, "Too large.")) as server,
        pytest.raises(FeedError, match="refuses with 422: Too large"),
    ):
        play(feeder(server.url, plan("clean 3 images")))


def test_a_stream_that_fails_while_it_is_looked_at_is_not_taken_for_finished() -> None:
    answered = threading.Event()

    def answer(asked: Asked) -> Reply:
        assert answered.wait(PATIENCE)
        return refusal(422, "Too large.")

    class Looked(list[FedStream]):
        """Once all streams were looked at, the one fails."""

        def __iter__(self) -> Iterator[FedStream]:
            yield from super().__iter__()
            answered.set()
            found._threads[0].join(PATIENCE)

    with scripted(answer) as server, feeder(server.url, plan("clean 3 images")) as found:
        found.streams = Looked(found.streams)
        assert found.running(0)
        with pytest.raises(FeedError, match="refuses with 422"):
            found.running(0)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"predictions": [{"class": 1}], "adapted": True},
        {"predictions": [], "adapted": True, "mode": "on", "health": {}},
        {"predictions": [1], "adapted": True, "mode": "on", "health": {}},
        {"predictions": [{"class": 1}], "adapted": True, "mode": "on", "health": 3},
    ],
)
def test_an_answer_of_something_else(content: Any) -> None:
    with (
        scripted(lambda asked: reply(content)) as server,
        pytest.raises(FeedError, match="answers with a class for each image"),
    ):
        play(feeder(server.url, plan("clean 3 images")))


def test_mistakes_are_found_before_anything_is_sent(tmp_path: Any) -> None:
    two = [plan("clean 1s"), plan("fog 1s")]
    with pytest.raises(OptionError, match="Every stream needs a name of its own"):
        feeder("http://127.0.0.1:1", *two)
    colour = Images(np.zeros((1, 64, 64, 3), np.uint8), np.zeros(1, np.int64), ("a",))
    client = ServerClient("http://127.0.0.1:1")
    with pytest.raises(DataNotFoundError, match="frost"):
        Feeder(colour, [plan("frost 1s")], client, textures=tmp_path)
    for options, complaint in (({"rate": 0.0}, "rate"), ({"batch": 0}, "batch")):
        with pytest.raises(OptionError, match=f"`{complaint}`"):
            Feeder(DIGITS, [plan("fog 1s")], client, **options)


def test_what_does_not_fit_the_server() -> None:
    names = list(DIGITS.class_names)
    with pytest.raises(OptionError, match=r"takes images of 3x32x32; these are 1x8x8"):
        check_fits({"input_shape": [3, 32, 32], "classes": names}, DIGITS)
    check_fits({"input_shape": [1, 8, 8], "classes": names}, DIGITS)
    check_fits({}, DIGITS)


# Schedules

STEPS = st.one_of(
    st.tuples(st.just("clean"), st.just(0)),
    st.tuples(st.sampled_from(CORRUPTIONS), st.integers(1, 5)),
)


@given(st.lists(st.tuples(STEPS, st.integers(1, 10**6)), min_size=1, max_size=5), st.data())
def test_what_is_written_is_read(
    steps: list[tuple[tuple[str, int], int]], data: st.DataObject
) -> None:
    words, expected = [], []
    for (corruption, severity), amount in steps:
        unit, scale = data.draw(st.sampled_from([("s", 1), ("m", 60), ("h", 3600), (" images", 0)]))
        condition = f"{corruption}:{severity}" if severity else corruption
        words.append(f"{condition} {min(amount, 10**5)}{unit}")
        counted = "seconds" if scale else "images"
        expected.append(Step(corruption, severity, min(amount, 10**5) * (scale or 1), counted))
        assert expected[-1].title == condition
    assert parse_schedule(" , ".join(words)) == tuple(expected)


def test_a_condition_lasts_so_many_images() -> None:
    short, long, counted = parse_schedule("fog 0.001s, fog 1.5m, fog:1 7 images")
    assert [step.images(rate=10) for step in (short, long, counted)] == [1, 900, 7]
    assert [step.severity for step in (short, long, counted)] == [5, 5, 1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "A schedule has conditions"),
        ("clean", "found `clean`"),
        ("clean 20s,", "found `clean 20s,`"),
        ("clean 20", "found `clean 20`"),
        ("clean 20 days", "found `clean 20 days`"),
        ("clean -5s", "found `clean -5s`"),
        ("clean 0s", "lasts longer than nothing"),
        ("clean 999999999h", "not for ever"),
        ("clean:3 20s", "Clean images have no severity"),
        ("fog:6 20s", "A severity is from 1 to 5"),
        ("fog:x 20s", "A severity is from 1 to 5"),
        ("fogg 20s", "Did you mean `fog`"),
    ],
)
def test_other_schedules_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        parse_schedule(text)


def test_durations() -> None:
    found = [parse_seconds(text, "--wait") for text in ("5", " 5s ", "0.5m", "2 h")]
    assert found == [5, 5, 30, 7200]
    for text in ("", "soon", "-1s", "1d", "nan"):
        with pytest.raises(OptionError, match="--wait takes a duration such as 5s"):
            parse_seconds(text, "--wait")
