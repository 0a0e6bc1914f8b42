"""A network behind the same HTTP as `ttapca serve`, without streams: the yardstick for it.

The same server (uvicorn, h11), the same middleware (ids, log, limits, measurements), the same
decoding in the same threads, and images of all requests batched into one pass in the same way. Left
out is all that ttapca adds: filter, states, alarm, pictures to look at, and the health of the
stream in the answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import cast

import torch
from fastapi import FastAPI, Request
from starlette.responses import Response
from torch import Tensor, nn

from ttapca.serving import PoolLimits, StreamPool
from ttapca.serving.api_models import JSON, json_bytes, predicted
from ttapca.serving.http_app import ServiceMiddleware
from ttapca.serving.http_server import DrainingServer
from ttapca.serving.service import Service, ServiceFacts


class BarePool:
    """Gathers requests into passes of a network, and knows no streams.

    Args:
        network: In evaluation mode.
        input_shape: Shape of one image.
    """

    def __init__(self, network: nn.Module, input_shape: tuple[int, ...]) -> None:
        self.network, self.input_shape, self.limits = network, input_shape, PoolLimits()
        self.closed, self.resident = False, 0
        self._news = threading.Condition()
        self._queue: deque[tuple[Tensor, Future[Tensor]]] = deque()
        self._lately = 1
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def queue_length(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def names(self) -> list[str]:
        """None: there are no streams."""
        return []

    def status(self, stream: str) -> None:
        """Nobody asks."""
        raise NotImplementedError(f"a bare network has no stream {stream}")

    def submit(self, _stream: str, images: Tensor, **_quota: object) -> Future[Tensor]:
        """Ask for the logits of images, and return at once."""
        answer: Future[Tensor] = Future()
        with self._news:
            self._queue.append((images, answer))
            self._news.notify()
        return answer

    def _work(self) -> None:
        while True:
            chosen = self._batch()
            with torch.inference_mode():
                logits = self.network(torch.cat([images for images, _ in chosen]))
            parts = logits.split([len(images) for images, _ in chosen])
            for (_, answer), part in zip(chosen, parts, strict=True):
                answer.set_result(part)

    def _batch(self) -> list[tuple[Tensor, Future[Tensor]]]:
        """As the pool does it: a moment is waited for where there were others of late."""
        most = self.limits.max_batch
        with self._news:
            while not self._queue:
                self._news.wait()
            until = time.perf_counter() + self.limits.max_wait
            while len(self._queue) < min(self._lately, most):
                if not self._news.wait(max(0.0, until - time.perf_counter())):
                    break
            chosen = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            self._lately = max(len(chosen), self._lately - 1)
            return chosen


def bare_server(network: nn.Module, input_shape: tuple[int, ...]) -> DrainingServer:
    """A server of a network without streams, with one route."""
    service = Service(cast(StreamPool, BarePool(network, input_shape)), ServiceFacts("bare", ""))
    app = FastAPI(docs_url=None, redoc_url=None)
    app.add_middleware(ServiceMiddleware, service=service)

    @app.post("/v1/predict")
    async def predict(request: Request, stream: str) -> Response:
        token = service.admit(request, "predict")
        kind = request.headers.get("content-type", "")
        async with service.body(request, token, stream) as body:
            logits = cast(Tensor, await service.answer(token, stream, kind, body))
        return Response(json_bytes({"predictions": predicted(logits, ())}), media_type=JSON)

    server = DrainingServer(service)
    server.config.app = app
    return server
