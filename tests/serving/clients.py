"""A client that asks an application without sockets, and what it sends."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter

from ttapca.serving import StreamPool
from ttapca.serving.decoding import NPY
from ttapca.serving.http_app import create_app
from ttapca.serving.service import Service
from ttapca.serving.tokens import Right, Token

SECRETS = {name: f"the long secret of {name}" for name in ("shop", "hall", "operator", "reader")}


class Client:
    """Sends requests to an application; all of them in one event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._runner = asyncio.Runner()
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def ask(self, method: str, path: str, token: str | None = None, **rest: Any) -> httpx.Response:
        return self.together((method, path, token, rest))[0]

    def together(
        self, *requests: tuple[str, str, str | None, dict[str, Any]]
    ) -> list[httpx.Response]:
        """Send requests at once, and wait for all answers."""

        async def send() -> list[httpx.Response]:
            return await asyncio.gather(*map(self._send, requests))

        return self._runner.run(send())

    async def _send(self, request: tuple[str, str, str | None, dict[str, Any]]) -> httpx.Response:
        method, path, token, rest = request
        headers = dict(rest.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {SECRETS.get(token, token)}"
        return await self._client.request(method, path, headers=headers, **rest)

    def predict(self, stream: str, images: NDArray[Any], token: str | None = None) -> Any:
        return self.ask("POST", f"/v1/predict?stream={stream}", token, **npy(images))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        self.service.close()


def described(response: httpx.Response, model: Any) -> Any:
    """The content of an answer, which must be all that its model says and nothing else."""
    adapter = TypeAdapter(model)
    found = adapter.validate_json(response.content, strict=True)
    content = response.json()
    assert adapter.dump_python(found, mode="json", by_alias=True, exclude_unset=True) == content
    return content


def npy(images: NDArray[Any]) -> dict[str, Any]:
    """Images as `.npy`, for `Client.ask`."""
    return {"content": npy_bytes(images), "headers": {"Content-Type": NPY}}


def npy_bytes(images: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, images)
    return file.getvalue()


def picture(pixels: NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    """Pixels as a picture file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def in_pieces(content: bytes, size: int = 1000) -> Any:
    """A body that does not state its length."""

    async def pieces() -> Any:
        for start in range(0, len(content), size):
            yield content[start : start + size]

    return pieces()


def token(name: str, *rights: Right, **limits: Any) -> Token:
    digest = hashlib.sha256(SECRETS[name].encode()).digest()
    return Token(name, digest, frozenset(rights), **limits)


@dataclass(frozen=True)
class Kept:
    """What a pool keeps, to be compared later."""

    states: dict[str, bytes]

    @classmethod
    def of(cls, pool: StreamPool) -> Kept:
        return cls({name: pool.dump(name) for name in pool.names()})


def series(text: str) -> Iterator[str]:
    """The lines of an exposition that are series."""
    return (line for line in text.splitlines() if line and not line.startswith("#"))
