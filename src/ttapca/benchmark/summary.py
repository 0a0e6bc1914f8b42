"""What a file of results says in short: the headline, what was run, what it cost, what failed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ttapca.benchmark.cells import CLEAN, Row
from ttapca.benchmark.row_groups import Grid, Place, Variant, done, grids, labels
from ttapca.benchmark.tables import MISSING, Table, Value, full_name, heading, title_of

SOURCE = "source"
BATCH_STATISTICS = "bn"


@dataclass(frozen=True)
class Fact:
    """One line of what was run: a name, and the values that occur."""

    name: str
    values: tuple[str, ...]


def main_grid(found: Sequence[Grid]) -> Grid:
    """The grid that a headline speaks of: the one with the most rows, the first of equals."""
    return max(found, key=lambda grid: sum(len(rows) for rows in grid.rows.values()))


def headline(rows: Sequence[Row]) -> list[str]:
    """Say in a few sentences what was found.

    Args:
        rows: Of a file of results.

    Returns:
        Sentences computed from the rows.

    Example:
        >>> headline([])
        ['Nothing has been measured yet.']
    """
    if not rows:
        return ["Nothing has been measured yet."]
    grid = main_grid(grids(rows))
    failed = sum(row.outcome.status == "failed" for row in rows)
    count = f"{len(rows):,} cells"
    end = f"{failed:,} of {count} failed." if failed else f"All {count} finished."
    return [*_finding(grid), end]


def _finding(grid: Grid) -> list[str]:
    means = {v: mean.mean for v in grid.variants if (mean := grid.mean(v)) is not None}
    if not means:
        return [f"{_where(grid.place)}, no method was measured on every corruption."]
    best = min(means, key=lambda variant: means[variant])
    names = labels(grid.variants)
    source = next((v for v in means if v.method == SOURCE), None)
    count = len(grid.corruptions)
    over = f"over {count} corruptions" if count > 1 else f"on {heading(grid.corruptions[0])}"
    others = [
        f"{percent(means[variant])} {words}"
        for method, words in (
            (SOURCE, "for the untouched network"),
            (BATCH_STATISTICS, "with batch statistics alone"),
        )
        for variant in means
        if variant.method == method and variant != best
    ]
    against = f", against {' and '.join(others)}" if others else ""
    if best == source:
        lead = f"no method beats the untouched network, {percent(means[best])} mean error {over}"
    else:
        lead = f"{names[best]} has the lowest mean error {over}, {percent(means[best])}{against}"
    sentences = [f"{_where(grid.place)}, {lead}."]
    unranked = [names[each] for each in grid.variants if each not in means]
    if unranked:
        sentences.append(f"Not ranked, for want of some corruptions: {', '.join(unranked)}.")
    if source is not None and best != source:
        sentences += _on_clean(grid, best, source, names[best])
    return sentences


def _where(place: Place) -> str:
    severity = f" at severity {place.severity}" if place.severity else ""
    return (
        f"With {place.model} on {place.data}{severity} ({place.setting}, batches of "
        f"{place.batch_size}, {place.images:,} images a corruption)"
    )


def _on_clean(grid: Grid, best: Variant, source: Variant, name: str) -> list[str]:
    ours, theirs = grid.error(best, CLEAN), grid.error(source, CLEAN)
    if ours is None or theirs is None:
        return []
    return [
        f"On clean images {name} has {percent(ours.mean)} where the untouched network has "
        f"{percent(theirs.mean)}."
    ]


def percent(number: float) -> str:
    """A percentage that does not break over two lines."""
    return f"{number:.1f}\u00a0%"


def facts(rows: Sequence[Row]) -> list[Fact]:
    """What was run, on what, with what.

    Args:
        rows: Of a file of results.

    Returns:
        Names and the values that occur, in the order in which they do.

    Example:
        >>> facts([])
        []
    """
    if not rows:
        return []
    cells = [row.cell for row in rows]
    ended = sorted(row.outcome.finished for row in rows)
    taken = sum(row.outcome.seconds for row in rows)
    return [
        _fact("network", (f"{cell.model} (weights {cell.weights})" for cell in cells)),
        _fact("data", (f"{cell.data} ({cell.corrupted})" for cell in cells)),
        _fact("corruptions", (full_name(cell.corruption) for cell in cells)),
        _fact("severities", (str(cell.severity) for cell in cells if cell.severity)),
        _fact("settings", (cell.setting for cell in cells)),
        _fact("methods", (cell.method for cell in cells)),
        _fact("images a corruption", (f"{cell.images:,}" for cell in cells)),
        _fact("batch sizes", (str(cell.batch_size) for cell in cells)),
        _fact("seeds", (str(cell.seed) for cell in cells)),
        _fact(
            "filter", (f"{c.components:,} components at {c.layer}" for c in cells if c.components)
        ),
        _fact("machine", (_pairs(row.outcome.machine) for row in rows)),
        _fact("versions", (_pairs(row.outcome.versions) for row in rows)),
        Fact("when", (f"{_time(ended[0])} to {_time(ended[-1])}",)),
        Fact("time in the methods", (_duration(taken),)),
    ]


def _fact(name: str, values: Iterable[str]) -> Fact:
    return Fact(name, tuple(dict.fromkeys(values)))


def _time(iso: str) -> str:
    """To the minute; results keep their times in UTC."""
    return f"{iso[:16].replace('T', ' ')} UTC"


def _pairs(table: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in table.items())


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def cost_table(grid: Grid) -> Table | None:
    """What each method costs, measured over all corruptions of one place.

    Args:
        grid: What was measured there.

    Returns:
        Time, parameters, memory, and what else tells methods apart; None when nothing is done.
    """
    names = labels(grid.variants)
    times = {
        variant: time for variant in grid.variants if (time := seconds_an_image(grid, variant))
    }
    if not times:
        return None
    source = next((time for variant, time in times.items() if variant.method == SOURCE), None)
    lines = []
    for variant in times:
        outcomes = [row.outcome for row in grid.of(variant)]
        ratio = times[variant] / source if source else None
        calibration = [o.calibration_error for o in outcomes if o.calibration_error is not None]
        entropy = [o.entropy for o in outcomes if o.entropy is not None]
        lines.append(
            (
                Value(names[variant]),
                _value(1000 * times[variant], ".2f"),
                _value(ratio, ".2f"),
                _value(max(outcome.parameters for outcome in outcomes), ","),
                _value(max(outcome.peak_memory for outcome in outcomes), ",.0f"),
                _value(sum(outcome.updates for outcome in outcomes), ","),
                _value(sum(outcome.skipped for outcome in outcomes), ","),
                _value(statistics.fmean(calibration) if calibration else None, ".1f"),
                _value(statistics.fmean(entropy) if entropy else None, ".3f"),
            )
        )
    columns = (
        "method",
        "ms an image",
        "times source",
        "parameters",
        "peak MB",
        "updates",
        "skipped",
        "calibration error",
        "entropy",
    )
    notes = (
        "Time is spent in the method, reading left out. Peak memory is the whole process's. "
        "Updates are counted over all corruptions; skipped are those that would not have been "
        "finite. Calibration error in percent, entropy in nats: means over the corruptions.",
    )
    return Table(title_of(grid.place), columns, tuple(lines), notes)


def seconds_an_image(grid: Grid, variant: Variant) -> float:
    """Seconds an image."""
    rows = grid.of(variant)
    images = sum(row.cell.images for row in rows)
    return sum(row.outcome.seconds for row in rows) / images if images else 0.0


def _value(number: float | None, form: str) -> Value:
    return MISSING if number is None else Value(f"{number:{form}}", float(number), "number")


def failure_table(rows: Iterable[Row]) -> Table | None:
    """Every cell that failed, and why.

    Args:
        rows: Of a file of results.

    Returns:
        The table; None when there is none.

    Example:
        >>> failure_table([]) is None
        True
    """
    failed = [row for row in rows if not done(row)]
    lines = tuple(
        (
            Value(row.cell.method),
            Value(row.cell.setting),
            Value(heading(row.cell.corruption)),
            Value(str(row.cell.severity), row.cell.severity, "number"),
            Value(str(row.cell.seed), row.cell.seed, "number"),
            Value(row.outcome.reason),
        )
        for row in failed
    )
    columns = ("method", "setting", "corruption", "severity", "seed", "reason")
    return Table("Cells that failed", columns, lines) if lines else None
