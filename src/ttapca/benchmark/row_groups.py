"""Rows sorted into grids: what is compared with what, and what several seeds gave together.

A *place* is what all numbers of one table share: network, data, severity, setting, batch size. A
*variant* is one line of it: a method with its options. A line's mean counts only seeds for which
every corruption of the grid was measured, so that means are of the same things.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ttapca.benchmark.cells import CLEAN, Cell, Row
from ttapca.corruptions import CORRUPTIONS


@dataclass(frozen=True)
class Place:
    """What all numbers of one table share."""

    model: str
    weights: str
    data: str
    corrupted: str
    severity: int
    setting: str
    batch_size: int
    images: int


@dataclass(frozen=True)
class Variant:
    """One line of a table: a method and its options."""

    method: str
    options: str
    layer: str
    components: int
    steps: int
    lr: float


@dataclass(frozen=True)
class Spread:
    """What several seeds gave.

    Attributes:
        mean: Over seeds.
        deviation: Standard deviation over seeds; None for a single one.
        count: Seeds.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise.

        Args:
            values: One a seed, at least one.

        Returns:
            Their mean and standard deviation.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, deviation=1.0, count=3)
        """
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Grid:
    """All that was measured in one place.

    Attributes:
        place: What the numbers share.
        corruptions: The columns, in the paper's order; clean images are none of them, unless
            nothing else was measured.
        variants: The lines, in the order in which they were run.
        rows: By line and corruption, `clean` included: one row a seed.
    """

    place: Place
    corruptions: tuple[str, ...]
    variants: tuple[Variant, ...]
    rows: Mapping[tuple[Variant, str], tuple[Row, ...]]

    def at(self, variant: Variant, corruption: str) -> tuple[Row, ...]:
        """The rows of one cell of the table, one a seed."""
        return self.rows.get((variant, corruption), ())

    def of(self, variant: Variant) -> list[Row]:
        """All rows of a line that are done, clean images left out."""
        return [row for name in self.corruptions for row in self.at(variant, name) if done(row)]

    def error(self, variant: Variant, corruption: str) -> Spread | None:
        """The error in one cell of the table, or None when no seed is done."""
        values = [error_of(row) for row in self.at(variant, corruption) if done(row)]
        return Spread.of(values) if values else None

    def mean(self, variant: Variant) -> Spread | None:
        """The mean error of a line over all corruptions, or None when no seed has them all."""
        by_seed: dict[int, list[float]] = {}
        for row in self.of(variant):
            by_seed.setdefault(row.cell.seed, []).append(error_of(row))
        whole = [errors for errors in by_seed.values() if len(errors) == len(self.corruptions)]
        return Spread.of([statistics.fmean(errors) for errors in whole]) if whole else None

    @property
    def seeds(self) -> list[int]:
        """Every seed that was used."""
        return sorted({row.cell.seed for rows in self.rows.values() for row in rows})


def done(row: Row) -> bool:
    """Whether a row holds a number."""
    return row.outcome.status == "done" and row.outcome.error is not None


def error_of(row: Row) -> float:
    """The error of a row that is done."""
    return float(row.outcome.error or 0.0)


def place_of(cell: Cell) -> Place:
    """The table a cell belongs to."""
    return Place(*(getattr(cell, field.name) for field in dataclasses.fields(Place)))


def variant_of(cell: Cell) -> Variant:
    """The line a cell belongs to."""
    return Variant(*(getattr(cell, field.name) for field in dataclasses.fields(Variant)))


def grids(rows: Iterable[Row]) -> list[Grid]:
    """Sort rows into grids.

    Clean images have no severity: they join every grid that is otherwise of the same place, and
    make one of their own where there is none.

    Args:
        rows: In the order in which they were run.

    Returns:
        One grid a place, in the order in which the places appear.

    Example:
        >>> grids([])
        []
    """
    places: dict[Place, list[Row]] = {}
    for row in rows:
        places.setdefault(place_of(row.cell), []).append(row)
    clean = {place: rows for place, rows in places.items() if place.severity == 0}
    joined: set[Place] = set()
    found = []
    for place, own in places.items():
        without = dataclasses.replace(place, severity=0)
        if place.severity > 0:
            joined.add(without)
            found.append(_grid(place, [*own, *clean.get(without, [])]))
        else:
            found.append(_grid(place, own))
    return [grid for grid in found if grid.place not in joined]


def _grid(place: Place, rows: list[Row]) -> Grid:
    cells: dict[tuple[Variant, str], tuple[Row, ...]] = {}
    for row in rows:
        key = (variant_of(row.cell), row.cell.corruption)
        cells[key] = (*cells.get(key, ()), row)
    variants = tuple(dict.fromkeys(variant for variant, _ in cells))
    names = dict.fromkeys(name for _, name in cells if name != CLEAN)
    order = {name: number for number, name in enumerate(CORRUPTIONS)}
    columns = sorted(names, key=lambda name: order.get(name, len(order)))
    return Grid(place, tuple(columns) or (CLEAN,), variants, cells)


def labels(variants: Sequence[Variant]) -> dict[Variant, str]:
    """Name each line by its method, and by what tells it from the others of the same method.

    Args:
        variants: The lines of one table.

    Returns:
        A label for each.

    Example:
        >>> one = Variant("ttapca-exp", "{}", "conv1", 500, 1, 0.001)
        >>> two = dataclasses.replace(one, components=2000)
        >>> list(labels([one, two]).values())
        ['ttapca-exp, L = 500', 'ttapca-exp, L = 2000']
    """
    return {
        each: _label(each, [other for other in variants if other.method == each.method])
        for each in variants
    }


def _label(variant: Variant, siblings: list[Variant]) -> str:
    words = [variant.method]
    for name, write in _WRITERS.items():
        if len({getattr(each, name) for each in siblings}) > 1:
            words.append(write(getattr(variant, name)))
    return ", ".join(word for word in words if word)


def _options(text: str) -> str:
    return ", ".join(f"{name} = {value}" for name, value in json.loads(text).items())


_WRITERS = {
    "components": lambda value: f"L = {value}" if value else "no filter",
    "layer": lambda value: f"at {value}" if value else "",
    "steps": lambda value: f"{value} step{'s' if value != 1 else ''}",
    "lr": lambda value: f"lr {value:g}",
    "options": _options,
}
