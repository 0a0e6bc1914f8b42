"""Which methods are told apart: a table of the differences between their mean errors."""

from __future__ import annotations

from dataclasses import replace

from ttapca.benchmark.comparisons import SOURCE, Comparison
from ttapca.benchmark.tables import (
    INTERVAL,
    RANK,
    TEST,
    ResultTable,
    Value,
    decimals_of,
    heading,
    mean_value,
    rank_value,
    signed,
)
from ttapca.benchmark.uncertainty import Difference

REFERENCES = ("bn", SOURCE)  # that every method is compared with, beside the best one


def difference_table(comparison: Comparison) -> ResultTable | None:
    """Return the differences of mean errors: to the lowest, to `bn` and to the untouched network.

    None where it is not known which images were predicted right, and with fewer than two methods.
    """
    ranked, lines = comparison.standings(), comparison.lines
    if len(ranked) < 2:
        return None
    order = sorted(ranked, key=lambda line: ranked[line].error.mean)
    named = [line for method in REFERENCES for line in order if lines.method[line] == method]
    references = dict.fromkeys([order[0], *named])
    gaps = [comparison.differences(line) for line in references]
    body = [
        (
            Value(lines.label[line]),
            mean := mean_value(comparison, line),
            rank_value(mean),
            *(Value("0", 0.0, "number") if line == reference
              else replace(difference_value(comparison, own[line], spread=True), heat=None)
              for reference, own in zip(references, gaps, strict=True)),
        )
        for line in order
    ]  # fmt: skip
    names = comparison.corruptions
    over = f"Mean of {len(names)}" if len(names) > 1 else heading(names[0])
    notes = (
        "Each mean error minus that of the method at the head of the column, in points; below "
        f"zero, it has fewer errors. {INTERVAL}, which are the same for all methods. In brackets: "
        "not told apart.",
        TEST,
    )
    columns = ("method", over, RANK, *(f"minus {lines.label[line]}" for line in references))
    title = f"{comparison.conditions.title}: what is told apart"
    return ResultTable(title, columns, tuple(body), notes)


def difference_value(comparison: Comparison, gap: Difference, *, spread: bool = False) -> Value:
    """Return a difference, in brackets if it is not told apart; its interval is in the note."""
    decimals = decimals_of(comparison)
    text = signed(gap.mean, decimals) + (f" ±{gap.half_width:.{decimals}f}" if spread else "")
    note = f"{signed(gap.low, decimals)} to {signed(gap.high, decimals)}, p {_chance(gap.p)}"
    heat = gap.mean if gap.told_apart else None
    text = text if gap.told_apart else f"({text})"
    return Value(text, gap.mean, "number", note=note, heat=heat)


def _chance(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.3f}"
