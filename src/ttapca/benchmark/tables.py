"""Tables of results: errors, differences between methods, the paper's errors, costs, failures.

A `ResultTable` has no markup: a terminal, a page and Markdown show the same table. `export` writes
all of them as Markdown, and every measurement as CSV or JSON.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from ttapca._checks import OneOf, check_option
from ttapca.benchmark import paper
from ttapca.benchmark.comparisons import (
    LINE,
    SOURCE,
    Comparison,
    Measurements,
    comparisons,
    frame,
    labels,
    nearest_to_paper,
)
from ttapca.benchmark.rows import AMONG, CLEAN, SETTINGS
from ttapca.benchmark.uncertainty import Difference, MeanInterval
from ttapca.corruptions import STANDARD
from ttapca.support.parsing import finite

# The paper's headings of columns, if they are not the corruption's name.
SHORT = {
    "gaussian_noise": "Gauss", "shot_noise": "Shot", "impulse_noise": "Impulse",
    "defocus_blur": "Defocus", "glass_blur": "Glass", "motion_blur": "Motion", "zoom_blur": "Zoom",
    "brightness": "Bright", "elastic_transform": "Elastic", "pixelate": "Pixel",
    "jpeg_compression": "JPEG", "speckle_noise": "Speckle", "gaussian_blur": "Gauss blur",
}  # fmt: skip
FINE = 5000  # images from which a second decimal means something
RANK = "rank"
INTERVAL = "±: half the width of the 95 % interval over samples"
BOLD = "Bold: not told apart from the lowest of the column."
TEST = (
    "Told apart: by a paired test over the samples (flipped signs, exact), at 5 % with Holm's "
    "correction for the number of methods."
)
NO_INTERVALS = "Without intervals: which samples were predicted right is not known for all rows."
PARTIAL = "†"  # marks a number for which some seeds failed
REFERENCES = ("bn", SOURCE)  # compared with every method, beside the one with the lowest error
FAILURES = ["method", "setting", "corruption", "severity", "seed", "reason"]
COSTS = {  # by column of the lines: its heading, and the format of its numbers
    "milliseconds": ("ms per sample", ".2f"),
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
    # In its column; None if it is not known which samples were predicted right.
    rank: int | None = None


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
    measured = [CLEAN] if CLEAN in set(comparison.rows.corruption) else []
    names = list(dict.fromkeys([*comparison.corruptions, *measured]))
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


def setting_tables(found: Sequence[Comparison], least: int = 3) -> list[ResultTable]:
    """Return mean errors by setting, if `least` comparisons differ in nothing else."""
    groups: dict[tuple[object, ...], dict[str, Comparison]] = {}
    for each in found:
        ours = each.conditions
        # Corruptions that share an adaptation are named here; their columns are compared instead.
        corrupted = ours.corrupted.partition(AMONG)[0]
        key = (ours._replace(setting="", corrupted=corrupted), each.corruptions)
        groups.setdefault(key, {}).setdefault(ours.setting, each)
    return [_setting_table(group) for group in groups.values() if len(group) >= least]


def _setting_table(group: dict[str, Comparison]) -> ResultTable:
    group = {name: group[name] for name in sorted(group, key=[*SETTINGS, *group].index)}
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
    note = f"Classification error in percent, {over}" + "; clean samples in brackets" * brackets
    notes = [f"{note}.", *([f"{INTERVAL}. {BOLD} {TEST}"] if any(v.rank for v in values) else [])]
    title = first.conditions._replace(setting="by setting").title
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
    return f"95 % interval over samples: {low:.{decimals}f} to {high:.{decimals}f}"


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
        f"Classification error in percent; {comparison.conditions.images:,} samples per "
        f"corruption; {said}; corrupted samples: {comparison.conditions.corrupted}."
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


def difference_table(comparison: Comparison) -> ResultTable | None:
    """Return differences of mean errors to the lowest, `bn` and the untouched network, if known."""
    ranked, lines = comparison.standings(), comparison.lines
    if len(ranked) < 2:
        return None
    order = sorted(ranked, key=lambda line: ranked[line].error.mean)
    named = [line for method in REFERENCES for line in order if lines.method[line] == method]
    references = list(dict.fromkeys([order[0], *named]))
    decimals = decimals_of(comparison)
    columns = [
        {line: _difference(gap, decimals) for line, gap in comparison.differences(each).items()}
        | {each: Value("0", 0.0, "number")}
        for each in references
    ]
    body = [
        (
            Value(lines.label[line]),
            mean := mean_value(comparison, line),
            rank_value(mean),
            *(column[line] for column in columns),
        )
        for line in order
    ]
    notes = (
        "Each mean error minus that of the method at the head of the column, in points; below "
        f"zero, it has fewer errors. {INTERVAL}, which are the same for all methods. In brackets: "
        "not told apart.",
        TEST,
    )
    headings = (f"minus {lines.label[line]}" for line in references)
    return ResultTable(
        f"{comparison.conditions.title}: what is told apart",
        ("method", mean_heading(comparison.corruptions), RANK, *headings),
        tuple(body),
        notes,
    )


def _difference(gap: Difference, decimals: int) -> Value:
    """Return a difference, in brackets if it is not told apart; its interval is in the note."""
    text = f"{signed(gap.mean, decimals)} ±{gap.half_width:.{decimals}f}"
    p = "below 0.001" if gap.p < 0.001 else f"{gap.p:.3f}"
    note = f"{signed(gap.low, decimals)} to {signed(gap.high, decimals)}, p {p}"
    return Value(text if gap.told_apart else f"({text})", gap.mean, "number", note=note)


def paper_tables(rows: Measurements) -> list[ResultTable]:
    """Return our errors beside the paper's, of the comparisons with most corruptions and images."""
    fullest: dict[tuple[str, ...], Comparison] = {}
    for each in comparisons(rows):
        ours = each.conditions
        key = (ours.model, ours.weights, ours.data, ours.setting)
        if (ours.severity, ours.batch_size) == (paper.SEVERITY, paper.BATCH_SIZE):
            both = (fullest.get(key, each), each)
            fullest[key] = max(both, key=lambda one: (len(one.corruptions), one.conditions.images))
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
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} samples per corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{ours.model}, {ours.images:,} samples per corruption.",
        "Means are computed from the errors shown; if the paper prints another mean, it is added "
        "in brackets.",
        "Difference: ours minus the paper's; below zero, ours has fewer errors.",
        *([f"{INTERVAL}; the paper prints standard deviations."] if comparison.standings() else []),
    )
    columns = ("method", f"Mean of {len(shared)}", *map(heading, shared))
    return ResultTable(f"{ours.title}: ours and the paper's", columns, tuple(lines), notes, False)


def _beside_paper(comparison: Comparison, line: int, printed: paper.PaperRow) -> list[Line]:
    names = comparison.corruptions
    own = [mean_value(comparison, line), *(error_value(comparison, line, n) for n in names)]
    errors = [printed.errors[name] for name in names]
    theirs = []
    for name, error in zip(names, errors, strict=True):
        spread = f" ±{printed.spreads[name]:.2f}" if name in printed.spreads else ""
        theirs.append(Value(f"{error:.2f}{spread}", error, "number"))
    mean, note = statistics.fmean(errors), f"printed {printed.printed_mean:.2f}"
    differs = len(names) == len(printed.errors) and printed.mean_differs
    text = f"{mean:.2f} ({note})" if differs else f"{mean:.2f}"
    theirs.insert(0, Value(text, mean, "number", note=note if differs else ""))
    gaps = []
    for value, error in zip(own, [mean, *errors], strict=True):
        gap = math.nan if value.number is None else value.number - error
        gaps.append(MISSING if math.isnan(gap) else Value(signed(gap, 2), gap, "number"))
    lines = {"ours": own, "paper": theirs, "difference": gaps}
    return [(Value(f"{printed.method}, {name}"), *values) for name, values in lines.items()]


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
        "Time is that of the method, without reading samples. Peak memory is that of the whole "
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


FORMATS = ("csv", "json", "markdown")
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in r"\|*_`<>[]"} | {"\n": " "})


def export(rows: Measurements, form: str) -> str:
    """Write results as text: `csv` or `json` for all rows, `markdown` for the tables."""
    check_option("format", form, OneOf(FORMATS))
    if form == "markdown":
        every = comparisons(rows)
        found = [table(each) for each in every for table in (error_table, difference_table)]
        found = [*setting_tables(every), *found, *paper_tables(rows), failure_table(rows)]
        return "\n".join(markdown(table) for table in found if table is not None)
    table = frame(rows)
    if form == "json":  # not `DataFrame.to_json`, which rounds
        table = table.assign(correct=[bits.hex() for bits in table.correct])
        records = [finite(record) for record in table.to_dict("records")]
        return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name in ("error_stream", "entropy_stream", "versions", "machine"):  # as JSON
        table = table.assign(**{name: [json.dumps(finite(each)) for each in table[name]]})
    table = table.drop(columns="correct").replace([math.inf, -math.inf], math.nan)
    return str(table.to_csv(index=False, lineterminator="\n"))


def markdown(table: ResultTable) -> str:
    """Write a table in Markdown: the title above, the best in bold, the notes below."""

    def entry(value: Value) -> str:
        text = value.text.translate(_MARKDOWN)
        return f"**{text}**" if value.best else text

    head = [name.translate(_MARKDOWN) for name in table.columns]
    rules = [":--" if words else "--:" for words in table.wordy]
    lines = [
        f"| {' | '.join(line)} |"
        for line in (head, rules, *(map(entry, row) for row in table.rows))
    ]
    notes = [f"\n{note.translate(_MARKDOWN)}" for note in table.notes]
    return "\n".join([f"### {table.title.translate(_MARKDOWN)}\n", *lines, *notes, ""])
