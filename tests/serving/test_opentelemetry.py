"""Traces and durations for OpenTelemetry, where its packages are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from serving.conftest import Serving

DIGITS = np.zeros((1, 8, 8, 1), np.uint8)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# In a process of its own: providers of OpenTelemetry are of a process, and so is this variable.
PROGRAM = f"""
import json, os
os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "http"
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))

import numpy as np, torch, ttapca
from torch import nn
from serving.clients import Client
from ttapca.serving import StreamPool
from ttapca.serving.service import Service, ServiceFacts

model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8))
with StreamPool(model, fitted) as pool:
    client = Client(Service(pool, ServiceFacts("m", "0")))
    traceparent = {{"traceparent": "00-{TRACE}-{SPAN}-01"}}
    client.ask("GET", "/healthz")
    client.ask("GET", "/v1/streams/none", headers=traceparent)
    client.predict("secret-name", np.zeros((1, 8, 8, 1), np.uint8))
    client.close()
found = [
    [s.name, s.kind.name, format(s.context.trace_id, "032x"),
     format(s.parent.span_id, "016x") if s.parent else None, dict(s.attributes)]
    for s in spans.get_finished_spans()
]
points = [
    [m.name, m.unit, dict(p.attributes), p.count]
    for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics
    for m in s.metrics if m.name == "http.server.request.duration" for p in m.data.data_points
]
print(json.dumps([found, points]))
"""


def test_requests_are_traced_and_timed() -> None:
    pytest.importorskip(
        "opentelemetry.instrumentation.fastapi", reason="the extra `otel` is not installed"
    )
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    spans, points = json.loads(ran.stdout.splitlines()[-1])
    served = {name: rest for name, *rest in spans if rest[0] == "SERVER"}
    assert set(served) == {"GET /v1/streams/{name}", "POST /v1/predict"}
    _, trace, parent, attributes = served["GET /v1/streams/{name}"]
    assert (trace, parent) == (TRACE, SPAN)  # it goes on with the trace of the caller
    assert attributes["http.response.status_code"] == 404
    counts = {}
    for name, unit, facts, count in points:
        assert (name, unit) == ("http.server.request.duration", "s")
        counts[facts["http.request.method"], facts["http.route"]] = count
        assert "secret-name" not in str(facts)  # so that names of streams make no series
    assert counts == {("GET", "/v1/streams/{name}"): 1, ("POST", "/v1/predict"): 1}


@pytest.mark.skipif(
    find_spec("opentelemetry.instrumentation") is not None if find_spec("opentelemetry") else False,
    reason="its packages are installed",
)
def test_nothing_is_missed_without_it(serving: Serving) -> None:
    assert serving().predict("a", DIGITS).status_code == 200
    assert not any(name.startswith("opentelemetry.instrumentation") for name in sys.modules)
