"""What a number was measured with: versions and machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ttapca._version import __version__

PROCESSORS = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Of what computes.

    Example:
        >>> sorted(versions())
        ['numpy', 'python', 'torch', 'ttapca']
    """
    return {
        "ttapca": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, str]:
    """Where it computes.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'system', 'threads']
    """
    return {
        "cpu": _processor(),
        "cores": str(os.cpu_count() or 1),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        lines = PROCESSORS.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core.

    For tensors as small as those of the digits it is faster, and sums are rounded alike however
    many cores there are.

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
