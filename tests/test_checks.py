"""The checks of values and of files from elsewhere: rules, bounded parsing, messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca._checks import (
    FLAG,
    MEASURED,
    Either,
    ListOf,
    Maybe,
    Number,
    OneOf,
    Plain,
    Record,
    Rule,
    Such,
    Text,
    Whole,
    blob,
    conform,
    shown,
)
from ttapca.errors import DataFormatError, did_you_mean
from ttapca.support.parsing import parse_json, parse_toml

HUGE = 10**5000
NESTED: Any = []
for _ in range(10_000):
    NESTED = [NESTED]
RULES: list[Rule] = [
    Whole(1, 5),
    Number(0, 1),
    MEASURED,
    Text(10),
    FLAG,
    blob(10),
    OneOf(("one", "two")),
    Maybe(Whole()),
    ListOf(Whole(), 1, 3),
    Record({"a": Whole()}, {"b": Text()}),
    Record(others=Plain()),
    Such(Whole(), lambda value: value % 2 == 0, "even"),
    Either((Whole(), Text()), "a number or text"),
    Plain(),
]


@pytest.mark.parametrize(
    ("value", "rule", "message"),
    [
        (0, Whole(1), "file: the content must be a whole number from 1 on; found 0"),
        (9, Whole(1, 5), "a whole number from 1 to 5; found 9"),
        (True, Whole(), "a whole number from 0 on; found True"),
        (1.0, Whole(), r"a whole number .*; found 1\.0"),
        (float("nan"), Number(), "a finite number; found nan"),
        (float("inf"), Number(0), "a finite number from 0 on; found inf"),
        (2, Number(0, 1), "a finite number from 0 to 1; found 2"),
        ("1", Number(), "a finite number; found '1'"),
        (False, MEASURED, "a number; found False"),
        (3, Text(), "text; found 3"),
        ("x" * 11, Text(10), "text of at most 10 characters; found 11"),
        ("\ud800", Text(), "text that UTF-8 can write"),
        (1, FLAG, "true or false; found 1"),
        ("x", blob(10), "at most 10 bytes; found 'x'"),
        ("tow", OneOf(("one", "two")), "one of one, two; found 'tow'. Did you mean `two`?"),
        (["one"], OneOf(("one",)), r"one of one; found \['one'\]\.$"),
        ("x", Maybe(Whole()), "a whole number"),
        ({}, ListOf(Whole()), "a list; found {}"),
        ([1], ListOf(Whole(), 2, 3), "a list of 2 to 3 entries; found 1"),
        ([1], ListOf(Whole(), 3, 3), "a list of 3 entries; found 1"),
        ([1, [2, "x"]], ListOf(Either((Whole(),), "whole")), r"`\[1\]` must be whole"),
        ([], Record(), r"an object: names with values; found \[\]"),
        ({}, Record({"a": Whole()}), "an object with `a`; found none of that name"),
        (
            {"ab": 1},
            Record(optional={"abc": Whole()}),
            "no names but abc; found 'ab'. Did you mean",
        ),
        ({"a": {"b": [0]}}, Record({"a": Record({"b": ListOf(Whole(1))})}), r"`a\.b\[0\]` must be"),
        ({1: 2}, Record(others=Plain()), "`a name` must be text; found 1"),
        ({str(n): n for n in range(9)}, Record(others=Plain(), most=8), "at most 8 names; found 9"),
        (3, Such(Whole(), lambda value: value % 2 == 0, "even"), "must be even; found 3"),
        (NESTED, Plain(), "a plain value, not nested too deep"),
        ({1, 2}, Plain(), "a plain value"),
        (float("inf"), Plain(), "a finite number"),
    ],
)
def test_a_rule_that_is_broken(value: Any, rule: Rule, message: str) -> None:
    with pytest.raises(DataFormatError, match=message):
        conform(value, rule, "file", DataFormatError)


@pytest.mark.parametrize("rule", [Whole(), Number(high=1), Plain()])
def test_a_number_that_python_cannot_write(rule: Rule) -> None:
    with pytest.raises(DataFormatError, match="found a number of thousands of digits"):
        conform(HUGE, rule, "file", DataFormatError)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (5, Whole(1, 5)),
        (1, Number(0, 1)),
        (float("nan"), MEASURED),
        ("ünïcödé", Text(10)),
        (None, Maybe(Whole())),
        ((1, 2), ListOf(Whole(), 2, 2)),
        ({"a": 1, "c": [None, True, 1.5, "x", {"d": []}]}, Record({"a": Whole()}, others=Plain())),
    ],
)
def test_a_rule_that_is_kept(value: Any, rule: Rule) -> None:
    conform(value, rule, "file", DataFormatError)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


def message_of(call: Callable[[], object]) -> str:
    """Return the message of the error, or another sentence where there was none."""
    try:
        call()
    except DataFormatError as error:
        return str(error)
    return "the file: as it must be"


@given(value=VALUES, rule=st.sampled_from(RULES))
def test_any_value_is_kept_or_refused_by_the_given_error(value: Any, rule: Rule) -> None:
    said = message_of(lambda: conform(value, rule, "the file", DataFormatError))
    assert said.startswith("the file: ")


@given(st.text() | st.binary())
def test_any_text_is_parsed_or_refused(text: str | bytes) -> None:
    for parse in (parse_json, parse_toml):
        assert "the file" in message_of(partial(parse, text, "the file", DataFormatError))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "it is nested too deep"),
        ("[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("1" * 21, "a whole number has 21 digits"),
        ("-1e999", "not finite"),
        ("NaN", "not finite"),
        ("-Infinity", "not finite"),
        ('[{"a": 1, "a": 2}]', "the name `a` occurs twice"),
        (" " * 1_000_001, "more than 1,000,000 characters"),
        (b"\xff", "codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_json_out_of_bounds(text: str | bytes, message: str) -> None:
    with pytest.raises(DataFormatError, match=f"a.json is not JSON as we read it: .*{message}"):
        parse_json(text, "a.json", DataFormatError)


def test_nan_where_it_was_measured() -> None:
    found = parse_json("[NaN, Infinity, 0.5]", "a", DataFormatError, finite=False)
    assert found[0] != found[0]
    assert found[1:] == [float("inf"), 0.5]


def test_values_in_messages_are_short() -> None:
    assert len(shown(["x" * 1000] * 1000)) < 500
    assert len(shown(NESTED)) < 100
    assert shown(HUGE) == "a number of thousands of digits"


@pytest.mark.parametrize("name", [3, None, ["layer1"], b"layer1", "layer1" * 10_000])
def test_nothing_is_near_what_is_no_name(name: object) -> None:
    assert did_you_mean(name, ["layer1", "layer2"]) == ""
