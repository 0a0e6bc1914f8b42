"""What a token may do, what it sees, and what is never told."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from serving.clients import SECRETS, Client, Kept, npy, token
from serving.conftest import Serving
from serving.test_http_refusals import refused
from ttapca.serving.tokens import Token

DIGITS = np.zeros((1, 8, 8, 1), np.uint8)
SWITCH = {"json": {"mode": "off"}}
CALLS: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/v1/predict?stream=a", npy(DIGITS), "predict"),
    ("GET", "/v1/streams", {}, "read"),
    ("GET", "/v1/streams/a", {}, "read"),
    ("GET", "/v1/streams/a/state", {}, "read"),
    ("GET", "/v1/streams/a/pictures", {}, "read"),
    ("PUT", "/v1/streams/a", SWITCH, "control"),
    ("POST", "/v1/streams/a/reset", {}, "control"),
    ("PUT", "/v1/streams/a/state", {"content": b"x"}, "control"),
    ("DELETE", "/v1/streams/a", {}, "control"),
]


@pytest.fixture
def client(serving: Serving) -> Client:
    """A shop and a hall with streams of their own, and an operator over both."""
    return serving(
        token("shop", "read", "predict", "control"),
        token("hall", "read", "predict", "control"),
        token("operator", "read", "predict", "control", "all"),
        token("reader", "read"),
    )


@pytest.mark.parametrize("right", ["read", "predict", "control"])
def test_each_call_needs_its_right(right: Any, serving: Serving) -> None:
    client = serving(token("shop", right))
    client.service.pool.set_mode("shop.a", "on")
    before = Kept.of(client.service.pool)
    for method, path, rest, needed in CALLS:
        if needed == right:
            continue
        response = client.ask(method, path, "shop", **rest)
        refused(response, 403, "right_missing", f"the right {needed}; the token `shop` has {right}")
    assert Kept.of(client.service.pool) == before
    for method, path, rest, needed in CALLS:
        if needed == right:
            assert client.ask(method, path, "shop", **rest).status_code in (200, 204, 404, 409, 422)


def test_without_a_token_nothing_but_health_is_told(client: Client) -> None:
    for method, path, rest, _ in (*CALLS, ("GET", "/v1/info", {}, ""), ("GET", "/metrics", {}, "")):
        missing = refused(client.ask(method, path, **rest), 401, "token_missing", "Bearer TOKEN")
        assert missing.headers["www-authenticate"] == 'Bearer realm="ttapca"'
        wrong = refused(client.ask(method, path, "a guess", **rest), 401, "token_unknown")
        assert wrong.headers["www-authenticate"] == 'Bearer realm="ttapca"'
    for header in ("Basic c2hvcDp4", "Bearer", "Bearer  ", SECRETS["shop"]):
        response = client.ask("GET", "/v1/info", headers={"Authorization": header})
        refused(response, 401, "token_missing")
    for path in ("/healthz", "/readyz", "/", "/openapi.json"):
        assert client.ask("GET", path).status_code == 200
    assert client.service.pool.names() == []


def test_a_secret_may_have_any_letters(serving: Serving) -> None:
    secret = "ein Schlüssel für später, bis Å".encode()  # its last byte alone would be a blank
    client = serving(Token("shop", hashlib.sha256(secret).digest(), frozenset({"read"})))
    headers = {"Authorization": b"Bearer " + secret}
    assert client.ask("GET", "/v1/streams", headers=headers).status_code == 200


def test_any_token_may_ask_what_is_served(client: Client) -> None:
    for name in SECRETS:
        assert client.ask("GET", "/v1/info", name).status_code == 200


def test_streams_belong_to_the_token_that_names_them(client: Client) -> None:
    """Two tokens use one name, and neither sees, changes or even notices the other's stream."""
    shop = client.predict("camera", DIGITS, "shop").json()
    assert (shop["stream"], shop["health"]["stream"]) == ("camera", "camera")
    assert client.ask("GET", "/v1/streams/camera", "hall").status_code == 404
    assert client.ask("DELETE", "/v1/streams/camera", "hall").status_code == 404
    client.predict("camera", DIGITS, "hall")
    assert client.service.pool.names() == ["hall.camera", "shop.camera"]
    before = client.service.pool.dump("shop.camera")
    for method, path, rest, _ in CALLS:
        client.ask(method, path.replace("/a", "/camera").replace("=a", "=camera"), "hall", **rest)
        client.ask(method, path.replace("/a", "/shop.camera").replace("=a", "=x"), "hall", **rest)
    assert client.service.pool.dump("shop.camera") == before
    listed = client.ask("GET", "/v1/streams", "shop").json()
    assert [each["health"]["stream"] for each in listed["streams"]] == ["camera"]
    nothing = {"streams": [], "damaged": [], "total": 0}
    assert client.ask("GET", "/v1/streams", "reader").json() == nothing


def test_the_right_all_uses_full_names(client: Client) -> None:
    client.predict("camera", DIGITS, "shop")
    client.predict("camera", DIGITS, "hall")
    listed = client.ask("GET", "/v1/streams", "operator").json()
    names = [each["health"]["stream"] for each in listed["streams"]]
    assert names == ["hall.camera", "shop.camera"]
    brief = client.ask("GET", "/v1/streams?brief=true", "hall").json()
    assert [each["stream"] for each in brief["streams"]] == ["camera"]
    switched = client.ask("PUT", "/v1/streams/shop.camera", "operator", **SWITCH).json()
    assert switched["health"]["stream"] == "shop.camera"
    assert client.ask("GET", "/v1/streams/camera", "shop").json()["mode"] == "off"
    assert client.ask("GET", "/v1/streams/camera", "hall").json()["mode"] == "on"
    assert client.ask("GET", "/v1/streams/camera", "operator").status_code == 404


def test_measurements_are_of_all_streams_and_so_for_those_who_see_all(client: Client) -> None:
    assert client.ask("GET", "/metrics", "operator").status_code == 200
    for name in ("shop", "reader"):
        response = client.ask("GET", "/metrics", name)
        refused(response, 403, "right_missing", "the rights read and all")


def test_a_token_has_so_many_streams(serving: Serving) -> None:
    client = serving(token("shop", "predict", "control", max_streams=2), token("hall", "predict"))
    assert client.predict("a", DIGITS, "shop").status_code == 200
    assert client.predict("bad", DIGITS[:, :4], "shop").status_code == 422  # takes no place
    assert client.ask("PUT", "/v1/streams/b", "shop", **SWITCH).status_code == 200
    response = client.predict("c", DIGITS, "shop")
    refused(response, 429, "too_many_streams", "`shop` may have 2 streams")
    refused(client.ask("PUT", "/v1/streams/c", "shop", **SWITCH), 429, "too_many_streams")
    refused(client.predict("c", DIGITS[:, :4], "shop"), 429, "too_many_streams")  # not decoded
    content = {"content": client.service.pool.dump("shop.a")}
    response = client.ask("PUT", "/v1/streams/c/state", "shop", **content)
    refused(response, 429, "too_many_streams")
    assert client.ask("PUT", "/v1/streams/b/state", "shop", **content).status_code == 200
    assert client.predict("a", DIGITS, "shop").status_code == 200
    assert client.predict("c", DIGITS, "hall").status_code == 200
    assert client.ask("DELETE", "/v1/streams/a", "shop").status_code == 204
    assert client.predict("c", DIGITS, "shop").status_code == 200


def test_a_token_comes_so_often(serving: Serving) -> None:
    client = serving(token("shop", "read", requests_per_second=0.01), token("hall", "read"))
    assert client.ask("GET", "/v1/streams", "shop").status_code == 200
    late = refused(client.ask("GET", "/v1/streams", "shop"), 429, "too_many_requests", "0.01")
    assert 90 <= int(late.headers["retry-after"]) <= 100
    for _ in range(5):
        assert client.ask("GET", "/v1/streams", "hall").status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "foreign_host"),
        ({"Host": "evil.example:8000"}, "foreign_host"),
        ({"Host": "127.0.0.1.evil.example"}, "foreign_host"),
        ({"Host": "[::"}, "foreign_host"),
        ({"Host": "10.0.0.1"}, "foreign_host"),
        ({"Origin": "http://evil.example"}, "foreign_origin"),
        ({"Origin": "null"}, "foreign_origin"),
        ({"Origin": "http://["}, "foreign_origin"),
        ({"Origin": "localhost"}, "foreign_origin"),
        ({"Origin": "http://localhost:3000"}, "foreign_origin"),
        ({"Sec-Fetch-Site": "cross-site"}, "foreign_origin"),  # of an <img>, without an origin
        ({"Sec-Fetch-Site": "same-site"}, "foreign_origin"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, "foreign_origin"),
        ({"Sec-Fetch-Site": "same-origin"}, None),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, None),
        ({"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}, None),
        ({"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}, None),
        ({"Host": "127.1.2.3"}, None),
    ],
)
def test_without_tokens_no_page_of_another_site_gets_in(
    headers: dict[str, str], code: str | None, serving: Serving
) -> None:
    """A browser on this machine may show any page; its requests name its host or its origin."""
    client = serving()
    response = client.ask("PUT", "/v1/streams/a", headers=headers, **SWITCH)
    if code is None:
        assert response.status_code == 200
    else:
        refused(response, 403, code, "--tokens FILE")
        assert client.service.pool.names() == []


def test_a_link_of_another_site_leads_to_the_page_and_to_nothing_else(serving: Serving) -> None:
    client = serving()
    client.service.pool.set_mode("a", "on")
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    shown = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    page = client.ask("GET", "/", headers=followed)
    assert page.status_code == 200
    assert page.headers["cross-origin-resource-policy"] == "same-origin"
    for path in ("/v1/streams/a/pictures", "/v1/streams", "/metrics"):
        for headers in (followed, shown):
            refused(client.ask("GET", path, headers=headers), 403, "foreign_origin")
    refused(client.ask("GET", "/", headers=shown), 403, "foreign_origin")


def test_with_tokens_other_hosts_are_fine(client: Client) -> None:
    headers = {"Host": "cameras.example", "Origin": "https://other.example"}
    assert client.ask("GET", "/v1/streams", "shop", headers=headers).status_code == 200


def test_streams_that_begin_at_once_are_counted(serving: Serving) -> None:
    client = serving(token("shop", "predict", max_streams=3))
    requests = [
        ("POST", f"/v1/predict?stream=camera-{number}", "shop", npy(DIGITS)) for number in range(8)
    ]
    statuses = [each.status_code for each in client.together(*requests)]
    assert sorted(statuses) == [200] * 3 + [429] * 5
    assert len(client.service.pool.names()) == 3
