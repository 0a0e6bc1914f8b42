"""The files of `deploy/` can be read by the programs they are for, and name what there is."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from torch import nn

import ttapca
from ttapca.cli.app import app
from ttapca.cli.configuration import PREFIX, named
from ttapca.serving import StreamPool
from ttapca.serving.http_errors import CODES
from ttapca.serving.http_server import GRACE_SECONDS
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


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def ports_and_paths_of_the_image() -> tuple[str, str]:
    """What the Dockerfile exposes, and where it keeps streams."""
    text = (DEPLOY / "Dockerfile").read_text()
    [port], [volume] = (
        re.findall(r"^EXPOSE (\d+)", text, re.M),
        re.findall(r"^VOLUME (\S+)", text, re.M),
    )
    return port, volume


def test_compose_fits_the_image() -> None:
    [content] = documents("compose.yaml")
    port, volume = ports_and_paths_of_the_image()
    service, prometheus = content["services"]["ttapca"], content["services"]["prometheus"]
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"streams:{volume}" in service["volumes"]
    assert set(content["volumes"]) == {"streams"}
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    mounted = {words.split(":")[1] for words in service["volumes"]}
    command = (DEPLOY / "Dockerfile").read_text().partition('CMD ["/model')[2]
    for place in re.findall(r'"(/[^"]+)"', command):
        assert any(place.startswith(each) for each in mounted), place
    options = {variable(name) for name in options_of_serve()}
    given = {name for name in service["environment"] if name.startswith("TTAPCA_")}
    assert given <= options
    for words in prometheus["volumes"]:
        source = DEPLOY / words.split(":")[0]
        assert source.is_file() or source.name == "metrics.secret"  # a secret is nobody else's


def options_of_serve() -> dict[str, Any]:
    """The options of `ttapca serve` as its help writes them, with what each takes."""
    command = typer.main.get_command(app)
    assert hasattr(command, "commands")
    serve = command.commands["serve"]
    context = serve.make_context("serve", [], resilient_parsing=True)
    return named(serve.get_params(context))


def variable(option: str) -> str:
    return PREFIX + option.replace("-", "_").upper()


def test_kubernetes_fits_the_image_and_the_options() -> None:
    found = {each["kind"]: each for each in documents("kubernetes.yaml")}
    assert set(found) == {"ConfigMap", "StatefulSet", "Service"}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    port, volume = ports_and_paths_of_the_image()
    options = tomllib.loads(found["ConfigMap"]["data"]["serve.toml"])
    assert set(options) <= set(options_of_serve())
    assert str(options["port"]) == port
    assert Path(options["state"]).parent == Path(volume)
    claims = found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    volumes = {each["name"] for each in (*pod["volumes"], *(one["metadata"] for one in claims))}
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        for name in ("model", "filter", "tokens", "state"):
            assert any(options[name].startswith(place) for place in mounts), name
        assert container["args"][0] == "--config"
        assert container["args"][1] in mounts
        assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["initContainers"][0]["args"][-1] == "--check"
    [container] = pod["containers"]
    paths = {container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness")}
    assert paths == {"/v2/health/live", "/v2/health/ready"}
    assert container["ports"][0]["containerPort"] == options["port"]
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    assert pod["terminationGracePeriodSeconds"] > GRACE_SECONDS
    assert found["StatefulSet"]["spec"]["replicas"] == 1  # a file of streams has one owner


def test_the_prometheus_of_compose_is_configured(tmp_path: Path) -> None:
    content = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert content["scrape_configs"][0]["job_name"] == "ttapca"  # as an alert expects
    # The secret is checked to be there, and lies elsewhere.
    secret = tmp_path / "ttapca.secret"
    secret.write_text("secret")
    content["scrape_configs"][0]["authorization"]["credentials_file"] = str(secret)
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(content))
    shutil.copy(ALERTS, tmp_path)
    promtool("check", "config", tmp_path / "prometheus.yaml")
