"""Work and networks that kill the process they run in; importable by worker processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmark.worlds import small_subject
from ttapca.benchmark import Subject
from ttapca.engines.artifacts import Artifact

ONCE, ALWAYS = 5, 7  # sizes of batches


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def first_time(marker: Path) -> bool:
    """Whether no process has been here before."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Deadly(nn.Module):
    """A network that kills its process at batches of one size, and once at those of another.

    Args:
        network: What it is otherwise.
        folder: Remembers that it has killed; None for a network that does not.
    """

    def __init__(self, network: nn.Module, folder: Path | None) -> None:
        super().__init__()
        self.network, self.folder = network, folder

    def forward(self, images: Tensor) -> Tensor:
        if self.folder is not None:
            once = len(images) == ONCE and first_time(self.folder / "killed")
            if once or len(images) == ALWAYS:
                kill_myself()
        return self.network(images)


def raise_at_two(task: int) -> tuple[int, int]:
    """Return process and threads, unless it is task two."""
    if task == 2:
        raise FileNotFoundError("no such task")
    return os.getpid(), torch.get_num_threads()


def kill_at_one(task: int) -> int:
    if task == 1:
        kill_myself()
    return task


def sum_of_artifact(artifact: Artifact[list[int]], task: int) -> int:
    return sum(artifact.open()) + task


def deadly_subject(folder: Path | None) -> Subject:
    subject = small_subject()
    assert subject.fitted is not None
    fitted = replace(subject.fitted, layer=f"network.{subject.fitted.layer}")
    return replace(subject, network=Deadly(subject.network, folder), fitted=fitted)


def wait_for(happened: Callable[[], bool], seconds: float = 300) -> bool:
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return happened()
