"""How long a run will take on this machine: each method is tried on one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ttapca.benchmark.cells import CLEAN, Cell
from ttapca.benchmark.grid import Unit
from ttapca.benchmark.protocol import adapted
from ttapca.benchmark.subject import Subject
from ttapca.datasets import to_tensor


def estimate_seconds(units: Sequence[Unit], subject: Subject) -> float:
    """Estimate what the methods of these units will need; making the images is not counted.

    Args:
        units: What `expand` gives.
        subject: What they are run on.

    Returns:
        Seconds: for each way to run a method, one batch is timed and stands for all of them.

    Example:
        >>> from torch import nn
        >>> from ttapca.benchmark.grid import expand
        >>> from ttapca.benchmark.plan import Plan
        >>> from ttapca.benchmark.image_source import ImageSource
        >>> from ttapca.datasets import read_digits
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> subject = Subject("mine", network, "digits", ImageSource(read_digits()[:50]))
        >>> units = expand(Plan(methods=("source",), data="digits"), subject)
        >>> estimate_seconds(units, subject) > 0
        True
    """
    pace: dict[Cell, float] = {}
    seconds = 0.0
    for unit in units:
        way = _way(unit.cells[0])
        if way not in pace:
            pace[way] = _seconds_an_image(way, subject)
        seconds += unit.images * pace[way]
    return seconds


def _way(cell: Cell) -> Cell:
    """The cell without what hardly changes its speed."""
    return Cell(**{**vars(cell), "corruption": CLEAN, "severity": 0, "seed": 0})


def _seconds_an_image(cell: Cell, subject: Subject) -> float:
    batch = to_tensor(subject.source.clean.images[: cell.batch_size])
    with adapted(cell, subject) as adapter:
        adapter(batch[:2])  # the first call of all allocates and loads
        start = time.perf_counter()
        adapter(batch)
        return (time.perf_counter() - start) / len(batch)
