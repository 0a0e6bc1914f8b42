"""How often a token may come, how many streams it may begin, and what limits may be."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.clients import token
from ttapca.errors import OptionError, TooManyStreamsError
from ttapca.serving.limits import RequestLimits, RequestRate, StreamQuotas


@given(st.integers(1, 20), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_no_stretch_of_time_has_too_many(rate: int, pauses: list[int]) -> None:
    """In any stretch of t seconds at most rate * (t + 1) are let in, and no fewer than must be."""
    now, admitted = 0.0, []
    limiter = RequestRate(rate, clock=lambda: now)
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
    with pytest.raises(OptionError, match="`requests_per_second` must be a finite number above 0"):
        RequestRate(0)


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


def test_a_token_begins_as_many_streams_as_it_may() -> None:
    names = ["shop.a", "hall.x"]
    shop = token("shop", "predict", max_streams=3)

    async def begin(quotas: StreamQuotas, *streams: str, fail: bool = False) -> None:
        async with quotas.beginning(shop, streams[0]):
            if len(streams) > 1:
                await begin(quotas, *streams[1:], fail=fail)
            if fail:
                raise KeyError(streams)

    async def play() -> None:
        quotas = StreamQuotas(lambda: list(names))
        with pytest.raises(TooManyStreamsError, match="`shop` may have 3 streams"):
            await begin(quotas, "shop.b", "shop.c", "shop.d")  # none of them has ended
        with pytest.raises(KeyError, match="shop"):
            await begin(quotas, "shop.b", "shop.c", fail=True)
        await begin(quotas, "shop.d", "shop.d", "shop.a")
        names.append("shop.d")
        await begin(quotas, "shop.e")
        names.append("shop.e")
        with pytest.raises(TooManyStreamsError, match="Delete one"):
            await begin(quotas, "shop.f")
        await begin(quotas, "shop.a")  # it is there already
        names.remove("shop.d")  # deleted in some way
        await begin(quotas, "shop.f")

    asyncio.run(play())


def test_a_stream_of_a_request_that_failed_late_counts() -> None:
    """It may have begun: the pool goes on with what it was given when nobody waits any more."""
    shop = token("shop", "predict", max_streams=1)

    names: list[str] = []
    quotas = StreamQuotas(lambda: list(names))

    async def begin(stream: str) -> None:
        async with quotas.beginning(shop, stream):
            names.append(stream)
            raise KeyError("too late")

    async def play() -> None:
        with pytest.raises(KeyError, match="too late"):
            await begin("shop.a")
        with pytest.raises(TooManyStreamsError, match="`shop` may have 1 streams"):
            await begin("shop.b")

    asyncio.run(play())


def test_a_stream_that_begins_while_others_are_counted_counts() -> None:
    shop = token("shop", "predict", max_streams=1)
    counted, begun = threading.Event(), threading.Event()

    def names() -> list[str]:
        if counted.is_set():  # for the second time: nothing is there yet, and it takes a while
            assert begun.wait(60)
        return []

    async def begin(quotas: StreamQuotas, stream: str) -> None:
        async with quotas.beginning(shop, stream):
            pass

    async def play() -> None:
        quotas = StreamQuotas(names)
        async with quotas.beginning(shop, "shop.a"):
            counted.set()
            other = asyncio.create_task(begin(quotas, "shop.b"))
            await asyncio.sleep(0.1)  # it is counting
        begun.set()
        with pytest.raises(TooManyStreamsError, match="`shop` may have 1 streams"):
            await other

    asyncio.run(play())
