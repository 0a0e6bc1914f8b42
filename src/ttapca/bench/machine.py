"""What a number was measured with: versions, machine, memory."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path

import numpy as np
import torch

from ttapca._version import __version__

RESET_PEAK = "5"  # what Linux takes as the wish to forget a process's peak memory
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
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


def forget_peak_memory() -> None:
    """Start to measure anew, where the system can; elsewhere a peak is that of the whole run."""
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_memory() -> float:
    """The highest resident memory of this process since it was forgotten, in MB.

    Example:
        >>> peak_memory() > 10
        True
    """
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024 / 1e6
    except OSError:
        pass
    import resource  # not on Windows, which has no other way either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
