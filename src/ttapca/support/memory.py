"""The peak memory of this process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

RESET_PEAK = "5"  # what Linux takes as the wish to forget a process's peak memory
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def forget_peak_memory() -> None:
    """Start to measure anew, where the system can; elsewhere a peak is that of the whole run."""
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_memory() -> float:
    """The highest resident memory of this process since it was forgotten, in MB.

    Not that of `getrusage` where it can be helped: there, Linux lets a process begin with the peak
    of the one that started it.

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
