"""Measurements for Prometheus, whose number of time series no client can raise."""

from __future__ import annotations

import threading
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ttapca.errors import StorageError, UnknownStreamError
from ttapca.serving.pool import PoolObserver
from ttapca.support.process import resident_memory

if TYPE_CHECKING:
    from ttapca.serving.http_app import RequestRecord
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.request_queue import Answer
    from ttapca.serving.stream_record import StreamStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REST = "(rest)"
MOST_STREAMS = 50  # with series of their own
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# By name, after `ttapca_stream_`: an attribute of a stream's status, and what it means.
STREAM_SERIES: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("stream_series.toml").read_text("utf-8")
)


class StreamSeries(Collector):
    """Series of the `MOST_STREAMS` streams that were used last; the others are counted."""

    def __init__(self) -> None:
        self.pool: StreamPool | None = None
        self._lock = threading.Lock()
        self._used: OrderedDict[str, None] = OrderedDict()  # the last one at the end

    def used(self, stream: str) -> None:
        """Take note of a stream that was used now."""
        with self._lock:
            self._used[stream] = None
            self._used.move_to_end(stream)
            if len(self._used) > MOST_STREAMS:
                self._used.popitem(last=False)

    def collect(self) -> Iterator[Metric]:
        """Yield a family of series for each attribute."""
        if self.pool is None:
            return
        with self._lock:
            last = list(reversed(self._used))
        found: dict[str, StreamStatus] = {}
        for stream in last:
            with suppress(UnknownStreamError, StorageError):  # deleted, or out of reach
                found[stream] = self.pool.status(stream)
        shifted = set(self.pool.names(shifted=True)).difference(found)
        for name, (path, words) in STREAM_SERIES.items():
            # Its first name, which 0.3 drops, if it had another one.
            gone = f"Deprecated, and gone in 0.3: it is called ttapca_stream_{name}"
            for each, told in {path.removeprefix("health."): gone, name: words}.items():
                kind = CounterMetricFamily if each.endswith("_total") else GaugeMetricFamily
                family = kind(f"ttapca_stream_{each}", told, labels=("stream",))
                for stream, status in found.items():
                    number = attrgetter(path)(status)
                    if name == "shifted" or number is not None:
                        family.add_metric((stream,), float(number or 0))
                if name == "shifted":
                    family.add_metric((REST,), len(shifted))
                yield family


class Metrics(PoolObserver):
    """All series of a service, in a registry of its own; it is the observer of a pool."""

    def __init__(self, model: str = "", version: str = "") -> None:
        self.registry = CollectorRegistry()
        self.streams = StreamSeries()
        self.registry.register(self.streams)
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        info = gauge("ttapca_service_info", "Always 1", ("model", "version"))
        info.labels(model, version).set(1)
        memory = gauge("ttapca_resident_bytes", "Memory of the process that is in use")
        memory.set_function(resident_memory)
        labels = ("method", "route", "status")
        self._requests = counter("ttapca_requests", "Requests by route and class of status", labels)
        self._refused = counter("ttapca_refused", "Requests that were refused", ("code",))
        self._images = counter("ttapca_images", "Images by mode", ("mode", "adapted"))
        self._differ = counter("ttapca_shadow_differ", "Images with another class if adapted")
        self._seconds = histogram("ttapca_request_seconds", "Time of a request", ("route",))
        self._waited = histogram("ttapca_queue_seconds", "Time of images in queue and pass")
        self._pass_seconds = histogram("ttapca_pass_seconds", "Time of a forward pass")
        counts = partial(histogram, buckets=COUNTS)
        self._pass_images = counts("ttapca_pass_images", "Images of a forward pass")
        self._pass_streams = counts("ttapca_pass_streams", "Streams of a forward pass")

    def watch(self, pool: StreamPool) -> None:
        """Show queue and streams of a pool, as they are when Prometheus asks."""
        self.streams.pool = pool
        for name, words, value in (
            ("ttapca_queue_images", "Images that wait for a pass", lambda: pool.queue_length),
            ("ttapca_streams_resident", "Streams in memory", lambda: pool.resident),
            ("ttapca_streams_known", "Streams in memory and on disk", lambda: len(pool.names())),
        ):
            Gauge(name, words, registry=self.registry).set_function(value)

    def finished(self, record: RequestRecord) -> None:
        """Count a request that was answered or refused."""
        method = record.method if record.method in METHODS else "other"
        self._requests.labels(method, record.route, f"{record.status // 100}xx").inc()
        self._seconds.labels(record.route).observe(record.seconds)
        if record.code is not None:
            self._refused.labels(record.code).inc()

    def passed(self, images: int, streams: int, seconds: float) -> None:
        """Take note of a forward pass."""
        self._pass_images.observe(images)
        self._pass_streams.observe(streams)
        self._pass_seconds.observe(seconds)

    def answered(self, answer: Answer, waited: float) -> None:
        """Take note of an answer, and of how the stream is now."""
        self._waited.observe(waited)
        self._images.labels(answer.mode, str(answer.adapted).lower()).inc(len(answer.logits))
        self._differ.inc(answer.differ or 0)
        self.streams.used(answer.stream)
