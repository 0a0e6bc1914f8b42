"""Tables of differences between methods: of means, by corruption, by class, and to the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pandas import Series

from ttapca.benchmark import paper
from ttapca.benchmark.comparisons import (
    SOURCE,
    Comparison,
    Measurements,
    comparisons,
    nearest_to_paper,
)
from ttapca.benchmark.rows import ClassLabels
from ttapca.benchmark.tables import (
    BOLD,
    INTERVAL,
    MISSING,
    NO_INTERVALS,
    RANK,
    TEST,
    Line,
    ResultTable,
    Value,
    decimals_of,
    error_value,
    heading,
    interval_note,
    mean_heading,
    mean_value,
    rank_value,
    signed,
)
from ttapca.benchmark.uncertainty import Difference, ImageTally, standings
from ttapca.corruptions import STANDARD

REFERENCES = ("bn", SOURCE)  # compared with every method, beside the method with the lowest error
FULL_COLOUR = 5.0  # points that get the strongest colour, unless the table has larger differences
MOST_CLASSES = 20


def difference_table(comparison: Comparison) -> ResultTable | None:
    """Return the differences of mean errors: to the lowest, to `bn` and to the untouched network.

    None with fewer than two methods, or if rows do not say which images were predicted right.
    """
    ranked, lines = comparison.standings(), comparison.lines
    if len(ranked) < 2:
        return None
    order = sorted(ranked, key=lambda line: ranked[line].error.mean)
    named = [line for method in REFERENCES for line in order if lines.method[line] == method]
    references = list(dict.fromkeys([order[0], *named]))
    columns = [differences_to(comparison, line, spread=True) for line in references]
    body = [
        (
            Value(lines.label[line]),
            mean := mean_value(comparison, line),
            rank_value(mean),
            *(replace(column[line], heat=None) for column in columns),
        )
        for line in order
    ]
    notes = (
        "Each mean error minus that of the method at the head of the column, in points; below "
        f"zero, it has fewer errors. {INTERVAL}, which are the same for all methods. In brackets: "
        "not told apart.",
        TEST,
    )
    return ResultTable(
        f"{comparison.conditions.title}: what is told apart",
        (
            "method",
            mean_heading(comparison.corruptions),
            RANK,
            *(f"minus {lines.label[line]}" for line in references),
        ),
        tuple(body),
        notes,
    )


def differences_to(
    comparison: Comparison, reference: int, *names: str, spread: bool = False
) -> dict[int, Value]:
    """Return by how much the errors of lines lie above that of a line; none if it has no error.

    By default the mean errors are compared; `names` has one corruption.
    """
    decimals = decimals_of(comparison)
    if gaps := comparison.differences(reference, *names):
        found = {line: _difference(gap, decimals, spread) for line, gap in gaps.items()}
    else:
        lines = comparison.lines
        errors = lines["mean"]
        if names:
            numbers = [error_value(comparison, line, *names).number for line in lines.index]
            errors = Series(numbers, lines.index, dtype=float)
        untested = (errors - errors[reference]).dropna().to_dict()
        found = {
            line: Value(signed(gap, decimals), gap, "number", heat=gap)
            for line, gap in untested.items()
        }
    return found | ({reference: Value("0", 0.0, "number")} if found else {})


def _difference(gap: Difference, decimals: int, spread: bool) -> Value:
    """Return a difference, in brackets if it is not told apart; its interval is in the note."""
    text = signed(gap.mean, decimals) + (f" ±{gap.half_width:.{decimals}f}" if spread else "")
    p = "below 0.001" if gap.p < 0.001 else f"{gap.p:.3f}"
    note = f"{signed(gap.low, decimals)} to {signed(gap.high, decimals)}, p {p}"
    if not gap.told_apart:
        return Value(f"({text})", gap.mean, "number", note=note)
    return Value(text, gap.mean, "number", note=note, heat=gap.mean)


def heat_tables(comparison: Comparison) -> list[ResultTable]:
    """Return the differences to `bn` and to the untouched network under every corruption.

    A table has no line for the method that it compares with. There is none if that method was not
    measured, or nothing else was.
    """
    lines = comparison.lines
    references = [line for name in REFERENCES for line in lines.index[lines.method == name]]
    return [_heat_table(comparison, line) for line in references if len(lines) > 1]


def _heat_table(comparison: Comparison, reference: int) -> ResultTable:
    names, several = comparison.with_clean, len(comparison.corruptions) > 1
    columns = [differences_to(comparison, reference, name) for name in names]
    headings = [heading(name) for name in names]
    if several:
        columns.insert(0, differences_to(comparison, reference))
        headings.insert(0, mean_heading(comparison.corruptions))
    heats = [abs(value.heat) for column in columns for value in column.values() if value.heat]
    scale = max([*heats, FULL_COLOUR])

    def coloured(value: Value) -> Value:  # roots let small differences be seen
        heat = value.heat and math.copysign(math.sqrt(abs(value.heat) / scale), value.heat)
        return replace(value, heat=heat)

    body = [
        (Value(label), *(coloured(column.get(line, MISSING)) for column in columns))
        for line, label in comparison.lines.label.items()
        if line != reference
    ]
    name = comparison.lines.label[reference]
    notes = (
        f"Each error minus that of {name}, in points: below zero it has fewer errors (blue), above "
        "zero more (orange).",
        f"In brackets and without colour: not told apart. {TEST} Each column is tested by itself."
        if comparison.standings()
        else NO_INTERVALS,
    )
    title = f"{comparison.conditions.title}: minus {name}"
    return ResultTable(title, ("method", *headings), tuple(body), notes)


def class_table(comparison: Comparison, labels: Sequence[ClassLabels]) -> ResultTable | None:
    """Return the error of each method on the images of each class, a line for each class.

    Of many classes, the ones with the largest differences between methods are shown. None with
    fewer than two classes, or if the file has no classes of images, or no bits of predictions.
    """
    ours, tallies = comparison.conditions, comparison.tallies()
    found = [each for each in labels if (each.data, len(each.numbers)) == (ours.data, ours.images)]
    classes = np.array(found[0].numbers) if found else np.zeros(0, np.int64)
    present = np.unique(classes).tolist()
    if len(present) < 2 or not tallies:
        return None
    by_class = {
        number: [
            ImageTally(each.wrong[classes == number], each.predictions) for each in tallies.values()
        ]
        for number in present
    }
    adapted = (comparison.lines.method[list(tallies)] != SOURCE).to_numpy().nonzero()[0]

    def span(number: int) -> float:
        errors = [by_class[number][at].wrong.mean() for at in adapted]
        return float(max(errors, default=0.0) - min(errors, default=0.0))

    shown = sorted(sorted(by_class, key=span, reverse=True)[:MOST_CLASSES])
    body, widest = [], 0.0
    for number in shown:
        ranked = standings(by_class[number])
        images = int((classes == number).sum())
        line = [Value(found[0].names[number]), Value(f"{images:,}", images, "number")]
        for each in ranked:
            error, best = each.error, len(ranked) > 1 and each.rank == 1
            note, text = interval_note(error, decimals=1), f"{error.mean:.1f}"
            line.append(Value(text, error.mean, "number", best, note, each.rank))
            widest = max(widest, error.half_width)
        body.append(tuple(line))
    count = len(comparison.corruptions)
    over = f", mean over {count} corruptions" if count > 1 else ""
    some = f"; the {len(shown)} of {len(present)} classes in which methods differ most"
    notes = (
        f"Classification error in percent by true class{over}"
        f"{some if len(shown) < len(present) else ''}.",
        f"{INTERVAL}: at most ±{widest:.1f}. {BOLD.replace('column', 'line')} {TEST}",
    )
    columns = ("class", "images", *comparison.lines.label[list(tallies)])
    return ResultTable(f"{ours.title}: by class", columns, tuple(body), notes)


def paper_tables(rows: Measurements) -> list[ResultTable]:
    """Return our errors beside the paper's, if it has the data set, the setting and the method.

    Each table is made from the comparison with the most corruptions and images.
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
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} images per corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{ours.model}, {ours.images:,} images per corruption.",
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
