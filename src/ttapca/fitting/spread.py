"""How the reading of data is spread over processes, and what that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ttapca.fitting.route_costs import RouteCost
from ttapca.support.machine_memory import resident_memory

# A worker gets its parts in so many tasks, so that a quick one can do more of them; in one task
# where each result is larger than this, since all of them travel.
TASKS_A_WORKER = 4
LARGE_RESULT = 2**26  # bytes


@dataclass(frozen=True)
class Spread:
    """How the reading of data is spread over processes.

    Attributes:
        parts: In how many parts the data are.
        workers: How many processes read at the same time.
        here: Whether they are on this machine, and share its memory.
        words: Who they are, for people.
        by_parts: Whether parts are given out, in tasks; else each process has data of its own.
    """

    parts: int
    workers: int
    here: bool
    words: str
    by_parts: bool = True

    def tasks(self, cost: RouteCost) -> int:
        """Return in how many tasks the parts are read."""
        each = 1 if cost.summed > LARGE_RESULT else TASKS_A_WORKER
        return min(self.parts, each * self.workers)

    def held(self, cost: RouteCost) -> float:
        """Return the bytes that one process holds while results are merged, at most."""
        # Sums of 1, 2, 4, ... tasks wait for others of as many, while one comes and is unpacked.
        waiting = math.ceil(math.log2(self.tasks(cost))) + 1 if self.by_parts else 1
        return (waiting + 2) * cost.summed + cost.beside

    def worker_bytes(self, cost: RouteCost, network_bytes: int) -> int:
        """Return the memory of a process that only reads, at most."""
        return int(resident_memory() + network_bytes + 2 * cost.summed + cost.beside)
