"""Tables of results: errors by method and corruption, the paper's beside ours, costs, failures.

A `ResultTable` knows numbers and the text that each is shown as, and no markup: a terminal, a page
and a LaTeX file show the same table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ttapca.benchmark import paper
from ttapca.benchmark.cells import CLEAN
from ttapca.benchmark.comparisons import Comparison, Rows, comparisons, frame, nearest_to_paper
from ttapca.benchmark.paper import PaperRow, paper_row

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

SOURCE = "source"
FINE = 5000  # images from which a second decimal means something
PARTIAL = "†"


@dataclass(frozen=True)
class Value:
    """One entry of a table.

    Attributes:
        text: What is shown.
        number: What the column is sorted by; None for text, and where there is no number.
        kind: What it is.
        best: Whether no other line has a lower number in this column.
        note: More to say about it, such as why it failed.
    """

    text: str
    number: float | None = None
    kind: Kind = "text"
    best: bool = False
    note: str = ""


MISSING = Value("—", kind="missing", note="not measured")


@dataclass(frozen=True)
class ResultTable:
    """A table without markup.

    Attributes:
        title: What is shown, in a few words.
        columns: The headings.
        rows: In each, one value for every heading.
        notes: Sentences to stand below.
        sortable: Whether the lines may be shown in another order.

    Example:
        >>> line = (Value("bn"), Value("20.4", 20.4, "number"))
        >>> ResultTable("errors", ("method", "mean"), (line,)).wordy
        (True, False)
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
    """The head of a corruption's column."""
    return SHORT.get(corruption, full_name(corruption))


def full_name(corruption: str) -> str:
    """A corruption's name in words.

    Example:
        >>> full_name("jpeg_compression")
        'JPEG compression'
    """
    return corruption.replace("_", " ").capitalize().replace("Jpeg", "JPEG")


def all_tables(rows: Rows) -> list[ResultTable]:
    """Every table of errors, then those that compare them with the paper."""
    return [*error_tables(rows), *paper_tables(rows)]


def error_tables(rows: Rows) -> list[ResultTable]:
    """The tables of errors: one line for each method, one column for each corruption.

    There is one table for each network, data set, severity, setting, batch size and number of
    images.

    Example:
        >>> error_tables([])
        []
    """
    return [error_table(each) for each in comparisons(rows)]


def error_table(comparison: Comparison) -> ResultTable:
    """The errors of one comparison.

    The mean comes first, as in the paper, and clean images last. A line that lacks a corruption
    says of how many corruptions its mean is, and is never the best.
    """
    has_clean = CLEAN in set(comparison.rows.corruption)
    shown = dict.fromkeys([*comparison.corruptions, *([CLEAN] if has_clean else [])])
    several = len(comparison.corruptions) > 1
    lines = []
    for line, label in comparison.lines.label.items():
        mean = [_mean_value(comparison, line)] if several else []
        values = [_error_value(comparison, line, name) for name in shown]
        lines.append((Value(label), *mean, *values))
    first = ("method", f"Mean of {len(comparison.corruptions)}") if several else ("method",)
    columns = (*first, *(heading(name) for name in shown))
    title, notes = comparison.conditions.title, _notes(comparison, lines)
    return ResultTable(title, columns, _with_best(lines), notes)


def _error_value(comparison: Comparison, line: int, corruption: str) -> Value:
    found = comparison.entries.get((line, corruption))
    if found is None:
        return MISSING
    failed, reason = found["failed"], found["reason"]
    if math.isnan(found["mean"]):
        return Value("failed", kind="failed", note=reason) if failed else MISSING
    text = _number(comparison, found["mean"], found["deviation"])
    note = f"{failed} of {found['seeds']} seeds failed: {reason}" if failed else ""
    return Value(text + (PARTIAL if failed else ""), found["mean"], "number", note=note)


def _mean_value(comparison: Comparison, line: int) -> Value:
    mean, deviation = comparison.lines.loc[line, ["mean", "deviation"]]
    if not math.isnan(mean):
        return Value(_number(comparison, mean, deviation), float(mean), "number")
    found = [comparison.entries.get((line, name)) for name in comparison.corruptions]
    values = [each["mean"] for each in found if each and not math.isnan(each["mean"])]
    if not values:
        return MISSING
    text = f"{_number(comparison, statistics.fmean(values))} ({len(values)}/{len(found)})"
    # Without a number it is not sorted among means of all corruptions.
    return Value(text, kind="number", note="no seed was measured on every corruption")


def _number(comparison: Comparison, mean: float, deviation: float = math.nan) -> str:
    decimals = 2 if comparison.conditions.images >= FINE else 1
    spread = "" if math.isnan(deviation) else f" ±{deviation:.{decimals}f}"
    return f"{mean:.{decimals}f}{spread}"


def _with_best(lines: Sequence[tuple[Value, ...]]) -> tuple[tuple[Value, ...], ...]:
    """Mark the lowest of each column as it is shown: what looks equal is equally good."""

    def shown(value: Value) -> float:
        return float(value.text.split()[0].rstrip(PARTIAL))

    if len(lines) < 2:
        return tuple(lines)
    columns = []
    for column in zip(*lines, strict=True):
        low = min((shown(each) for each in column if each.number is not None), default=None)
        best = [each.number is not None and shown(each) == low for each in column]
        columns.append(
            [replace(each, best=is_best) for each, is_best in zip(column, best, strict=True)]
        )
    return tuple(zip(*columns, strict=True))


def _notes(comparison: Comparison, lines: Sequence[tuple[Value, ...]]) -> tuple[str, ...]:
    seeds = ", ".join(map(str, comparison.seeds))
    several = len(comparison.seeds) > 1
    notes = [
        f"Classification error in percent; {comparison.conditions.images:,} images per corruption; "
        + (f"seeds {seeds}: mean and standard deviation" if several else f"seed {seeds}")
        + f"; corrupted images: {comparison.conditions.corrupted}."
    ]
    values = [value for line in lines for value in line]
    if any(value.text.endswith(PARTIAL) for value in values):
        notes.append(f"{PARTIAL} Some seeds failed; the mean is of the others.")
    if any(value.kind == "failed" for value in values):
        notes.append("Failed: the reasons are listed with the failures.")
    return tuple(notes)


def paper_tables(rows: Rows) -> list[ResultTable]:
    """Our errors beside the paper's, where it has the data set, the setting and the method.

    There is one table for each network, data set and setting that the paper has too, made of the
    comparison with the most corruptions and images.

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
    """Three lines for each method: ours, the paper's, the difference."""
    ours = comparison.conditions
    shared = tuple(name for name in comparison.corruptions if name in paper.CORRUPTIONS)
    comparison = replace(comparison, corruptions=shared)
    lines: list[tuple[Value, ...]] = []
    for line, method in nearest_to_paper(comparison.lines, ["method"]).method.items():
        printed = paper_row(ours.data, ours.setting, method)
        if printed is not None and shared:
            lines += _beside_paper(comparison, line, printed)
    if not lines:
        return None
    columns = ("method", f"Mean of {len(shared)}", *(heading(name) for name in shared))
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} images per corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{ours.model}, {ours.images:,} images per corruption.",
        "Means are computed from the errors shown; a mean that the paper prints is added where it "
        "is another number.",
        "Difference: ours minus the paper's; below zero, ours has fewer errors.",
    )
    return ResultTable(f"{ours.title}: ours and the paper's", columns, tuple(lines), notes, False)


def _beside_paper(comparison: Comparison, line: int, printed: PaperRow) -> list[tuple[Value, ...]]:
    names, method = comparison.corruptions, printed.method
    theirs = statistics.fmean(printed.errors[name] for name in names)
    whole = len(names) == len(printed.errors)
    note = f"printed {printed.printed_mean:.2f}" if whole and printed.mean_differs else ""
    mean = Value(f"{theirs:.2f}" + (f" ({note})" if note else ""), theirs, "number", note=note)
    spreads = {name: f" ±{each:.2f}" for name, each in printed.spreads.items()}
    paper_values = [
        Value(f"{printed.errors[name]:.2f}{spreads.get(name, '')}", printed.errors[name], "number")
        for name in names
    ]
    own = [_error_value(comparison, line, name) for name in names]
    gaps = [_difference(v, printed.errors[n]) for v, n in zip(own, names, strict=True)]
    own_mean = _mean_value(comparison, line)
    return [
        (Value(f"{method}, ours"), own_mean, *own),
        (Value(f"{method}, paper"), mean, *paper_values),
        (Value(f"{method}, difference"), _difference(own_mean, theirs), *gaps),
    ]


def _difference(ours: Value, theirs: float) -> Value:
    if ours.number is None:
        return MISSING
    gap = ours.number - theirs
    return Value(f"{gap:+.2f}".replace("-", "−"), gap, "number")  # noqa: RUF001


COSTS = {  # by column of the lines: its heading, and how its numbers are written
    "milliseconds": ("ms per image", ".2f"),
    "times_source": ("times source", ".2f"),
    "parameters": ("parameters", ",.0f"),
    "peak_memory": ("peak MB", ",.0f"),
    "updates": ("updates", ",.0f"),
    "skipped": ("skipped", ",.0f"),
    "calibration_error": ("calibration error", ".1f"),
    "entropy": ("entropy", ".3f"),
}


def cost_table(comparison: Comparison) -> ResultTable | None:
    """What each method costs, over all corruptions; None when nothing was measured."""
    lines = comparison.lines
    lines = lines.assign(milliseconds=1000 * lines.seconds / lines.measured)
    source = lines.milliseconds[lines.method == SOURCE]
    lines["times_source"] = lines.milliseconds / (source.iloc[0] if len(source) else math.nan)
    lines = lines[lines.milliseconds > 0]
    body = [
        (Value(line["label"]), *(_formatted(line[name], form) for name, (_, form) in COSTS.items()))
        for line in lines.to_dict("records")
    ]
    notes = (
        "Time is that spent in the method, without reading images. Peak memory is that of the "
        "whole process. Updates are counted over all corruptions; skipped are those that would "
        "not have been finite. Calibration error in percent and entropy in nats are means over "
        "the corruptions.",
    )
    columns = ("method", *(heading for heading, _ in COSTS.values()))
    title = comparison.conditions.title
    return ResultTable(title, columns, tuple(body), notes) if body else None


def _formatted(number: float, form: str) -> Value:
    return MISSING if math.isnan(number) else Value(f"{number:{form}}", float(number), "number")


def failure_table(rows: Rows) -> ResultTable | None:
    """Every result that failed, and why; None when all went well."""
    every = frame(rows)
    columns = ["method", "setting", "corruption", "severity", "seed", "reason"]
    failed = every[(every.status != "done") | every.error.isna()][columns]
    failed = failed.assign(corruption=failed.corruption.map(heading))
    body = [
        tuple(Value(each) if isinstance(each, str) else _formatted(each, "d") for each in line)
        for line in failed.itertuples(index=False)
    ]
    return ResultTable("What failed", tuple(columns), tuple(body)) if body else None
