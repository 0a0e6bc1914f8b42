"""`make serve`: a service with a network that ships, and cameras whose images get worse.

Both run until Ctrl-C. The service's log goes to a file: the terminal shows the cameras.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

TTAPCA = [sys.executable, "-m", "ttapca"]
STARTING = 600  # seconds: the first start may fit a filter
# For each camera what it sees; every camera begins clean.
SCHEDULES = {
    "digits": (
        "clean 15s, frost:5 60s, clean 30s",
        "clean 35s, brightness:5 60s, clean 10s",
        "clean 60s",
    ),
    "cifar10": (
        "clean 15s, gaussian_noise:5 60s, clean 30s",
        "clean 35s, defocus_blur:5 60s, clean 10s",
        "clean 60s",
    ),
}
NETWORKS = {"digits": "digits", "cifar10": "cifar10-resnet20"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=SCHEDULES, default="digits")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    if is_taken(asked.port):
        taken = f"error: port {asked.port} is taken. Choose another: make serve PORT=8001"
        print(taken, file=sys.stderr)
        return 1
    url = f"http://127.0.0.1:{asked.port}"
    log = Path(tempfile.mkdtemp(prefix="ttapca-serve-")) / "serve.log"
    command = [*TTAPCA, "serve", NETWORKS[asked.data], "--port", str(asked.port)]
    # Of a session of its own, so that Ctrl-C reaches the cameras first and the service after them.
    with log.open("w") as file:
        service = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        if not is_up(service, url):
            print(log.read_text(), end="", file=sys.stderr)
            return 1
        print(f"Open {url} and watch: camera-1 degrades after 15 s, camera-2 after 35 s.")
        print(f"Switch a camera off there, and see its share of right answers here. Log: {log}")
        print("Ctrl-C ends it.", flush=True)
        return feed(url, asked.data)
    except KeyboardInterrupt:  # before there were cameras
        return 0
    finally:
        service.terminate()  # it saves what is to be saved, and ends
        service.wait(timeout=30)


def is_taken(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def is_up(service: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the service answers; False if it has ended instead."""
    for _ in range(4 * STARTING):
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=10):
                return True
        except (OSError, urllib.error.URLError):
            try:
                service.wait(timeout=0.25)
            except subprocess.TimeoutExpired:
                continue
            return False
    return False


def feed(url: str, data: str) -> int:
    schedules = [word for text in SCHEDULES[data] for word in ("--schedule", text)]
    streams = ["--streams", str(len(SCHEDULES[data])), "--loop", "--order", "shuffled"]
    cameras = subprocess.Popen([*TTAPCA, "feed", url, "--data", data, *streams, *schedules])
    try:
        return cameras.wait()
    except KeyboardInterrupt:  # the cameras have had it too, and end with a summary
        cameras.wait(timeout=30)
        return 0


if __name__ == "__main__":
    sys.exit(main())
