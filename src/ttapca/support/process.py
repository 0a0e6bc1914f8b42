"""This process: the memory that it has and can get, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def available_memory(cgroups: Path = CGROUPS, proc: Path = PROC) -> int | None:
    """Return how many bytes this process can still get, with caches; None if that is unknown."""
    limits = list(_group_limits(cgroups, proc))
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text().splitlines()
        limits += [_kilobytes(line) for line in lines if line.startswith("MemAvailable:")]
    if not limits:
        with suppress(OSError, ValueError, AttributeError):  # macOS tells no more
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return max(0, min(limits)) if limits else None


def resident_memory() -> int:
    """Return how many bytes of memory this process has now."""
    return _of_this_process("VmRSS:")


def peak_memory() -> float:
    """Return in MB the highest resident memory of this process since `forget_peak_memory`."""
    return _of_this_process("VmHWM:") / 1e6


def forget_peak_memory() -> None:
    """Start to measure the peak anew on Linux; elsewhere it is that of the whole run."""
    with suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")


def _of_this_process(entry: str) -> int:
    """Return bytes by Linux's own count; elsewhere the peak, which a child would inherit there."""
    with suppress(OSError, ValueError, IndexError):
        for line in (PROC / "self" / "status").read_text().splitlines():
            if line.startswith(entry):
                return _kilobytes(line)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kilobytes(line: str) -> int:
    return int(line.split()[1]) * 1024


def _group_limits(cgroups: Path, proc: Path) -> Iterator[int]:
    """Yield the bytes that each control group (version 2) of this process leaves to it."""
    parts: list[str] = []
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                parts = [part for part in line[3:].split("/") if part not in ("", "..")]
    # Inside a container the group's own path may not be there; then the root stands for it.
    for depth in range(len(parts) + 1):
        folder = cgroups.joinpath(*parts[:depth])
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            most = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                used -= int(value) if name == "inactive_file" else 0
            yield most - used


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C in the block; processes that it starts inherit the blocked signal."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
