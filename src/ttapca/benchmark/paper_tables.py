"""Our errors beside the paper's."""

from __future__ import annotations

import statistics
from dataclasses import replace

from ttapca.benchmark import paper
from ttapca.benchmark.comparisons import Comparison, Rows, comparisons, nearest_to_paper
from ttapca.benchmark.tables import (
    INTERVAL,
    MISSING,
    Line,
    ResultTable,
    Value,
    error_value,
    heading,
    mean_value,
    signed,
)
from ttapca.corruptions import STANDARD


def paper_tables(rows: Rows) -> list[ResultTable]:
    """Return our errors beside the paper's, where it has the data set, the setting and the method.

    Each table is made from the comparison with the most corruptions and images.

    Example:
        >>> paper_tables([])
        []
    """

    def size(each: Comparison) -> tuple[int, int]:
        return len(each.corruptions), each.conditions.images

    fullest: dict[tuple[str, ...], Comparison] = {}
    for each in comparisons(rows):
        ours = each.conditions
        key = (ours.model, ours.weights, ours.data, ours.setting)
        if (ours.severity, ours.batch_size) == (paper.SEVERITY, paper.BATCH_SIZE):
            fullest[key] = max(fullest.get(key, each), each, key=size)
    return [table for each in fullest.values() if (table := _paper_table(each)) is not None]


def _paper_table(comparison: Comparison) -> ResultTable | None:
    """Return three lines for each method: ours, the paper's, the difference."""
    ours = comparison.conditions
    shared = tuple(name for name in comparison.corruptions if name in STANDARD)
    comparison = replace(comparison, corruptions=shared)
    lines: list[Line] = []
    for line, method in nearest_to_paper(comparison.lines, ["method"]).method.items():
        printed = paper.paper_row(ours.data, ours.setting, method)
        if printed is not None and shared:
            lines += _beside_paper(comparison, line, printed)
    if not lines:
        return None
    columns = ("method", f"Mean of {len(shared)}", *map(heading, shared))
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} images per corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{ours.model}, {ours.images:,} images per corruption.",
        "Means are computed from the errors shown; where the paper prints another mean, it is "
        "added in brackets.",
        "Difference: ours minus the paper's; below zero, ours has fewer errors.",
        *([f"{INTERVAL}; the paper prints standard deviations."] if comparison.standings() else []),
    )
    return ResultTable(f"{ours.title}: ours and the paper's", columns, tuple(lines), notes, False)


def _beside_paper(comparison: Comparison, line: int, printed: paper.PaperRow) -> list[Line]:
    names, method = comparison.corruptions, printed.method
    own = [mean_value(comparison, line), *(error_value(comparison, line, n) for n in names)]
    errors = [printed.errors[name] for name in names]
    errors = [statistics.fmean(errors), *errors]
    whole = len(names) == len(printed.errors)
    note = f"printed {printed.printed_mean:.2f}" if whole and printed.mean_differs else ""
    spreads = {name: f" ±{spread:.2f}" for name, spread in printed.spreads.items()}
    ends = [f" ({note})" if note else "", *(spreads.get(name, "") for name in names)]
    theirs = [
        Value(f"{error:.2f}{end}", error, "number") for error, end in zip(errors, ends, strict=True)
    ]
    theirs[0] = replace(theirs[0], note=note)
    gaps = [_difference(value, error) for value, error in zip(own, errors, strict=True)]
    return [
        (Value(f"{method}, ours"), *own),
        (Value(f"{method}, paper"), *theirs),
        (Value(f"{method}, difference"), *gaps),
    ]


def _difference(ours: Value, theirs: float) -> Value:
    if ours.number is None:
        return MISSING
    gap = ours.number - theirs
    return Value(signed(gap, 2), gap, "number")
