"""The Open Inference Protocol gives the answers of the library, within the limits of `/v1`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import ttapca
from serving.clients import Client, Kept, token
from serving.conftest import Serving
from serving.servers import Running
from ttapca.serving.http_server import DrainingServer, listen
from ttapca.serving.open_inference import LENGTH

MODEL = "/v2/models/digits"
INFER = f"{MODEL}/infer"
DTYPES = {"FP32": "<f4", "UINT8": "u1"}  # by the protocol


def tensor(images: NDArray[Any], datatype: str = "UINT8", **rest: Any) -> dict[str, Any]:
    return {"name": "images", "shape": list(images.shape), "datatype": datatype, **rest}


def request(images: NDArray[Any], stream: Any = "a", **rest: Any) -> dict[str, Any]:
    """A request in JSON, with the parameters of a sequence."""
    words = {name: rest.pop(name) for name in list(rest) if name.startswith(("seq", "binary"))}
    kind = "UINT8" if images.dtype == np.uint8 else "FP32"
    inputs = [tensor(images, kind, data=images.tolist())]
    return {"inputs": inputs, "parameters": {"sequence_id": stream, **words}, **rest}


def binary(images: NDArray[Any], stream: Any = "a", **rest: Any) -> dict[str, Any]:
    """A request whose tensor is behind the JSON, for `Client.ask`."""
    content = request(images, stream, **rest)
    [one] = content["inputs"]
    del one["data"]
    behind = images.astype(DTYPES[one["datatype"]]).tobytes()
    one["parameters"] = {"binary_data_size": len(behind)}
    head = json.dumps(content).encode()
    return {"content": head + behind, "headers": {LENGTH: str(len(head))}}


def tensors(response: httpx.Response) -> dict[str, NDArray[np.float32]]:
    """The outputs of an answer by name, read as the protocol says."""
    assert response.status_code == 200, response.text
    length = int(response.headers.get(LENGTH, len(response.content)))
    content, behind = json.loads(response.content[:length]), response.content[length:]
    found = {}
    for output in content["outputs"]:
        assert output["datatype"] == "FP32"
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            numbers = np.array(output["data"], np.float32)
        else:
            numbers, behind = np.frombuffer(behind[:size], "<f4"), behind[size:]
        found[output["name"]] = numbers.reshape(output["shape"])
    assert not behind
    return found


@pytest.fixture
def client(serving: Serving) -> Client:
    return serving()


def test_who_answers(client: Client) -> None:
    assert client.ask("GET", "/v2/health/live").json() == {"live": True}
    assert client.ask("GET", "/v2/health/ready").json() == {"ready": True}
    server = client.ask("GET", "/v2").json()
    assert server["name"] == "ttapca"
    assert server["extensions"] == ["binary_tensor_data", "sequence"]
    for path in (MODEL, f"{MODEL}/versions/1"):
        assert client.ask("GET", f"{path}/ready").json() == {"name": "digits", "ready": True}
        found = client.ask("GET", path).json()
        assert found["name"] == "digits"
        assert found["versions"] == ["1"]
        assert found["inputs"] == [
            {"name": "images", "datatype": "FP32", "shape": [-1, 1, 8, 8]},
        ]
        assert [each["name"] for each in found["outputs"]] == ["logits", "probabilities"]
    client.service.draining = True
    assert client.ask("GET", "/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", f"{MODEL}/ready", MODEL):
        closing = client.ask("GET", path)
        assert (closing.status_code, closing.json()["code"]) == (503, "closing")


def test_it_answers_as_the_library(
    client: Client,
    digits_network: nn.Module,
    digits_filter: ttapca.FittedFilter,
    images: NDArray[np.uint8],
) -> None:
    network = copy.deepcopy(digits_network)
    adapted = ttapca.adapt(network, "wiener", filter=digits_filter, forgetting="online")
    for number in range(4):
        stored = images[20 * number : 20 * number + 20]
        taken = np.ascontiguousarray(np.moveaxis(stored, -1, 1)) / np.float32(255)
        due = adapted(torch.from_numpy(taken)).detach().numpy()
        asked = [
            {"json": request(stored, "json", id="x")},
            {"json": request(taken, "floats")},
            binary(stored, 12, binary_data_output=True),
            binary(taken, "numbers", outputs=[{"name": "logits"}, {"name": "probabilities"}]),
        ]
        for one in asked:
            response = client.ask("POST", INFER, **one)
            found = tensors(response)
            np.testing.assert_allclose(found["logits"], due, atol=2e-4)
            shares = np.exp(due - due.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            np.testing.assert_allclose(found["probabilities"], shares, atol=1e-4)
            assert (LENGTH in response.headers) == (one is asked[2])
    assert client.service.pool.names() == ["12", "floats", "json", "numbers"]
    content = client.ask("POST", INFER, json=request(images[:1], 12, id="x")).json()
    assert (content["id"], content["model_name"], content["model_version"]) == ("x", "digits", "1")
    told = content["parameters"]
    assert told["sequence_id"] == 12
    assert told["mode"] == "on"
    assert told["shift"] == client.service.pool.status("12").health.shift
    assert all(isinstance(value, str | int | float) for value in told.values())


def test_only_what_was_asked_for(client: Client, images: NDArray[np.uint8]) -> None:
    wanted = [{"name": "probabilities", "parameters": {"binary_data": True}}, {"name": "logits"}]
    response = client.ask("POST", INFER, json=request(images[:3], outputs=wanted))
    assert list(tensors(response)) == ["probabilities", "logits"]
    length = int(response.headers[LENGTH])
    assert "data" not in json.loads(response.content[:length])["outputs"][0]
    only = request(images[:3], outputs=[{"name": "logits"}])
    assert list(tensors(client.ask("POST", f"{MODEL}/versions/1/infer", json=only))) == ["logits"]


def test_a_sequence_begins_anew_and_ends(serving: Serving, images: NDArray[np.uint8]) -> None:
    client = serving(stored=True)
    pool, first = client.service.pool, images[:5]

    def infer(**rest: Any) -> NDArray[np.float32]:
        return tensors(client.ask("POST", INFER, json=request(first, **rest)))["logits"]

    begun = infer()
    client.ask("PUT", "/v1/streams/a", json={"mode": "shadow"})
    infer()
    assert pool.status("a").health.images == 10
    again = infer(sequence_start=True)
    np.testing.assert_allclose(again, begun, atol=1e-4)
    assert pool.status("a").health.images == 5
    assert pool.status("a").mode == "shadow"  # as after a reset
    pool.save()
    infer(sequence_start=True, sequence_end=True)
    assert pool.names() == []
    infer(sequence_end=True)
    assert pool.names() == []


def test_what_begins_anew_stays_if_it_is_refused(client: Client, images: NDArray[np.uint8]) -> None:
    infer = request(images[:5])
    assert client.ask("POST", INFER, json=infer).status_code == 200
    before = Kept.of(client.service.pool)
    dark = (images[:2] / np.float32(255)).reshape(2, 1, 8, 8)
    dark[0, 0, 0, 0] = -1
    bad = request(dark, sequence_start=True, sequence_end=True)
    assert client.ask("POST", INFER, json=bad).status_code == 422
    assert Kept.of(client.service.pool) == before


def changed(images: NDArray[np.uint8], **rest: Any) -> dict[str, Any]:
    """A request whose tensor is changed."""
    content = request(images[:2])
    content["inputs"][0] |= rest
    return {"json": content}


def refusals(images: NDArray[np.uint8]) -> Iterator[tuple[dict[str, Any], int, str, str]]:
    two = images[:2]
    good = request(two)
    yield {"content": b"{"}, 422, "bad_body", "is not JSON"
    yield {"json": {"inputs": good["inputs"]}}, 422, "bad_body", "an object with `parameters`"
    yield {"json": good | {"parameters": {}}}, 422, "bad_body", "an object with `sequence_id`"
    yield {"json": request(two, 0)}, 422, "bad_body", "sequence_id"
    yield {"json": request(two, "../x")}, 422, "bad_stream_name", "letters of A-Z"
    yield {"json": request(two, sequence_begin=True)}, 422, "bad_body", "Did you mean"
    yield {"json": request(two, sequence_end="yes")}, 422, "bad_body", "true or false"
    yield {"json": good | {"inputs": good["inputs"] * 2}}, 422, "bad_body", "a list of 1"
    yield {"json": good | {"outputs": [{"name": "classes"}]}}, 422, "bad_body", "logits"
    yield changed(images, name="x"), 422, "bad_body", "images"
    yield changed(images, datatype="BYTES"), 422, "bad_body", "FP32"
    yield changed(images, shape=[2, 8, 8]), 422, "bad_images", "(images, 1, 8, 8)"
    yield changed(images, shape=[3, 8, 8, 1]), 422, "bad_body", "has 192 numbers"
    yield changed(images, shape=[2**40, 8, 8, 1]), 422, "bad_body", "found 128 in `data`"
    yield changed(images, data=["x" * 100, *[0] * 127]), 422, "bad_body", "something else"
    yield changed(images, data=[[0], [0, 1]]), 422, "bad_body", "something else"
    yield changed(images, data=[None] * 128), 422, "bad_body", "others than 0 to 255"
    yield changed(images, data=[256] * 128), 422, "bad_body", "others than 0 to 255"
    yield changed(images, data=[0.5] * 128), 422, "bad_body", "others than 0 to 255"
    yield changed(images, data=[1e300] * 128, datatype="FP32"), 422, "bad_images", "1e+300"
    yield changed(images, parameters={"binary_data_size": 1}), 422, "bad_body", "both"
    yield changed(images, parameters={"shared_memory_region": "x"}), 422, "bad_body", "shared"
    whole = binary(two)
    length = whole["headers"][LENGTH]
    yield whole | {"content": whole["content"][:-1]}, 422, "bad_body", "127 bytes behind"
    yield whole | {"headers": {LENGTH: str(10**6)}}, 422, "bad_body", "1,000,000"
    yield whole | {"headers": {LENGTH: "-1"}}, 400, "bad_length", "must be a number"
    squeezed = {LENGTH: length, "Content-Encoding": "gzip"}
    yield whole | {"headers": squeezed}, 415, "unsupported_type", "without compression"
    yield {"content": b"x" * 9000}, 413, "body_too_large", "at most 8,000 bytes"
    yield {"json": request(images[:9])}, 422, "bad_images", "1 to 8"


def test_every_refusal_has_a_reason_and_changes_nothing(
    serving: Serving, images: NDArray[np.uint8]
) -> None:
    client = serving(max_body=8000, max_images=8)
    assert client.ask("POST", INFER, json=request(images[:2])).status_code == 200
    before = Kept.of(client.service.pool)
    for rest, status, code, words in refusals(images):
        response = client.ask("POST", INFER, **rest)
        content = response.json()
        assert (response.status_code, content["code"]) == (status, code), content
        assert words in content["error"], content
        assert Kept.of(client.service.pool) == before
    for path in ("/v2/models/none", f"{MODEL}/versions/2", "/v2/models/none/ready"):
        response = client.ask("GET", path)
        assert (response.status_code, response.json()["code"]) == (404, "unknown_model")
        assert "version 1 of `digits`" in response.json()["error"]
    assert client.ask("GET", "/v2/none").json()["code"] == "not_found"
    wrong = client.ask("GET", INFER)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_tokens_rights_and_quotas(serving: Serving, images: NDArray[np.uint8]) -> None:
    client = serving(
        token("shop", "predict", max_streams=1, images_per_second=5),
        token("hall", "predict", "control"),
        token("reader", "read"),
    )

    def infer(who: str | None, stream: str, count: int = 1, **rest: Any) -> tuple[int, str]:
        content = request(images[:count], stream, **rest)
        response = client.ask("POST", INFER, who, json=content)
        return response.status_code, response.json().get("code", "")

    assert infer(None, "a") == (401, "token_missing")
    assert infer("reader", "a") == (403, "right_missing")
    assert infer("shop", "a", sequence_start=True) == (403, "right_missing")
    assert infer("shop", "a") == (200, "")
    assert infer("shop", "b") == (429, "too_many_streams")
    assert infer("shop", "a", 5) == (429, "too_many_images")
    assert infer("hall", "a", sequence_start=True) == (200, "")
    assert client.service.pool.names() == ["hall.a", "shop.a"]
    assert infer("hall", "a", sequence_end=True) == (200, "")
    assert client.service.pool.names() == ["shop.a"]
    for path, status in (("/v2/health/live", 200), (f"{MODEL}/ready", 200), (MODEL, 401)):
        assert client.ask("GET", path).status_code == status
    assert client.ask("GET", MODEL, "reader").status_code == 200


def test_pages_of_other_sites_learn_nothing(client: Client) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    for path in ("/v2", MODEL, "/v2/health/ready"):
        response = client.ask("GET", path, headers=foreign)
        assert (response.status_code, response.json()["code"]) == (403, "foreign_origin")


def test_a_client_of_triton(serving: Serving, images: NDArray[np.uint8]) -> None:
    """The client that most services of this protocol are asked with, over a socket."""
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    service = serving().service
    listening = listen("127.0.0.1", 0)
    running = Running(DrainingServer(service), listening)
    host, port = running.address
    client = triton.InferenceServerClient(f"{host}:{port}")
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("digits")
        assert client.is_model_ready("digits", "1")
        assert client.get_server_metadata()["name"] == "ttapca"
        stated = client.get_model_metadata("digits")["inputs"][0]
        assert stated["shape"] == [-1, 1, 8, 8]
        floats = np.moveaxis(images[:6], -1, 1) / np.float32(255)
        results = []
        for stream, as_bytes, pixels, kind in (
            ("json", False, floats, "FP32"),
            (7, True, floats, "FP32"),
            ("stored", True, images[:6], "UINT8"),
        ):
            one = triton.InferInput(stated["name"], list(pixels.shape), kind)
            one.set_data_from_numpy(np.ascontiguousarray(pixels), binary_data=as_bytes)
            names = ("logits", "probabilities")
            outputs = [triton.InferRequestedOutput(name, binary_data=as_bytes) for name in names]
            result = client.infer(
                "digits", [one], outputs=outputs, sequence_id=stream, sequence_start=True
            )
            assert result.get_response()["parameters"]["sequence_id"] == stream
            results.append([result.as_numpy(name) for name in names])
        for logits, probabilities in results:
            assert logits.shape == probabilities.shape == (6, 10)
            np.testing.assert_allclose(logits, results[0][0], atol=1e-4)
            np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
        client.infer("digits", [one], sequence_id=7, sequence_end=True)
        assert service.pool.names() == ["json", "stored"]
        with pytest.raises(triton.InferenceServerException, match="an object with `sequence_id`"):
            client.infer("digits", [one])
        assert not client.is_model_ready("none")
    finally:
        client.close()
        running.end()
        listening.close()
