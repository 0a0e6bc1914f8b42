"""Send damaged requests to a service: it must refuse them, and keep every stream as it was.

A case is a valid request of some kind, damaged in its body, its address or its headers. A seed
gives the same case on every machine.
"""

from __future__ import annotations

import http.client
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from fuzz.mutations import mutate_bytes, mutate_json
from ttapca.serving import StreamPool

STREAMS = ("one", "two", "three")
FORM = "multipart/form-data; boundary=fuzz"
NPY, JSON, BYTES = "application/x-npy", "application/json", "application/octet-stream"
HOSTILE_NAMES = ("", "..", "../x", "a/b", "a%00b", "x" * 101, "é", "-a", "(rest)", "a b", "one\n")
HOSTILE_TYPES = ("", "x", "image/png; a=b", f"{FORM[:-4]}", "text/html", "image/gif", "\xff/\xfe")


@dataclass(frozen=True)
class Case:
    """One request."""

    kind: str
    method: str
    path: str
    content_type: str
    body: bytes


@dataclass
class Findings:
    """What came of a campaign.

    Attributes:
        statuses: How often each kind of case was answered with each status.
        faults: What must not be: the seed, the kind, and what was wrong.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Campaign:
    """Makes cases for a service of digits, sends them and judges the answers.

    Args:
        connect: Opens a connection to the service.
        pool: The pool behind it, whose streams are compared.
        seed: Which cases.
    """

    def __init__(
        self, connect: Callable[[], http.client.HTTPConnection], pool: StreamPool, seed: int = 0
    ) -> None:
        self._connect, self._pool, self._seed = connect, pool, seed
        self._connection = connect()
        self._kinds = tuple(_KINDS)
        random = np.random.default_rng(seed)
        self._pixels = random.integers(0, 256, (4, 8, 8, 1), np.uint8)
        for name in STREAMS:
            self.send(Case("valid", "POST", f"/v1/predict?stream={name}", NPY, _npy(self._pixels)))
        self._state = pool.dump(STREAMS[0])

    def run(self, count: int, watch: Callable[[Sequence[int]], Any] = iter) -> Findings:
        """Send so many cases, in turn of each kind."""
        findings = Findings()
        for number in watch(range(count)):
            case = self.case(number)
            before = self._kept()
            try:
                status, content = self.send(case)
            except (OSError, http.client.HTTPException) as error:
                findings.faults.append(f"{number} {case.kind}: no answer, {error!r}")
                self._connection = self._connect()
                continue
            findings.statuses[case.kind, status] += 1
            for fault in self._faults(case, status, content, before):
                findings.faults.append(f"{number} {case.kind}: {fault}")
        return findings

    def case(self, number: int) -> Case:
        """Return a case by its number."""
        random = Random(f"{self._seed}:{number}")
        kind = self._kinds[number % len(self._kinds)]
        path, content_type, body = _KINDS[kind](self, random)
        method = "PUT" if "/streams/" in path else "POST"
        where = random.random()
        if where < 0.08:
            name = random.choice(HOSTILE_NAMES)
            path = path.replace(f"={STREAMS[0]}", f"={quote(name, safe='')}")
            path = path.replace(f"/{STREAMS[0]}", f"/{quote(name, safe='')}")
        elif where < 0.16:
            content_type = random.choice(HOSTILE_TYPES)
        elif where < 0.2:
            method = random.choice(("GET", "DELETE", "PATCH", "OPTIONS", "HEAD"))
            path = f"{path.partition('?')[0]}/none?limit={random.choice(('x', '-1', '9' * 99))}"
        return Case(kind, method, path, content_type, body)

    def send(self, case: Case) -> tuple[int, bytes]:
        """Return status and content of the answer."""
        headers = {"Content-Type": case.content_type}
        self._connection.request(case.method, case.path, case.body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _kept(self) -> dict[str, bytes]:
        return {name: self._pool.dump(name) for name in self._pool.names()}

    def _faults(
        self, case: Case, status: int, content: bytes, before: dict[str, bytes]
    ) -> list[str]:
        if status >= 500:
            return [f"status {status}: {content[:300]!r}"]
        if status < 400:
            # Whatever was taken as a state must be one that images can follow.
            follow = Case("follow", "POST", "/v1/predict?stream=one", NPY, _npy(self._pixels))
            status, content = self.send(follow)
            return [] if status == 200 else [f"then status {status}: {content[:300]!r}"]
        found = []
        if self._kept() != before:
            found.append(f"refused with {status}, and a stream has changed")
        if case.method != "HEAD":
            try:
                refusal = json.loads(content)
                if case.path.startswith("/v2"):  # the protocol wants text
                    refusal["error"] = {"code": refusal["code"], "message": refusal["error"]}
                error = refusal["error"]
                if error.keys() != {"code", "message"} or not error["message"]:
                    found.append(f"a refusal of another form: {content[:300]!r}")
            except (ValueError, KeyError, TypeError, AttributeError):
                found.append(f"a refusal of another form: {content[:300]!r}")
        return found

    def _picture(self, random: Random, kind: str) -> bytes:
        side = random.choice((1, 8, 50))
        pixels = np.resize(self._pixels, (side, random.choice((side, 9)), random.choice((1, 3))))
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, kind)
        return file.getvalue()


def _npy(pixels: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


PREDICT = f"/v1/predict?stream={STREAMS[0]}"
STREAM = f"/v1/streams/{STREAMS[0]}"
Made = tuple[str, str, bytes]


def _png(campaign: Campaign, random: Random) -> Made:
    return PREDICT, "image/png", mutate_bytes(campaign._picture(random, "PNG"), random)


def _jpeg(campaign: Campaign, random: Random) -> Made:
    return PREDICT, "image/jpeg", mutate_bytes(campaign._picture(random, "JPEG"), random)


def _form(campaign: Campaign, random: Random) -> Made:
    head = b'--fuzz\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    files = [campaign._picture(random, "PNG") for _ in range(random.randint(1, 3))]
    body = b"".join(head + each + b"\r\n" for each in files) + b"--fuzz--\r\n"
    return PREDICT, FORM, mutate_bytes(body, random)


def _array(campaign: Campaign, random: Random) -> Made:
    kind = random.choice(("u1", "<f4", ">f8", "<f2", "<i4"))
    pixels = campaign._pixels if kind == "u1" else campaign._pixels / 255
    return PREDICT, NPY, mutate_bytes(_npy(pixels.astype(kind)), random)


def _mode(_: Campaign, random: Random) -> Made:
    body = json.dumps({"mode": random.choice(("on", "off", "shadow", "auto"))}).encode()
    return STREAM, JSON, random.choice((mutate_json, mutate_bytes))(body, random)


def _saved(campaign: Campaign, random: Random) -> Made:
    return f"{STREAM}/state", BYTES, mutate_bytes(campaign._state, random)


def _infer(campaign: Campaign, random: Random) -> Made:
    """A request of the Open Inference Protocol, whose numbers are in the JSON."""
    pixels = campaign._pixels[: random.randint(1, 4)]
    kind = random.choice(("UINT8", "FP32"))
    data = pixels if kind == "UINT8" else pixels / 255
    shape, flat = list(pixels.shape), random.random() < 0.5
    tensor = {"name": "images", "datatype": kind, "shape": shape}
    tensor["data"] = (data.flatten() if flat else data).tolist()
    words = {"sequence_id": random.choice((*STREAMS, 7)), "sequence_start": random.random() < 0.3}
    words |= {"sequence_end": random.random() < 0.2, "binary_data_output": random.random() < 0.5}
    body = json.dumps({"id": "x", "inputs": [tensor], "parameters": words}).encode()
    damage = random.choice((mutate_json, mutate_bytes))
    return "/v2/models/digits/infer", JSON, damage(body, random)


_KINDS: dict[str, Callable[[Campaign, Random], Made]] = {
    "png": _png,
    "jpeg": _jpeg,
    "form": _form,
    "npy": _array,
    "mode": _mode,
    "state": _saved,
    "infer": _infer,
}
