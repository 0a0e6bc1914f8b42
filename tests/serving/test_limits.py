"""How often a token may come, and which limits are possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttapca.errors import OptionError
from ttapca.serving.limits import Rate, RequestLimits


@given(st.integers(1, 20), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_no_stretch_of_time_has_too_many(rate: int, pauses: list[int]) -> None:
    """In any stretch of t seconds at most rate * (t + 1) are let in, and no fewer than must be."""
    now, admitted = 0.0, []
    limiter = Rate(rate, clock=lambda: now)
    for pause in pauses:
        now += pause / 4  # quarters: exact in floating point
        wait = limiter.wait()
        if wait == 0:
            admitted.append(now)
            continue
        came, now = now, now + wait + 1e-9
        assert wait <= 1 / rate + 1e-9
        assert limiter.wait() == 0  # what it said was true
        admitted.append(now)
        now = max(now, came)
    for first, start in enumerate(admitted):
        for last, end in enumerate(admitted[first:], start=1):
            assert last <= rate * (end - start + 1) + 1e-6


def test_a_rate_is_above_zero() -> None:
    with pytest.raises(OptionError, match="`per_second` must be a finite number above 0"):
        Rate(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_body": 0}, "`max_body` must be a whole number from 1"),
        ({"max_body": 10, "max_held": 9}, "`max_held` must be a whole number from 10"),
        ({"max_pixels": 10**9}, "`max_pixels` must be a whole number from 1 to 50,000,000"),
        ({"answer_seconds": 0.0}, "`answer_seconds` must be a finite number above 0"),
    ],
)
def test_limits_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RequestLimits(**options)
