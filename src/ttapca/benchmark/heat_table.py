"""Differences to one method under every corruption, as a table with coloured backgrounds."""

from __future__ import annotations

import math
from dataclasses import replace

from ttapca.benchmark.comparisons import Comparison
from ttapca.benchmark.difference_table import REFERENCES, difference_value
from ttapca.benchmark.tables import (
    MISSING,
    NO_INTERVALS,
    TEST,
    ResultTable,
    Value,
    decimals_of,
    error_value,
    heading,
    signed,
)

FULL_COLOUR = 5.0  # points; the strongest colour is that of the largest difference, or of this one


def heat_tables(comparison: Comparison) -> list[ResultTable]:
    """Return the differences to `bn` and to the untouched network under every corruption.

    A table has no line for the method that it compares with. There is none where that method was
    not measured, or nothing else was.
    """
    lines = comparison.lines
    references = [line for name in REFERENCES for line in lines.index[lines.method == name]]
    return [_heat_table(comparison, line) for line in references if len(lines) > 1]


def _heat_table(comparison: Comparison, reference: int) -> ResultTable:
    names = comparison.with_clean
    columns = [_column(comparison, reference, name) for name in names]
    several = len(comparison.corruptions) > 1
    if several:
        columns.insert(0, _mean_column(comparison, reference))
    largest = max(
        (abs(value.heat) for column in columns for value in column.values() if value.heat),
        default=0.0,
    )
    scale = max(largest, FULL_COLOUR)
    body = []
    for line, label in comparison.lines.label.items():
        if line == reference:
            continue
        values = [column.get(line, MISSING) for column in columns]
        body.append((Value(label), *(_coloured(value, scale) for value in values)))
    name = comparison.lines.label[reference]
    means = [f"Mean of {len(comparison.corruptions)}"] if several else []
    notes = [
        f"Each error minus that of {name}, in points: below zero it has fewer errors (blue), above "
        "zero more (orange).",
        f"In brackets and without colour: not told apart. {TEST} Each column is tested by itself."
        if comparison.standings()
        else NO_INTERVALS,
    ]
    return ResultTable(
        f"{comparison.conditions.title}: minus {name}",
        ("method", *means, *map(heading, names)),
        tuple(body),
        tuple(notes),
    )


def _coloured(value: Value, scale: float) -> Value:
    """Bring the colour of a value to the scale of the table; roots let small ones be seen."""
    if value.heat is None:
        return value
    return replace(value, heat=math.copysign(math.sqrt(abs(value.heat) / scale), value.heat))


def _column(comparison: Comparison, reference: int, corruption: str) -> dict[int, Value]:
    """Return the differences under one corruption, by line."""
    gaps = comparison.differences(reference, corruption)
    if gaps:
        return {line: difference_value(comparison, gap) for line, gap in gaps.items()}
    errors = {
        line: error_value(comparison, line, corruption).number for line in comparison.lines.index
    }
    return _plain(comparison, reference, errors)


def _mean_column(comparison: Comparison, reference: int) -> dict[int, Value]:
    gaps = comparison.differences(reference)
    if gaps:
        return {line: difference_value(comparison, gap) for line, gap in gaps.items()}
    return _plain(comparison, reference, comparison.lines["mean"].to_dict())


def _plain(
    comparison: Comparison, reference: int, errors: dict[int, float | None]
) -> dict[int, Value]:
    """Return differences that were not tested."""
    base, decimals = errors[reference], decimals_of(comparison)
    if base is None or math.isnan(base):
        return {}
    gaps = {line: error - base for line, error in errors.items() if error is not None}
    return {
        line: Value(signed(gap, decimals), gap, "number", heat=gap)
        for line, gap in gaps.items()
        if not math.isnan(gap)
    }
