"""Every endpoint does what it says, and says what the OpenAPI document says."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import ttapca
from serving.clients import Client, described, npy, picture
from serving.conftest import Serving
from ttapca.adaptation.health import Health
from ttapca.datasets import to_tensor
from ttapca.serving import api_models
from ttapca.serving.api_models import answer_facts, json_bytes, status_facts
from ttapca.serving.request_queue import Answer
from ttapca.serving.stream_record import StreamGlance, StreamStatus
from ttapca.serving.tokens import ANYBODY

STREAM = "/v1/streams/camera-7"


@pytest.fixture
def client(serving: Serving) -> Client:
    return serving()


def noisy(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    noise = np.random.default_rng(seed).normal(0, 60, images.shape)
    return (images + noise).clip(0, 255).astype(np.uint8)


def ok(response: Any, model: type[Any] | None = None, status: int = 200) -> Any:
    """The content of an answer, which must be as its model says."""
    assert response.status_code == status, response.text
    return response.json() if model is None else described(response, model)


def test_predict(client: Client, images: NDArray[np.uint8], digits_network: nn.Module) -> None:
    found = ok(client.predict("camera-7", images[:3]), api_models.PredictAnswer)
    assert (found["stream"], found["mode"], found["differ"]) == ("camera-7", "on", None)
    assert found["health"]["stream"] == "camera-7"
    assert found["health"]["requests"] == 1
    plain = digits_network(to_tensor(images[:3])).softmax(1)
    assert [each["class"] for each in found["predictions"]] == plain.argmax(1).tolist()
    assert [each["name"] for each in found["predictions"]] == [
        str(each["class"]) for each in found["predictions"]
    ]
    assert all(0.5 < each["probability"] <= 1 for each in found["predictions"])


def test_predict_adapts_and_shadow_answers_as_the_bare_network(
    client: Client, images: NDArray[np.uint8], digits_network: nn.Module
) -> None:
    given = noisy(images[:200])
    on = ok(client.predict("on", given), api_models.PredictAnswer)
    assert on["adapted"]
    assert on["health"]["shift"] > 0.7
    assert on["health"]["adapted_share"] == 1

    ok(client.ask("PUT", "/v1/streams/shadow", json={"mode": "shadow"}), StreamStatus)
    shadow = ok(client.predict("shadow", given), api_models.PredictAnswer)
    assert (shadow["mode"], shadow["adapted"]) == ("shadow", False)
    plain = digits_network(to_tensor(given)).softmax(1).max(1)
    # Not bit for bit: twice as many images are in a pass, which a processor may round otherwise.
    probabilities = [each["probability"] for each in shadow["predictions"]]
    assert probabilities == pytest.approx(plain.values.tolist(), abs=1e-5)
    adapted = [each["class"] for each in on["predictions"]]
    assert shadow["differ"] == sum(
        one != other for one, other in zip(adapted, plain.indices.tolist(), strict=True)
    )
    assert shadow["health"]["disagreement"] == shadow["differ"] / 200


def test_an_answer_tells_what_costs_nothing(client: Client, images: NDArray[np.uint8]) -> None:
    answer = ok(client.predict("a", noisy(images[:200])), api_models.PredictAnswer)
    [brief] = ok(client.ask("GET", "/v1/streams?brief=true"), api_models.StreamList)["streams"]
    assert answer["health"] == brief
    full = ok(client.ask("GET", "/v1/streams/a"))
    assert min(full["gains"]) < 0.9
    everything = {**full["health"], **full}
    assert brief == {name: everything[name] for name in brief}
    assert len(brief) == 15


def test_all_bodies_lead_to_the_same_answer(client: Client, images: NDArray[np.uint8]) -> None:
    expected = ok(client.predict("npy", images[:2]))["predictions"]
    files = [("images", ("a.png", picture(each[..., 0]), "image/png")) for each in images[:2]]
    form = ok(client.ask("POST", "/v1/predict?stream=form", files=files))
    assert form["predictions"] == expected


def test_requests_of_many_streams_at_once(client: Client, images: NDArray[np.uint8]) -> None:
    requests = [
        (
            "POST",
            f"/v1/predict?stream=camera-{number % 5}",
            None,
            npy(images[number : number + 1]),
        )
        for number in range(20)
    ]
    answers = [ok(response) for response in client.together(*requests)]
    assert [answer["stream"] for answer in answers] == [f"camera-{n % 5}" for n in range(20)]
    listed = ok(client.ask("GET", "/v1/streams"), api_models.StreamList)
    assert [each["health"]["images"] for each in listed["streams"]] == [4] * 5


def test_streams_are_listed_by_name_in_pages(client: Client) -> None:
    for name in ("b", "c", "a"):
        ok(client.ask("PUT", f"/v1/streams/{name}", json={"mode": "off"}))

    def page(query: str) -> tuple[list[str], int]:
        found = ok(client.ask("GET", f"/v1/streams{query}"), api_models.StreamList)
        return [each["health"]["stream"] for each in found["streams"]], found["total"]

    assert page("") == (["a", "b", "c"], 3)
    assert page("?limit=2") == (["a", "b"], 3)
    assert page("?offset=2&limit=2") == (["c"], 3)
    assert page("?offset=9") == ([], 3)


def test_streams_with_an_alarm_can_be_listed_alone(
    client: Client, images: NDArray[np.uint8]
) -> None:
    for turn in range(6):
        ok(client.predict("busy", noisy(images[:100], turn)))
    ok(client.predict("quiet", images[:100]))

    def listed(query: str) -> tuple[list[str], int]:
        found = ok(client.ask("GET", f"/v1/streams?brief=true{query}"), api_models.StreamList)
        return [each["stream"] for each in found["streams"]], found["total"]

    assert listed("") == (["busy", "quiet"], 2)
    assert listed("&shifted=true") == (["busy"], 1)
    assert listed("&shifted=false") == (["quiet"], 1)
    ok(client.ask("POST", "/v1/streams/busy/reset"))
    assert listed("&shifted=true") == ([], 0)
    assert client.ask("GET", "/v1/streams?shifted=perhaps").status_code == 422


def test_look_switch_reset_and_delete(client: Client, images: NDArray[np.uint8]) -> None:
    ok(client.predict("camera-7", images[:40]))
    before = ok(client.ask("GET", STREAM), StreamStatus)
    switched = ok(client.ask("PUT", STREAM, json={"mode": "off"}), StreamStatus)
    assert switched == {**before, "mode": "off", "adapting": False}
    assert ok(client.predict("camera-7", images[:1]))["mode"] == "off"
    anew = ok(client.ask("POST", f"{STREAM}/reset"), StreamStatus)
    assert (anew["mode"], anew["health"]["images"], anew["requests"]) == ("off", 0, 0)
    gone = client.ask("DELETE", STREAM)
    assert (gone.status_code, gone.content) == (204, b"")
    assert client.ask("GET", STREAM).status_code == 404
    assert client.ask("DELETE", STREAM).status_code == 404


def test_a_state_moves_from_one_service_to_another(
    serving: Serving, images: NDArray[np.uint8]
) -> None:
    one, other = serving(), serving()
    ok(one.predict("camera-7", noisy(images[:100])))
    state = one.ask("GET", f"{STREAM}/state")
    assert state.headers["content-type"] == "application/octet-stream"
    answer = other.ask("PUT", "/v1/streams/copy/state", content=state.content)
    loaded = ok(answer, StreamStatus)
    assert loaded["health"]["images"] == 100
    assert other.ask("GET", "/v1/streams/copy/state").content == state.content
    more = noisy(images[100:120], seed=1)
    first, second = (
        ok(each.predict(name, more)) for each, name in ((one, "camera-7"), (other, "copy"))
    )
    assert first["predictions"] == second["predictions"]


def test_a_damaged_stream_is_listed_apart_until_it_is_deleted(
    serving: Serving, images: NDArray[np.uint8]
) -> None:
    client = serving(stored=True, pool_limits={"max_resident": 1})
    for name in ("camera-6", "camera-7", "camera-8"):
        ok(client.predict(name, images[:1]))
    store = client.service.pool._streams._store
    assert store is not None
    store.write({"camera-7": b"damaged"})
    for query in ("", "?brief=true"):
        listed = ok(client.ask("GET", f"/v1/streams{query}"), api_models.StreamList)
        assert (len(listed["streams"]), listed["damaged"], listed["total"]) == (2, ["camera-7"], 3)
    refusal = client.ask("GET", STREAM)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (409, "damaged_stream")
    assert "retry-after" not in refusal.headers
    assert client.ask("DELETE", STREAM).status_code == 204
    assert ok(client.ask("GET", "/v1/streams"))["damaged"] == []
    assert ok(client.predict("camera-7", images[:1]))["health"]["images"] == 1


def test_pictures(client: Client, images: NDArray[np.uint8]) -> None:
    ok(client.predict("camera-7", noisy(images[:100])))
    shown = {}
    expected = client.service.pool.pictures("camera-7")
    assert expected is not None
    both = ok(client.ask("GET", f"{STREAM}/pictures"), api_models.Pictures)
    for which, url in both.items():
        kind, _, data = url.partition(",")
        assert kind == "data:image/png;base64"
        shown[which] = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        assert shown[which].shape == (8, 8, 3)
    ok(client.ask("PUT", "/v1/streams/quiet", json={"mode": "off"}))
    none = ok(client.ask("GET", "/v1/streams/quiet/pictures"), api_models.Pictures)
    assert none == {"before": None, "after": None}
    np.testing.assert_array_equal(shown["before"], expected[0])
    np.testing.assert_array_equal(shown["after"], expected[1])
    assert (shown["before"] != shown["after"]).any()


def test_info(client: Client) -> None:
    found = ok(client.ask("GET", "/v1/info"), api_models.Info)
    assert found == {
        "model": "digits",
        "filter": "conv1",
        "classes": list("0123456789"),
        "input_shape": [1, 8, 8],
        "version": ttapca.__version__,
        "bands": [{"first": 1, "last": 1}, {"first": 2, "last": 3}],
    }


def test_alive_and_ready(client: Client) -> None:
    assert ok(client.ask("GET", "/healthz")) == {"status": "ok"}
    assert ok(client.ask("GET", "/readyz")) == {"status": "ready"}
    client.service.draining = True
    assert client.ask("GET", "/readyz").status_code == 503
    assert client.ask("GET", "/healthz").status_code == 200
    client.service.draining = False
    client.service.pool.close()
    refused = ok(client.ask("GET", "/readyz"), api_models.ErrorAnswer, 503)
    assert refused["error"]["code"] == "closing"


def test_the_page_and_its_files(client: Client) -> None:
    page = client.ask("GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>" in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert client.ask("GET", "/static/index.html").content == page.content
    for path in ("/static/../http_app.py", "/static/%2e%2e/http_app.py", "/static/", "/static/a"):
        assert client.ask("GET", path).status_code == 404


def test_a_request_has_an_id(client: Client) -> None:
    given = client.ask("GET", "/healthz", headers={"X-Request-ID": "trace-1.a_b"})
    assert given.headers["x-request-id"] == "trace-1.a_b"
    drawn = {client.ask("GET", "/healthz").headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3
    for bad in ("a b", "x" * 65, "a,b"):
        changed = client.ask("GET", "/healthz", headers={"X-Request-ID": bad})
        assert changed.headers["x-request-id"] != bad


def test_logits_that_are_not_finite_are_null() -> None:
    counts: dict[str, Any] = {"mode": "on", "requests": 1, "adapted_share": 0.0}
    counts |= dict.fromkeys(("disagreement", "shifted_since", "last_seen"))
    status = StreamStatus(Health("a", 1, 1, size=float("inf")), (float("nan"),), **counts)
    glance = StreamGlance("a", 1, 1, 0.0, False, **counts)
    logits = torch.tensor([[torch.nan, 1.0]])
    answer = Answer(logits, "multiclass", False, None, glance, lambda: status)
    found = json.loads(json_bytes(answer_facts(answer, ANYBODY, ())))
    assert found["predictions"] == [{"class": 0, "name": None, "probability": None}]
    told = json.loads(json_bytes(status_facts(status, ANYBODY)))
    assert told["gains"] == [None]
    assert told["health"]["size"] is None


def test_the_document_names_every_route_with_examples(client: Client) -> None:
    document = ok(client.ask("GET", "/openapi.json"))
    routes = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    one, model = "/v1/streams/{name}", "/models/{model}"
    assert routes == {
        ("POST", "/v1/predict"),
        ("GET", "/v1/streams"),
        *((method, one) for method in ("GET", "PUT", "DELETE")),
        ("POST", f"{one}/reset"),
        ("GET", f"{one}/state"),
        ("PUT", f"{one}/state"),
        ("GET", f"{one}/pictures"),
        *(("GET", path) for path in ("/v1/info", "/metrics", "/healthz", "/readyz")),
        *(("GET", f"/v2{path}") for path in ("", "/health/live", "/health/ready", model)),
        ("GET", f"/v2{model}/ready"),
        ("POST", f"/v2{model}/infer"),
    }
    predict = document["paths"]["/v1/predict"]["post"]
    assert len(predict["requestBody"]["content"]) == 4
    assert predict["security"] == [{"HTTPBearer": []}]
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    for name in ("Prediction", "PredictAnswer", "Info", "ErrorFacts"):
        properties = schemas[name]["properties"].values()
        assert any("examples" in each for each in properties), name
    for path, methods in document["paths"].items():
        form = "OpenError" if path.startswith("/v2") else "ErrorAnswer"
        for operation in methods.values():
            assert operation["summary"]
            refusals = {int(status) for status in operation["responses"]} - {200, 204}
            assert not refusals or all(
                operation["responses"][str(status)]["content"]["application/json"]["schema"]["$ref"]
                == f"#/components/schemas/{form}"
                for status in refusals
            )
