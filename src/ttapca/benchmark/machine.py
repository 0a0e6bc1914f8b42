"""What results were measured with: versions and machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ttapca import __version__

PROCESSORS = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """The versions of ttapca, torch, numpy and Python."""
    return {
        "ttapca": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, str]:
    """Processor, cores, threads and operating system."""
    try:
        lines = PROCESSORS.read_text().splitlines()
    except OSError:
        lines = [f"model name:{platform.processor()}"]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": next(filter(None, names), platform.machine()),
        "cores": str(os.cpu_count() or 1),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core.

    For tensors as small as those of the digits it is faster, and sums are rounded alike on any
    number of cores.

    Example:
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
