"""A service behind real sockets, in a thread of the tests."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
import time
from collections.abc import Callable

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
