"""Tables of results: errors, errors by setting, costs and failures.

A `ResultTable` has no markup: a terminal, a page and a LaTeX file show the same table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from ttapca.benchmark.comparisons import LINE, Comparison, Measurements, comparisons, frame, labels
from ttapca.benchmark.rows import AMONG, CLEAN, SETTINGS
from ttapca.benchmark.uncertainty import MeanInterval

# The paper's headings of columns, if they are not the corruption's name.
SHORT = {
    "gaussian_noise": "Gauss", "shot_noise": "Shot", "impulse_noise": "Impulse",
    "defocus_blur": "Defocus", "glass_blur": "Glass", "motion_blur": "Motion", "zoom_blur": "Zoom",
    "brightness": "Bright", "elastic_transform": "Elastic", "pixelate": "Pixel",
    "jpeg_compression": "JPEG", "speckle_noise": "Speckle", "gaussian_blur": "Gauss blur",
}  # fmt: skip
FINE = 5000  # images from which a second decimal means something
RANK = "rank"
INTERVAL = "±: half the width of the 95 % interval over images"
BOLD = "Bold: not told apart from the lowest of the column."
TEST = (
    "Told apart: by a paired test over the images (flipped signs, exact), at 5 % with Holm's "
    "correction for the number of methods."
)
NO_INTERVALS = "Without intervals: which images were predicted right is not known for all rows."
LEAST_SETTINGS = 3  # that are worth a table of their own
PARTIAL = "†"  # marks a number for which some seeds failed
FAILURES = ["method", "setting", "corruption", "severity", "seed", "reason"]
COSTS = {  # by column of the lines: its heading, and the format of its numbers
    "milliseconds": ("ms per image", ".2f"),
    "times_source": ("times source", ".2f"),
    "parameters": ("parameters", ",.0f"),
    "peak_memory": ("peak MB", ",.0f"),
    "updates": ("updates", ",.0f"),
    "skipped": ("skipped", ",.0f"),
    "calibration_error": ("calibration error", ".1f"),
    "entropy": ("entropy", ".3f"),
}


@dataclass(frozen=True)
class Value:
    """One entry of a table."""

    text: str
    number: float | None = None  # the column is sorted by it
    kind: Literal["text", "number", "failed", "missing"] = "text"
    best: bool = False  # the lowest of its column, or not told apart from the lowest
    note: str = ""  # more about it, such as why it failed
    # In its column; None if it is not known which images were predicted right.
    rank: int | None = None
    heat: float | None = None  # its colour, from -1 for far fewer errors to 1 for far more


MISSING = Value("—", kind="missing", note="not measured")
Line = tuple[Value, ...]


@dataclass(frozen=True)
class ResultTable:
    """A table without markup; its notes are sentences for below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    sortable: bool = True

    @property
    def wordy(self) -> tuple[bool, ...]:
        """For each column whether it holds words rather than numbers."""
        return tuple(
            all(row[at].kind == "text" for row in self.rows) for at in range(len(self.columns))
        )


def full_name(corruption: str) -> str:
    """Return a corruption's name in words, such as `JPEG compression`."""
    return corruption.replace("_", " ").capitalize().replace("Jpeg", "JPEG")


def heading(corruption: str) -> str:
    """Return the heading of a corruption's column."""
    return SHORT.get(corruption, full_name(corruption))


def mean_heading(corruptions: Sequence[str]) -> str:
    """Return the heading of the mean over corruptions."""
    return f"Mean of {len(corruptions)}" if len(corruptions) > 1 else heading(corruptions[0])


def error_tables(rows: Measurements) -> list[ResultTable]:
    """Return a table of errors for each comparison."""
    return [error_table(each) for each in comparisons(rows)]


def error_table(comparison: Comparison) -> ResultTable:
    """Return the errors of one comparison: the mean first, as in the paper, clean images last."""
    names = comparison.with_clean
    columns = ["method", *map(heading, names)]
    several = len(comparison.corruptions) > 1
    if several:
        columns.insert(1, mean_heading(comparison.corruptions))
    lines = []
    for line, label in comparison.lines.label.items():
        mean = [mean_value(comparison, line)] if several else []
        lines.append((Value(label), *mean, *(error_value(comparison, line, n) for n in names)))
    marked = _with_best(lines)
    if len(comparison.standings()) > 1:  # after the number that it is the rank of
        columns.insert(2, RANK)
        marked = tuple((*line[:2], rank_value(line[1]), *line[2:]) for line in marked)
    title, notes = comparison.conditions.title, _notes(comparison, lines)
    return ResultTable(title, tuple(columns), marked, notes)


def rank_value(value: Value) -> Value:
    """Return the rank of a number in its column."""
    return MISSING if value.rank is None else Value(str(value.rank), value.rank, "number")


def signed(number: float, decimals: int) -> str:
    """Write a difference with its sign."""
    return f"{number:+.{decimals}f}".replace("-", "−")  # noqa: RUF001


def setting_tables(found: Sequence[Comparison], least: int = LEAST_SETTINGS) -> list[ResultTable]:
    """Return mean errors by setting, if `least` comparisons differ in nothing else.

    Two are easily compared in their own tables. Errors on clean images stand in brackets.
    """
    groups: dict[tuple[object, ...], dict[str, Comparison]] = {}
    for each in found:
        ours = each.conditions
        # Corruptions that share an adaptation are named here; their columns are compared instead.
        corrupted = ours.corrupted.partition(AMONG)[0]
        key = (ours._replace(setting="", corrupted=corrupted), each.corruptions)
        groups.setdefault(key, {}).setdefault(ours.setting, each)
    order: dict[str, int] = {name: number for number, name in enumerate(SETTINGS)}
    return [
        _setting_table(dict(sorted(group.items(), key=lambda each: order.get(each[0], len(order)))))
        for group in groups.values()
        if len(group) >= least
    ]


def _setting_table(group: dict[str, Comparison]) -> ResultTable:
    first = next(iter(group.values()))
    every = pd.concat([each.lines for each in group.values()]).drop_duplicates(LINE)
    lines = [
        (Value(label), *(_value_with_clean(each, line) for each in group.values()))
        for label, line in zip(labels(every), every[LINE].itertuples(index=False), strict=True)
    ]
    names = first.corruptions
    over = f"mean over {len(names)} corruptions" if len(names) > 1 else full_name(names[0])
    values = [value for line in lines for value in line[1:] if value.number is not None]
    brackets = any(value.text.endswith(")") for value in values)
    note = f"Classification error in percent, {over}" + "; clean images in brackets" * brackets
    title = first.conditions._replace(setting="by setting").title
    notes = [f"{note}.", *([f"{INTERVAL}. {BOLD} {TEST}"] if any(v.rank for v in values) else [])]
    return ResultTable(title, ("method", *group), _with_best(lines), tuple(notes))


def _value_with_clean(comparison: Comparison, line: tuple[Any, ...]) -> Value:
    """Return the mean error of a method with its options, and that on clean images in brackets."""
    lines = comparison.lines
    for number in lines.index[(lines[LINE] == list(line)).all(axis=1)]:
        mean, clean = mean_value(comparison, number), lines.clean[number]
        if mean.number is None or math.isnan(clean) or CLEAN in comparison.corruptions:
            return mean
        return replace(mean, text=f"{mean.text} ({_number(comparison, clean)})")
    return MISSING


def error_value(comparison: Comparison, line: int, corruption: str) -> Value:
    """Return the error of one line on one corruption."""
    found = comparison.entries.get((line, corruption))
    if found is None:
        return MISSING
    failed, reason = found["failed"], found["reason"]
    if math.isnan(found["mean"]):
        return Value("failed", kind="failed", note=reason) if failed else MISSING
    spread, notes, rank = found["deviation"], [], None
    if standing := comparison.standings(corruption).get(line):
        # With intervals, many columns would be too wide; the widest is named below the table.
        only = comparison.corruptions == (corruption,)
        spread, rank = standing.error.half_width if only else math.nan, standing.rank
        notes.append(interval_note(standing.error, decimals_of(comparison)))
    text = _number(comparison, found["mean"], spread)
    if failed:
        notes.append(f"{failed} of {found['seeds']} seeds failed: {reason}")
    text, note = text + PARTIAL * bool(failed), "; ".join(notes)
    return Value(text, found["mean"], "number", note=note, rank=rank)


def interval_note(error: MeanInterval, decimals: int) -> str:
    """Return the interval of an error in words."""
    low, high = max(error.low, 0), min(error.high, 100)
    return f"95 % interval over images: {low:.{decimals}f} to {high:.{decimals}f}"


def mean_value(comparison: Comparison, line: int) -> Value:
    """Return the mean error of one line over all corruptions."""
    mean, spread = comparison.lines.loc[line, ["mean", "spread"]]
    if not math.isnan(mean):
        standing = comparison.standings().get(line)
        note = interval_note(standing.error, decimals_of(comparison)) if standing else ""
        rank = standing.rank if standing else None
        return Value(_number(comparison, mean, spread), float(mean), "number", note=note, rank=rank)
    found = [comparison.entries.get((line, name)) for name in comparison.corruptions]
    values = [each["mean"] for each in found if each and not math.isnan(each["mean"])]
    if not values:
        return MISSING
    text = f"{_number(comparison, statistics.fmean(values))} ({len(values)}/{len(found)})"
    # Without a number, so that it is not sorted among means of all corruptions.
    return Value(text, kind="number", note="no seed was measured on every corruption")


def decimals_of(comparison: Comparison) -> int:
    """Return how many decimals mean something: one image in 1,000 is 0.1 %."""
    return 2 if comparison.conditions.images >= FINE else 1


def _number(comparison: Comparison, mean: float, spread: float = math.nan) -> str:
    decimals = decimals_of(comparison)
    return f"{mean:.{decimals}f}" + ("" if math.isnan(spread) else f" ±{spread:.{decimals}f}")


def _with_best(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Mark the best of each column."""
    if len(lines) < 2:
        return tuple(lines)
    return tuple(zip(*map(_best_marked, zip(*lines, strict=True)), strict=True))


def _best_marked(column: Line) -> Line:
    """Mark values that are not told apart from the lowest, or without ranks look equal to it."""

    def shown(value: Value) -> float:
        return math.inf if value.number is None else float(value.text.split()[0].rstrip(PARTIAL))

    if any(value.rank for value in column):
        return tuple(replace(value, best=value.rank == 1) for value in column)
    lowest = min(map(shown, column))
    return tuple(
        replace(value, best=value.number is not None and shown(value) == lowest) for value in column
    )


def _notes(comparison: Comparison, lines: Sequence[Line]) -> tuple[str, ...]:
    seeds = ", ".join(map(str, comparison.seeds))
    ranked, values = comparison.standings(), [value for line in lines for value in line]
    deviation = "" if ranked else " and standard deviation"
    said = f"seeds {seeds}: mean{deviation}" if len(comparison.seeds) > 1 else f"seed {seeds}"
    notes = [
        f"Classification error in percent; {comparison.conditions.images:,} images per corruption; "
        f"{said}; corrupted images: {comparison.conditions.corrupted}."
    ]
    if ranked:
        notes += _interval_notes(comparison)
    elif any(value.number is not None for value in values):
        notes.append(NO_INTERVALS)
    if any(value.text.endswith(PARTIAL) for value in values):
        notes.append(f"{PARTIAL} Some seeds failed; the mean is over the others.")
    if any(value.kind == "failed" for value in values):
        notes.append("Failed: the reasons are listed with the failures.")
    return tuple(notes)


def _interval_notes(comparison: Comparison) -> list[str]:
    """Explain `±`, ranks and bold numbers."""
    facts = [INTERVAL]
    if len(comparison.corruptions) > 1:
        every = [comparison.standings(name).values() for name in comparison.corruptions]
        widths = [each.error.half_width for column in every for each in column]
        if widths:  # a line without rank may lack bits, and then its corruptions have none
            facts.append(f"at most ±{max(widths):.1f} for a single corruption")
    deviations = comparison.lines.deviation
    if deviations.notna().any():
        facts.append(f"standard deviation over seeds at most {deviations.max():.1f}")
    notes = ["; ".join(facts) + "."]
    if len(comparison.standings()) > 1:
        notes.append(f"{BOLD} Methods share a rank that are not told apart from its lowest. {TEST}")
    return notes


def cost_table(comparison: Comparison) -> ResultTable | None:
    """Return the costs of each method over all corruptions; None if nothing was measured."""
    body = [
        (
            Value(line["label"]),
            *(number_value(float(line[n]), form) for n, (_, form) in COSTS.items()),
        )
        for line in comparison.lines.dropna(subset="milliseconds").to_dict("records")
    ]
    notes = (
        "Time is that of the method, without reading images. Peak memory is that of the whole "
        "process. Updates are counted over all corruptions; skipped are updates that would not "
        "have been finite. Calibration error in percent and entropy in nats are means over the "
        "corruptions.",
    )
    columns = ("method", *(name for name, _ in COSTS.values()))
    return ResultTable(comparison.conditions.title, columns, tuple(body), notes) if body else None


def number_value(number: float, form: str, *, best: bool = False) -> Value:
    """Return a number in this format; `MISSING` if it is NaN."""
    return MISSING if math.isnan(number) else Value(f"{number:{form}}", number, "number", best)


def failure_table(rows: Measurements) -> ResultTable | None:
    """Return every measurement that failed, with its reason; None if none failed."""
    every = frame(rows)
    failed = every[(every.status != "done") | every.error.isna()][FAILURES]
    failed = failed.assign(corruption=failed.corruption.map(heading))
    body = [
        tuple(
            Value(each) if isinstance(each, str) else Value(f"{each}", float(each), "number")
            for each in line
        )
        for line in failed.itertuples(index=False)
    ]
    return ResultTable("What failed", tuple(FAILURES), tuple(body)) if body else None
