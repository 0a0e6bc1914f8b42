"""Which limits are possible."""

from __future__ import annotations

import pytest

from ttapca.errors import OptionError
from ttapca.serving.limits import RequestLimits


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
