"""Prometheus sees what happened, in a bounded number of series."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.clients import Client, series
from serving.conftest import Serving
from ttapca.adaptation.health import Health
from ttapca.errors import UnknownStreamError
from ttapca.serving.metrics import MOST_STREAMS, REST, StreamSeries
from ttapca.serving.stream_record import StreamStatus, check_name

DIGITS = np.zeros((2, 8, 8, 1), np.uint8)


def scraped(client: Client) -> dict[str, float]:
    text = client.ask("GET", "/metrics").text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in series(text)}


def test_what_is_shown(serving: Serving) -> None:
    client = serving()
    client.predict("a", DIGITS)
    client.ask("PUT", "/v1/streams/a", json={"mode": "shadow"})
    client.predict("a", DIGITS)
    client.ask("GET", "/v1/streams/no")
    client.ask("BREW", "/nothing/of/the/kind")
    found = scraped(client)
    requests = {
        ("POST", "/v1/predict", "2xx"): 2,
        ("PUT", "/v1/streams/{name}", "2xx"): 1,
        ("GET", "/v1/streams/{name}", "4xx"): 1,
        ("other", "other", "4xx"): 1,
    }
    for (method, route, status), count in requests.items():
        labels = f'method="{method}",route="{route}",status="{status}"'
        assert found[f"ttapca_requests_total{{{labels}}}"] == count
    assert found['ttapca_request_seconds_count{route="/v1/predict"}'] == 2
    assert found['ttapca_refused_total{code="unknown_stream"}'] == 1
    assert found["ttapca_pass_images_sum"] == found["ttapca_pass_images_count"] * 2 == 4
    assert found["ttapca_pass_streams_sum"] == 2
    assert found["ttapca_queue_seconds_count"] == 2
    assert found["ttapca_queue_images"] == 0
    assert found["ttapca_streams_resident"] == found["ttapca_streams_known"] == 1
    images = {
        name: value for name, value in found.items() if name.startswith("ttapca_images_total")
    }
    assert sum(images.values()) == 4
    assert found["ttapca_resident_bytes"] > 1e6
    assert found['ttapca_service_info{model="digits",version="1.2.3"}'] == 1
    status = client.service.pool.status("a")
    assert found['ttapca_stream_images_total{stream="a"}'] == 4
    assert found['ttapca_stream_shift{stream="a"}'] == status.health.shift
    assert found['ttapca_stream_ordered{stream="a"}'] == status.health.ordered
    assert status.health.skew is None  # where the order of images is looked at
    assert 'ttapca_stream_skew{stream="a"}' not in found
    assert found['ttapca_stream_adapted_ratio{stream="a"}'] == status.adapted_share
    assert found['ttapca_stream_disagreement_ratio{stream="a"}'] == status.disagreement
    assert found['ttapca_stream_skipped_requests_total{stream="a"}'] == 0
    for old, new in (("images", "images_total"), ("disagreement", "disagreement_ratio")):
        assert (
            found[f'ttapca_stream_{old}{{stream="a"}}']
            == found[f'ttapca_stream_{new}{{stream="a"}}']
        )
    client.ask("DELETE", "/v1/streams/a")
    assert not any('stream="a"' in name for name in scraped(client))


def collected(
    told: dict[str, Health], uses: list[str], shifted: set[str]
) -> dict[str, dict[str, float]]:
    """Return the values of each family by stream, of a pool that tells these facts."""

    class Pool:
        def names(self, *, shifted: bool) -> list[str]:
            assert shifted
            return on

        def status(self, name: str) -> StreamStatus:
            if name not in told:
                raise UnknownStreamError("gone")
            return StreamStatus(
                told[name],
                (),
                mode="on",
                requests=1,
                adapted_share=0.5,
                disagreement=None,
                shifted_since=None,
                last_seen=None,
            )

    on, streams = sorted(shifted), StreamSeries()
    streams.pool = cast(Any, Pool())
    for name in uses:
        streams.used(name)
    return {
        family.name.removeprefix("ttapca_stream_"): {
            each.labels["stream"]: each.value for each in family.samples
        }
        for family in streams.collect()
    }


def test_what_nobody_can_tell_of_a_stream_is_not_shown() -> None:
    told = {
        "by-order": Health("by-order", 5, 0, shift=0.5, ordered=0.75),
        "shuffled": Health("shuffled", 7, 2, shift=0.25, skew=1.0, shifted=True),
    }
    found = collected(told, list(told), {"shuffled"})
    assert found["shifted"].pop(REST) == 0
    assert found["ordered"] == {"by-order": 0.75}
    assert found["skew"] == {"shuffled": 1.0}
    assert found["disagreement"] == {}
    assert found["shift"] == {"by-order": 0.5, "shuffled": 0.25}
    assert found["shifted"] == {"by-order": 0.0, "shuffled": 1.0}
    assert found["skipped"] == {"by-order": 0, "shuffled": 2}


def test_the_number_of_series_is_bounded(serving: Serving) -> None:
    client = serving()
    client.ask("GET", "/metrics")  # makes a few series of its own

    def use(first: int, last: int) -> int:
        for number in range(first, last):
            client.service.pool.set_mode(f"camera-{number}", "off")
            client.ask("GET", f"/v1/streams/camera-{number}")
            client.ask("GET", f"/anything/{number}")
            client.ask(f"M{number}", "/healthz")
        return len(scraped(client))

    few = use(0, 60)
    assert use(60, 120) == few
    found = scraped(client)
    shown = {each for name in found for each in re.findall(r'stream="([^"]+)"', name)}
    assert shown == {REST, *(f"camera-{number}" for number in range(70, 120))}


def test_no_stream_can_be_called_rest() -> None:
    with pytest.raises(ValueError, match="name of a stream"):
        check_name(REST)


def test_a_stream_that_is_gone_counts_nowhere(serving: Serving) -> None:
    client = serving()
    pool, streams = client.service.pool, client.service.metrics.streams
    pool.set_mode("gone", "off")
    pool.drop("gone")
    streams.used("gone")  # by a request that had begun before
    found = scraped(client)
    assert found[f'ttapca_stream_shifted{{stream="{REST}"}}'] == 0
    assert not any('stream="gone"' in name for name in found)


@given(st.lists(st.integers(0, MOST_STREAMS + 9), max_size=200), st.sets(st.integers(0, 59)))
def test_the_rest_are_the_shifted_ones_that_were_not_used_lately(
    uses: list[int], shifted: set[int]
) -> None:
    """A plain list of uses is the oracle."""
    told = {str(each): Health(str(each), 1, 0) for each in range(MOST_STREAMS + 10) if each != 7}
    found = collected(told, list(map(str, uses)), set(map(str, shifted)) & set(told))
    last = list(dict.fromkeys(map(str, reversed(uses))))[:MOST_STREAMS]
    assert found["shifted"].pop(REST) == len((set(map(str, shifted)) & set(told)).difference(last))
    assert set(found["images"]) == set(last) - {"7"}  # which is gone while it is asked
