"""How fast this machine does the two things that most of a fit's arithmetic consists of."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Large enough to run at nearly full speed, small enough for a twentieth of a second.
PRODUCT = 512
DECOMPOSED = 256


@dataclass(frozen=True)
class Speed:
    """Rates on one machine with its present number of threads.

    Attributes:
        products: Multiply-adds a second in a product of float64 matrices.
        decompositions: n^3 a second in the eigendecomposition of a symmetric n x n matrix.
    """

    products: float
    decompositions: float


def machine_speed() -> Speed:
    """Measure the machine, once for each number of threads.

    Example:
        >>> machine_speed().products > 0
        True
    """
    return _measured(torch.get_num_threads())


@functools.lru_cache
def _measured(_threads: int) -> Speed:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(PRODUCT, PRODUCT, generator=generator, dtype=torch.float64)
    small = matrix[:DECOMPOSED, :DECOMPOSED] + matrix[:DECOMPOSED, :DECOMPOSED].T
    product = _fastest(lambda: matrix @ matrix)
    decomposition = _fastest(lambda: torch.linalg.eigh(small))
    return Speed(PRODUCT**3 / product, DECOMPOSED**3 / decomposition)


def _fastest(work: Callable[[], object]) -> float:
    """Return the least seconds of three tries: the first one also loads the library."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
