"""The files of `deploy/` can be read by the programs they are for, and name what there is."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import ttapca
from ttapca.serving import StreamPool
from ttapca.serving.http_errors import CODES
from ttapca.serving.metrics import STREAM_SERIES, Metrics
from ttapca.serving.service import Service, ServiceFacts

DEPLOY = Path(__file__).parent.parent / "deploy"
ALERTS = DEPLOY / "prometheus-alerts.yaml"
# What Prometheus tells of a histogram, beside its name.
OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def told() -> set[str]:
    """The names of all series of a service."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8))
    metrics = Metrics("m", "1")
    with StreamPool(copy.deepcopy(model), fitted, observer=metrics) as pool:
        service = Service(pool, ServiceFacts("m", "0"), metrics=metrics)
        service.close()
        found = {
            f"{family.name}_total" if family.type == "counter" else family.name
            for family in metrics.registry.collect()
        }
    assert "ttapca_requests_total" in found
    assert found >= {f"ttapca_stream_{name}" for name in STREAM_SERIES}
    return found


def panels() -> list[dict[str, Any]]:
    content = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    found: list[dict[str, Any]] = content["panels"]
    return found


def queries() -> Iterator[str]:
    """All queries of alerts and dashboard."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


def test_every_series_that_is_asked_for_exists(told: set[str]) -> None:
    asked = [name for query in queries() for name in re.findall(r"ttapca_\w+", query)]
    assert len(asked) > 20
    for name in asked:
        assert name in told or OF_HISTOGRAM.sub("", name) in told, name
    codes = {code for codes in CODES.values() for code in codes}
    for query in queries():
        for words in re.findall(r'code=~?"([^"]+)"', query):
            assert codes.issuperset(words.split("|")), words


def test_no_query_uses_a_name_that_is_about_to_go() -> None:
    old = {path.removeprefix("health.") for path, _ in STREAM_SERIES.values()} - set(STREAM_SERIES)
    assert old
    for query in queries():
        assert not {f"ttapca_stream_{name}" for name in old} & set(re.findall(r"ttapca_\w+", query))


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def promtool(*words: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: Debian has it in the package `prometheus`")
    ran = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_prometheus_reads_the_alerts() -> None:
    promtool("check", "rules", ALERTS)


def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__rate_interval", "5m", target["expr"])}
        for number, panel in enumerate(panels())
        for target in panel["targets"]
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", file)


def test_alerts_are_raised_when_they_should(tmp_path: Path) -> None:
    """Prometheus itself runs the rules over series that this test makes up."""
    series = {
        'ttapca_stream_shifted{instance="a", stream="door"}': "1x30",
        'ttapca_stream_shifted{instance="b", stream="door"}': "0x30",
        'ttapca_refused_total{instance="a", code="failure"}': "0x5 1x25",
        'ttapca_refused_total{instance="b", code="queue_full"}': "0+60x30",
        'ttapca_requests_total{instance="b", status="5xx"}': "0+600x30",
        'ttapca_requests_total{instance="a", status="2xx"}': "0+600x30",
        'up{instance="b", job="ttapca"}': "1x20 0x10",
    }

    def raised(alert: str, at: str, *instances: str) -> dict[str, Any]:
        return {
            "alertname": alert,
            "eval_time": at,
            "exp_alerts": [
                {"exp_labels": {"instance": one, "severity": severity[alert]} | more}
                for one in instances
                for more in ([{"job": "ttapca"}] if alert == "TtapcaDown" else [{}])
            ],
        }

    content = yaml.safe_load(ALERTS.read_text())
    for rule in content["groups"][0]["rules"]:
        rule.pop("annotations")  # their words are not what is tested here
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(content))
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in content["groups"][0]["rules"]}
    checks = [
        raised("TtapcaShifted", "9m"),
        raised("TtapcaShifted", "11m", "a"),
        raised("TtapcaFault", "5m"),
        raised("TtapcaFault", "8m", "a"),
        raised("TtapcaOverloaded", "3m"),
        raised("TtapcaOverloaded", "12m", "b"),
        raised("TtapcaDown", "15m"),
        raised("TtapcaDown", "25m", "b"),
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": checks}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": [test]}))
    promtool("test", "rules", file)
