"""The programs of docs/production.md that need packages of others: run as a user runs them.

LitServe and Ray are not in the extra `dev`: Ray is large, and LitServe brings another event loop
for uvicorn, with which the tests of our own service would run.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import ttapca
from ttapca.serving import StreamPool

PAGE = Path(__file__).parents[2] / "docs" / "production.md"
PATIENCE = 120  # seconds until a server answers, on a busy machine


def program(package: str) -> str:
    """Return the program of the page that imports a package."""
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    return next(block for block in blocks if re.search(rf"^(import|from) {package}\b", block, re.M))


@pytest.fixture(params=["litserve", "ray"])
def address(request: pytest.FixtureRequest, filter_folder: Path, tmp_path: Path) -> Iterator[str]:
    """Where a program of the page answers."""
    pytest.importorskip(request.param)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "my-filter").symlink_to(filter_folder)
    file = tmp_path / "program.py"
    file.write_text(program(request.param).replace("8000", str(port)))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log.txt").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, file],
            cwd=tmp_path,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}/predict"
        finally:
            running.send_signal(signal.SIGINT)
            try:
                running.wait(PATIENCE)
            finally:
                running.kill()


def ask(address: str, stream: str, images: NDArray[np.float32]) -> httpx.Response:
    """Ask, as soon as somebody answers."""
    for _ in range(2 * PATIENCE):
        try:
            found = httpx.post(address, json={"stream": stream, "images": images.tolist()})
            if found.status_code not in (404, 503):  # neither is ready yet
                return found
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail("There is no answer.")


def test_the_program_answers_as_a_pool(
    address: str, digits_network: nn.Module, filter_folder: Path, images: NDArray[np.uint8]
) -> None:
    digits = (images.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    noise = np.random.default_rng(0).normal(0, 0.5, (8, 20, 1, 8, 8)).astype(np.float32)
    adapted = False
    with StreamPool(digits_network, ttapca.load(filter_folder)) as pool:
        for number in range(8):
            some = digits[20 * number : 20 * number + 20] + noise[number] * (number > 2)
            found = ask(address, "camera", some)
            expected = pool.predict("camera", torch.from_numpy(some))
            assert found.json() == {
                "classes": expected.logits.argmax(1).tolist(),
                "adapted": expected.adapted,
            }
            adapted |= expected.adapted
    assert adapted
    refused = ask(address, "camera", digits[:, :, :4])
    assert refused.status_code == 400
    assert "Images must have the shape" in refused.json()["detail"]
