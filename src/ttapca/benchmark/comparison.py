"""Our numbers beside the paper's: the same corruptions, the same protocol, the difference."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ttapca.benchmark import paper
from ttapca.benchmark.cells import Row
from ttapca.benchmark.paper import PaperRow, paper_row
from ttapca.benchmark.row_groups import Grid, Spread, Variant, grids
from ttapca.benchmark.tables import (
    MISSING,
    Table,
    Value,
    error_value,
    heading,
    images_of,
    mean_value,
    title_of,
)


def comparison_tables(rows: Iterable[Row]) -> list[Table]:
    """Our numbers beside the paper's, where it has the data set, the setting and the method.

    Args:
        rows: Of a file of results.

    Returns:
        One table for each network, data set and setting that the paper has too: of the grid with
        the most corruptions and images.

    Example:
        >>> comparison_tables([])
        []
    """
    fullest: dict[tuple[str, ...], Grid] = {}
    for grid in grids(rows):
        place = grid.place
        key = (place.model, place.weights, place.data, place.setting)
        if place.batch_size == paper.BATCH_SIZE and place.severity == paper.SEVERITY:
            fullest[key] = max(fullest.get(key, grid), grid, key=_fullness)
    return [table for grid in fullest.values() if (table := comparison_table(grid)) is not None]


def _fullness(grid: Grid) -> tuple[int, int]:
    return len(grid.corruptions), grid.place.images


def comparison_table(grid: Grid) -> Table | None:
    """Ours, the paper's, the difference: three lines a method.

    Args:
        grid: What was measured in one place.

    Returns:
        The table, of the paper's corruptions only, or None when the paper has nothing to compare
        with: another data set, severity, setting or batch size.
    """
    place = grid.place
    if (place.severity, place.batch_size) != (paper.SEVERITY, paper.BATCH_SIZE):
        return None
    shared = tuple(name for name in grid.corruptions if name in paper.CORRUPTIONS)
    grid = replace(grid, corruptions=shared)
    lines: list[tuple[Value, ...]] = []
    for variant in _nearest_to_paper(grid.variants):
        printed = paper_row(place.data, place.setting, variant.method)
        if printed is not None and shared:
            lines += _compared(grid, variant, printed)
    if not lines:
        return None
    columns = ("method", f"Mean of {len(shared)}", *(heading(name) for name in shared))
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} images a corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{place.model}, {images_of(place)}.",
        "Means are computed from the cells; a printed mean is shown where it is another number.",
        "Difference: ours minus the paper's; below zero, ours has fewer errors.",
    )
    return Table(f"{title_of(place)}: ours and the paper's", columns, tuple(lines), notes, False)


def _nearest_to_paper(variants: Sequence[Variant]) -> list[Variant]:
    """Of each method the one line whose options are nearest to the paper's."""

    def distance(variant: Variant) -> tuple[bool, float, float, float]:
        components = abs(variant.components - paper.COMPONENTS) if variant.components else 0
        steps = abs(variant.steps - paper.STEPS) if variant.steps else 0
        lr = abs(variant.lr - paper.LR) if variant.lr else 0.0
        return variant.options != "{}", steps, lr, components

    methods = dict.fromkeys(variant.method for variant in variants)
    return [min((v for v in variants if v.method == m), key=distance) for m in methods]


def _compared(grid: Grid, variant: Variant, printed: PaperRow) -> list[tuple[Value, ...]]:
    names = grid.corruptions
    theirs = statistics.fmean(printed.errors[name] for name in names)
    own = (mean_value(grid, variant), *(error_value(grid, variant, name) for name in names))
    gaps = [_difference(grid.error(variant, name), printed.errors[name]) for name in names]
    whole = len(names) == len(printed.errors)
    note = f"printed {printed.printed_mean:.2f}" if whole and printed.mean_differs else ""
    mean = Value(f"{theirs:.2f}" + (f" ({note})" if note else ""), theirs, "number", note=note)
    whose = [Value(f"{variant.method}, {who}") for who in ("ours", "paper", "difference")]
    return [
        (whose[0], *own),
        (whose[1], mean, *(_paper_cell(printed, name) for name in names)),
        (whose[2], _difference(grid.mean(variant), theirs), *gaps),
    ]


def _paper_cell(printed: PaperRow, corruption: str) -> Value:
    error, spread = printed.errors[corruption], printed.spreads.get(corruption)
    return Value(f"{error:.2f}" + (f" ±{spread:.2f}" if spread else ""), error, "number")


def _difference(ours: Spread | None, theirs: float) -> Value:
    if ours is None:
        return MISSING
    gap = ours.mean - theirs
    return Value(f"{gap:+.2f}".replace("-", "−"), gap, "number")  # noqa: RUF001
