from __future__ import annotations

import itertools
import shlex

from hypothesis import given
from hypothesis import strategies as st

from ttapca.benchmark.commands import LISTS, condensed

AXES = {"--corruptions": "xyz", "--methods": "ab", "--settings": "st", "--seeds": "01"}
Point = tuple[str, ...]
POINTS = sorted(itertools.product(*AXES.values()))


def command(point: Point) -> str:
    options = " ".join(f"{name} {value}" for name, value in zip(AXES, point, strict=True))
    return f"ttapca bench 'my model' {options} --to r"


def cells(text: str) -> list[Point]:
    """What `ttapca bench` would run: every combination of the lists."""
    words = shlex.split(text)
    return list(itertools.product(*(words[words.index(name) + 1].split(",") for name in AXES)))


@given(st.lists(st.sampled_from(POINTS), unique=True))
def test_no_cell_is_lost_added_or_run_twice(points: list[Point]) -> None:
    ran = [each for text in condensed(map(command, points)) for each in cells(text)]
    assert sorted(ran) == sorted(points)


def test_a_whole_grid_is_one_command() -> None:
    assert set(AXES) <= set(LISTS)
    (text,) = condensed(map(command, POINTS))
    lists = "--corruptions x,y,z --methods a,b --settings s,t --seeds 0,1"
    assert text == f"ttapca bench 'my model' {lists} --to r"


def test_streams_that_share_their_adaptation_are_not_put_together() -> None:
    first, second = (f"b --corruptions {each} --settings continual" for each in ("x,y", "x,z"))
    assert condensed([first, second, first]) == [first, second]


def test_what_is_no_command_stays_as_it_is() -> None:
    odd = ["it's", "", "ttapca bench --seeds", "ttapca demo"]
    assert condensed([*odd, *odd]) == odd
