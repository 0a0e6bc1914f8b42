"""The cells of the paper's Tables 1 and 2, kept as data: `paper.toml` has them as printed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttapca.corruptions import STANDARD

SEVERITY = 5
BATCH_SIZE = 200
COMPONENTS = 2000
STEPS = 1
LR = 1e-3
NETWORK = "WRN-28-10"
IMAGES = 10_000
CORRUPTIONS = STANDARD

_FILE = Path(__file__).with_name("paper.toml")
_ROUNDING = 0.01  # half a unit of the cells and half a unit of the mean


@dataclass(frozen=True)
class PaperRow:
    """One method of one of the two tables.

    Attributes:
        table: 1 (episodic) or 2 (online).
        setting: `episodic` or `online`.
        data: `cifar10` or `cifar100`.
        method: Its name in this library.
        printed_name: Its name in the paper.
        errors: Percent, by corruption, in the paper's order.
        spreads: The standard deviations that are printed, by corruption.
        printed_mean: The mean as printed.

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
    errors: Mapping[str, float]
    spreads: Mapping[str, float]
    printed_mean: float

    @property
    def mean(self) -> float:
        """The average of the row."""
        return sum(self.errors.values()) / len(self.errors)

    @property
    def mean_differs(self) -> bool:
        """Whether the printed mean is another number than the row's average."""
        return abs(self.mean - self.printed_mean) > _ROUNDING


@lru_cache(maxsize=1)
def paper_rows() -> tuple[PaperRow, ...]:
    """Every row of both tables, in the paper's order.

    Returns:
        Sixteen rows: five methods on each data set in Table 1, three in Table 2.

    Example:
        >>> len(paper_rows())
        16
    """
    content = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    columns = content["columns"]
    return tuple(_row(columns, entry) for entry in content["row"])


def _row(columns: list[str], entry: dict[str, Any]) -> PaperRow:
    errors = dict(zip(columns, entry.pop("errors"), strict=True))
    spreads = entry.pop("spreads", {})
    return PaperRow(errors=MappingProxyType(errors), spreads=MappingProxyType(spreads), **entry)


def paper_row(data: str, setting: str, method: str) -> PaperRow | None:
    """Find one row.

    Args:
        data: A data set's name; `CIFAR-10-C` is the same as `cifar10`.
        setting: `episodic` or `online`.
        method: A name of this library.

    Returns:
        The row, or None when the paper has none.

    Example:
        >>> paper_row("digits", "episodic", "tent") is None
        True
    """
    name = _plain(data)
    for row in paper_rows():
        if (row.data, row.setting, row.method) == (name, setting, method):
            return row
    return None


def _plain(data: str) -> str:
    return data.lower().replace("-", "").replace("_", "").removesuffix("c")
