"""A service behind real sockets: in a thread of the tests, or in a process of its own."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ttapca.serving.http_server import DrainingServer

PATIENCE = 300.0  # seconds that a busy machine may take


def until(true: Callable[[], object]) -> None:
    """Wait for something that must become true."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Running:
    """A server in another thread."""

    def __init__(self, server: DrainingServer, listening: socket.socket) -> None:
        self.server, self.address = server, listening.getsockname()[:2]
        self._thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def http(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=PATIENCE)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._thread.is_alive():
            self.server.handle_exit(number, None)
            self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@contextmanager
def started(
    words: str,
    folder: Path,
    *,
    program: Sequence[str] = ("-m", "ttapca"),
    stderr: int = subprocess.PIPE,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `ttapca serve` as systemd does; yield the process and its port."""
    with subprocess.Popen(
        [sys.executable, *program, "serve", *words.split(), "--port", "0"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("http://127.0.0.1:"), first
            yield process, int(first.split()[0].rpartition(":")[2])
        finally:
            process.kill()
