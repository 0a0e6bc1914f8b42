"""Tiny images, tiny archives and a local server: no test here needs the network."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from ttapca.datasets import DataSet, Images, write_cifar_binary
from ttapca.datasets.cifar import CIFAR10_BINARY, CIFAR10_CLASSES
from ttapca.datasets.sources import Archive, Layout


@pytest.fixture
def make_images():
    def make(count: int = 10, shape: tuple[int, int, int] = (32, 32, 3), seed: int = 0) -> Images:
        pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
        return Images(pixels, np.arange(count) % len(CIFAR10_CLASSES), CIFAR10_CLASSES)

    return make


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int) -> None:
        self.steps.append((task, done, total))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@dataclass
class FileServer:
    """Serves bytes on 127.0.0.1, as well or as badly as told."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cut_after: int | None = None  # bytes that each answer sends before the connection breaks
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[str | None] = field(default_factory=list)
    port: int = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


class Handler(BaseHTTPRequestHandler):
    state: FileServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.state.requests.append(asked)
        content = self.state.files.get(self.path.lstrip("/").partition("?")[0])
        start = int(asked[6:-1]) if asked and self.state.ranges else 0  # bytes=123-
        if content is None or self.state.status != 200 or start >= len(content):
            status = 416 if start else self.state.status
            self.send_error(404 if content is None else status)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        for name, value in self.state.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[start:][: self.state.cut_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = FileServer()
    handler = type("Handler", (Handler,), {"state": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        state.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture
def digest():
    return lambda content: f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def pack():
    def pack(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=mode) as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()

    return pack


@pytest.fixture
def tiny_set(tmp_path, make_images, server, pack, digest) -> DataSet:
    """A data set like CIFAR-10 with ten images in each split, which `server` serves."""
    source = tmp_path / "tiny-source"
    source.mkdir()
    splits = {"train": make_images(10), "test": make_images(10, seed=1)}
    write_cifar_binary(source, CIFAR10_BINARY, splits)
    files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
    content = pack({f"cifar-10-batches-bin/{name}": data for name, data in files.items()})
    server.files["tiny.tar.gz"] = content
    sums = {name: digest(data) for name, data in files.items() if name.endswith(".bin")}
    url = server.url("tiny.tar.gz")
    return DataSet(
        name="tiny",
        page="http://127.0.0.1/",
        layouts=(Layout(CIFAR10_BINARY.folder, sums, CIFAR10_BINARY),),
        archives=(Archive(url, len(content), digest(content), 1_000_000),),
    )
