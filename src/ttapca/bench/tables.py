"""The paper's tables, made of rows: methods by corruptions, ours beside the paper's, and costs.

A `Table` is what any surface can show: a terminal, a page, a LaTeX file. It knows numbers and the
text they are shown as; it knows no markup.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttapca.bench import paper
from ttapca.bench.cells import CLEAN, Row
from ttapca.bench.grids import Grid, Place, Spread, Variant, grids, labels
from ttapca.bench.paper import PaperRow, paper_row

Kind = Literal["text", "number", "failed", "missing"]

SHORT = {
    "gaussian_noise": "Gauss",
    "shot_noise": "Shot",
    "impulse_noise": "Impulse",
    "defocus_blur": "Defocus",
    "glass_blur": "Glass",
    "motion_blur": "Motion",
    "zoom_blur": "Zoom",
    "brightness": "Bright",
    "elastic_transform": "Elastic",
    "pixelate": "Pixel",
    "jpeg_compression": "JPEG",
    "speckle_noise": "Speckle",
    "gaussian_blur": "Gauss blur",
}
"""How the paper heads its columns, where that is not the corruption's own name."""

FINE = 5000  # images from which a second decimal means something
PARTIAL = "†"


@dataclass(frozen=True)
class Value:
    """One cell of a table.

    Attributes:
        text: As shown.
        number: What it is sorted by; None for text, and where there is none.
        kind: What it is.
        best: Whether no other line of its column is better.
        note: More to say about it, such as why it failed.
    """

    text: str
    number: float | None = None
    kind: Kind = "text"
    best: bool = False
    note: str = ""


MISSING = Value("—", kind="missing", note="not measured")


@dataclass(frozen=True)
class Table:
    """A table, in no markup.

    Attributes:
        title: What is shown, in a few words.
        columns: The headings.
        rows: As many values as headings, in each.
        notes: Sentences to stand below.
        sortable: Whether the lines stand for themselves.

    Example:
        >>> Table("errors", ("method", "mean"), ((Value("bn"), Value("20.4", 20.4, "number")),))
        ... # doctest: +ELLIPSIS
        Table(title='errors', columns=('method', 'mean'), ...)
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    sortable: bool = True

    @property
    def wordy(self) -> tuple[bool, ...]:
        """For each column whether it holds words rather than numbers."""
        return tuple(
            all(row[at].kind == "text" for row in self.rows) for at in range(len(self.columns))
        )


def heading(corruption: str) -> str:
    """The head of a corruption's column.

    Example:
        >>> heading("gaussian_noise"), heading("fog")
        ('Gauss', 'Fog')
    """
    return SHORT.get(corruption, corruption.replace("_", " ").capitalize())


def full_name(corruption: str) -> str:
    """A corruption's name in words.

    Example:
        >>> full_name("jpeg_compression")
        'JPEG compression'
    """
    return corruption.replace("_", " ").capitalize().replace("Jpeg", "JPEG")


def title_of(place: Place) -> str:
    """What one table is about, in a line.

    Example:
        >>> title_of(Place("resnet20", "0", "cifar10", "generated", 5, "episodic", 200, 1000))
        'resnet20 on cifar10, severity 5, episodic, batches of 200, 1,000 images'
    """
    severity = f"severity {place.severity}" if place.severity else "clean images"
    batch = "one image at a time" if place.batch_size == 1 else f"batches of {place.batch_size}"
    where = f"{place.model} on {place.data}"
    return f"{where}, {severity}, {place.setting}, {batch}, {place.images:,} images"


def error_tables(rows: Iterable[Row]) -> list[Table]:
    """The paper's tables: methods by corruptions, and the mean.

    Args:
        rows: Of a file of results.

    Returns:
        One table for each place: network, data, severity, setting, batch size, images.

    Example:
        >>> error_tables([])
        []
    """
    return [error_table(grid) for grid in grids(rows)]


def error_table(grid: Grid) -> Table:
    """Methods by corruptions.

    The mean comes first, as in the paper, and clean images last. A line that lacks a corruption
    says how many its mean is of, and is never the best.

    Args:
        grid: What was measured in one place.

    Returns:
        The table, with the best of each column marked.
    """
    names = labels(grid.variants)
    measured = dict.fromkeys(corruption for _, corruption in grid.rows)
    shown = dict.fromkeys([*grid.corruptions, *(name for name in measured if name == CLEAN)])
    several = len(grid.corruptions) > 1
    lines = []
    for variant in grid.variants:
        cells = [_error(grid, variant, name) for name in shown]
        mean = [_mean(grid, variant)] if several else []
        lines.append((Value(names[variant]), *mean, *cells))
    first = ("method", f"Mean of {len(grid.corruptions)}") if several else ("method",)
    columns = (*first, *(heading(name) for name in shown))
    return Table(title_of(grid.place), columns, _with_best(lines), _notes(grid, lines))


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
        f"{place.model}, {_images(place)}.",
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
    own = (_mean(grid, variant), *(_error(grid, variant, name) for name in names))
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


def _decimals(grid: Grid) -> int:
    return 2 if grid.place.images >= FINE else 1


def _number(spread: Spread, decimals: int, mark: str = "", note: str = "") -> Value:
    text = f"{spread.mean:.{decimals}f}"
    if spread.deviation is not None:
        text += f" ±{spread.deviation:.{decimals}f}"
    return Value(text + mark, spread.mean, "number", note=note)


def _error(grid: Grid, variant: Variant, corruption: str) -> Value:
    rows = grid.at(variant, corruption)
    failed = [row.outcome.reason for row in rows if row.outcome.status == "failed"]
    spread = grid.error(variant, corruption)
    if spread is not None:
        note = f"{len(failed)} of {len(rows)} seeds failed: {failed[0]}" if failed else ""
        return _number(spread, _decimals(grid), PARTIAL if failed else "", note)
    return Value("failed", kind="failed", note=failed[0]) if failed else MISSING


def _mean(grid: Grid, variant: Variant) -> Value:
    mean = grid.mean(variant)
    if mean is not None:
        return _number(mean, _decimals(grid))
    found = [grid.error(variant, name) for name in grid.corruptions]
    values = [spread.mean for spread in found if spread is not None]
    if not values:
        return MISSING
    average = Spread(sum(values) / len(values), None, 1)
    part = f" ({len(values)}/{len(found)})"
    # No number: a mean of fewer corruptions is of other things, so it is not sorted among means.
    text = _number(average, _decimals(grid)).text + part
    return Value(
        text, kind="number", note=f"mean of {len(values)} corruptions; the others were not measured"
    )


def _with_best(lines: Sequence[tuple[Value, ...]]) -> tuple[tuple[Value, ...], ...]:
    """Mark the lowest of each column, as it is shown: equal to the eye is equally good."""
    if len(lines) < 2:
        return tuple(lines)
    lowest = [
        min((_shown(value) for value in column if value.number is not None), default=None)
        for column in zip(*lines, strict=True)
    ]
    return tuple(
        tuple(
            replace(value, best=value.number is not None and _shown(value) == low)
            for value, low in zip(line, lowest, strict=True)
        )
        for line in lines
    )


def _shown(value: Value) -> float:
    return float(value.text.split()[0].rstrip(PARTIAL))


def _images(place: Place) -> str:
    return f"{place.images:,} images a corruption"


def _notes(grid: Grid, lines: Sequence[tuple[Value, ...]]) -> tuple[str, ...]:
    place = grid.place
    seeds = ", ".join(str(seed) for seed in grid.seeds)
    several = len(grid.seeds) > 1
    notes = [
        f"Classification error in percent; {_images(place)}; "
        + (f"seeds {seeds}: mean and standard deviation" if several else f"seed {seeds}")
        + f"; corrupted images: {place.corrupted}."
    ]
    values = [value for line in lines for value in line]
    if any(value.text.endswith(PARTIAL) for value in values):
        notes.append(f"{PARTIAL} Some seeds failed; the mean is of the others.")
    if any(value.kind == "failed" for value in values):
        notes.append("Failed: the reasons are listed with the failures.")
    return tuple(notes)
