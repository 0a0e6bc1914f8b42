"""The paper's tables, made of rows: methods by corruptions.

A `Table` is what any surface can show: a terminal, a page, a LaTeX file. It knows numbers and the
text they are shown as; it knows no markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttapca.benchmark.cells import CLEAN, Row
from ttapca.benchmark.row_groups import Grid, Place, Spread, Variant, grids, labels

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
        cells = [error_value(grid, variant, name) for name in shown]
        mean = [mean_value(grid, variant)] if several else []
        lines.append((Value(names[variant]), *mean, *cells))
    first = ("method", f"Mean of {len(grid.corruptions)}") if several else ("method",)
    columns = (*first, *(heading(name) for name in shown))
    return Table(title_of(grid.place), columns, _with_best(lines), _notes(grid, lines))


def _decimals(grid: Grid) -> int:
    return 2 if grid.place.images >= FINE else 1


def _number(spread: Spread, decimals: int, mark: str = "", note: str = "") -> Value:
    text = f"{spread.mean:.{decimals}f}"
    if spread.deviation is not None:
        text += f" ±{spread.deviation:.{decimals}f}"
    return Value(text + mark, spread.mean, "number", note=note)


def error_value(grid: Grid, variant: Variant, corruption: str) -> Value:
    """What is shown for one line and corruption."""
    rows = grid.at(variant, corruption)
    failed = [row.outcome.reason for row in rows if row.outcome.status == "failed"]
    spread = grid.error(variant, corruption)
    if spread is not None:
        note = f"{len(failed)} of {len(rows)} seeds failed: {failed[0]}" if failed else ""
        return _number(spread, _decimals(grid), PARTIAL if failed else "", note)
    return Value("failed", kind="failed", note=failed[0]) if failed else MISSING


def mean_value(grid: Grid, variant: Variant) -> Value:
    """What is shown for the mean of a line."""
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
    return Value(text, kind="number", note="no seed was measured on every corruption")


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


def images_of(place: Place) -> str:
    """How many images there are, in words."""
    return f"{place.images:,} images a corruption"


def _notes(grid: Grid, lines: Sequence[tuple[Value, ...]]) -> tuple[str, ...]:
    place = grid.place
    seeds = ", ".join(str(seed) for seed in grid.seeds)
    several = len(grid.seeds) > 1
    notes = [
        f"Classification error in percent; {images_of(place)}; "
        + (f"seeds {seeds}: mean and standard deviation" if several else f"seed {seeds}")
        + f"; corrupted images: {place.corrupted}."
    ]
    values = [value for line in lines for value in line]
    if any(value.text.endswith(PARTIAL) for value in values):
        notes.append(f"{PARTIAL} Some seeds failed; the mean is of the others.")
    if any(value.kind == "failed" for value in values):
        notes.append("Failed: the reasons are listed with the failures.")
    return tuple(notes)
