from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.corruptions import CORRUPTIONS
from ttapca.errors import OptionError
from ttapca.serving.feed_schedule import Step, parse_schedule, parse_seconds

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
