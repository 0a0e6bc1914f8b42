"""Readers with every fault that the runner must notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from fuzz.mutations import Target
from ttapca.errors import DataFormatError


def make(folder: Path) -> Path:
    (folder / "file.bin").write_bytes(bytes(range(256)))
    return folder / "file.bin"


def hang(path: Path) -> None:
    while True:
        pass


def refuse(path: Path) -> None:
    raise DataFormatError(f"{path} is damaged.")


def refuse_without_a_name(path: Path) -> None:
    raise DataFormatError("It is damaged.")


def ask_for_memory(path: Path) -> None:
    try:
        np.empty(10**10, np.uint8)
    except MemoryError as error:
        raise DataFormatError(f"{path} is damaged.") from error


TARGETS = [
    Target("data", make, lambda path: path.read_bytes()),
    Target("refused", make, refuse),
    Target("unnamed", make, refuse_without_a_name),
    Target("raw", make, lambda path: path.read_bytes()[10**6]),
    Target("hang", make, hang),
    Target("crash", make, lambda path: os.kill(os.getpid(), signal.SIGKILL)),
    Target("memory", make, ask_for_memory),
]
