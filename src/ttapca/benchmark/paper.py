"""What the paper measured and with which options; `paper.toml` has its Tables 1 and 2."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

METHODS = ("source", "bn", "tent", "ttapca-exp", "ttapca-relu")
SEVERITY = 5
BATCH_SIZE = 200
COMPONENTS = 2000
STEPS = 1
LR = 1e-3
NETWORK = "WRN-28-10"
IMAGES = 10_000

_ROUNDING = 0.01  # half a unit of the errors and half a unit of the mean


@dataclass(frozen=True)
class PaperRow:
    """One method of one of the two tables.

    Attributes:
        table: 1 (episodic) or 2 (online).
        setting: `episodic` or `online`.
        data: `cifar10` or `cifar100`.
        method: Its name in this library.
        printed_name: Its name in the paper.
        printed_mean: The mean as printed.
        errors: In percent, by corruption, in the paper's order.
        spreads: The standard deviations that the paper prints, by corruption.

    Example:
        >>> tent = paper_row("cifar10", "episodic", "tent")
        >>> tent.errors["fog"], round(tent.mean, 2), tent.printed_mean, tent.mean_differs
        (15.23, 20.42, 19.96, True)
    """

    table: int
    setting: str
    data: str
    method: str
    printed_name: str
    printed_mean: float
    errors: Mapping[str, float]
    spreads: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The average of the row."""
        return statistics.fmean(self.errors.values())

    @property
    def mean_differs(self) -> bool:
        """Whether the printed mean is not the row's average."""
        return abs(self.mean - self.printed_mean) > _ROUNDING


@cache
def paper_rows() -> tuple[PaperRow, ...]:
    """Return every row of both tables, in the paper's order.

    Example:
        >>> len(paper_rows())  # five methods on each data set in Table 1, three in Table 2
        16
    """
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = []
    for entry in content["row"]:
        errors = dict(zip(content["columns"], entry.pop("errors"), strict=True))
        found.append(PaperRow(**{"spreads": {}, **entry}, errors=errors))
    return tuple(found)


def paper_row(data: str, setting: str, method: str) -> PaperRow | None:
    """Return one row, or None where the paper has none; `CIFAR-10-C` is the same as `cifar10`.

    Example:
        >>> paper_row("digits", "episodic", "tent") is None
        True
    """
    name = data.lower().replace("-", "").replace("_", "").removesuffix("c")
    wanted = (name, setting, method)
    return next((r for r in paper_rows() if (r.data, r.setting, r.method) == wanted), None)
