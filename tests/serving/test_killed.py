"""A pool that is killed goes on with whole states, and loses no more than the last moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ttapca
from ttapca.serving import StreamPool, StreamStore

KILLED_AFTER = (40, 170)
PROGRAM = """
import sys, torch, ttapca
from torch import nn
from ttapca.serving import StreamPool, StreamStore
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)).eval()
pool = StreamPool(model, ttapca.load(sys.argv[1]), store=StreamStore(sys.argv[2]), save_every=0.1)
turn = 0
while True:
    for name in ("a", "b"):
        pool.predict(name, torch.rand(1, 1, 8, 8))
    turn += 1
    if turn % 10 == 0:
        pool.save()
        print(turn, flush=True)
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)).eval()


def killed_after(requests: int, folder: Path) -> int:
    """Serve in another process, kill it after so many requests, and return how many it saved."""
    command = [sys.executable, "-c", PROGRAM, str(folder / "filter"), str(folder / "s.sqlite")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if int(line) >= requests:
                process.send_signal(signal.SIGKILL)
                break
        saved = int(line)
        for last in process.stdout:  # what it said before the signal came
            saved = int(last)
    assert process.returncode == -signal.SIGKILL
    return saved


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_what_was_saved_survives_a_kill(tmp_path: Path) -> None:
    model = network()
    data = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    fitted = ttapca.fit(model, "0", data)
    fitted.save(tmp_path / "filter")
    before = {"a": 0, "b": 0}
    for turn, requests in enumerate(KILLED_AFTER, start=1):
        saved = killed_after(requests, tmp_path)
        with (
            StreamStore(tmp_path / "s.sqlite") as store,
            StreamPool(model, fitted, store=store) as pool,
        ):
            for name, images in before.items():
                health = pool.status(name).health  # reads and checks the whole state
                assert images + saved <= health.images
                before[name] = health.images
            # Both were saved in one step: none is ahead by more than one request for each kill.
            assert 0 <= before["a"] - before["b"] <= turn
    assert before["a"] >= sum(KILLED_AFTER)
