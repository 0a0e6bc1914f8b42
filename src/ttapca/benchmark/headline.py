"""The finding of a comparison, in a few sentences that claim no more than the images show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pandas import DataFrame

from ttapca.benchmark.cells import CLEAN
from ttapca.benchmark.comparisons import SOURCE, Comparison, Rows, comparisons, frame, largest
from ttapca.benchmark.tables import heading
from ttapca.benchmark.uncertainty import MeanInterval
from ttapca.support.progress import counted

UNTOUCHED = "the untouched network"
REFERENCES = {SOURCE: f"for {UNTOUCHED}", "bn": "with batch statistics alone"}
NOT_TESTED = "Differences were not tested: it is not known which images were predicted right."


def headline(rows: Rows) -> list[str]:
    """Say in a few sentences what was found.

    Example:
        >>> headline([])
        ['Nothing has been measured yet.']
    """
    every = frame(rows)
    if every.empty:
        return ["Nothing has been measured yet."]
    failed, count = int((every.status == "failed").sum()), counted(len(every), "measurement")
    end = f"{failed:,} of {count} failed." if failed else f"All {count} finished."
    return [*_finding(largest(comparisons(every))), end]


def question(rows: Rows) -> str:
    """Say what was asked, of the largest comparison.

    Example:
        >>> question([])
        ''
    """
    found = comparisons(rows)
    if not found:
        return ""
    comparison = largest(found)
    ours, lines, names = comparison.conditions, comparison.lines, comparison.corruptions
    severity = f" at severity {ours.severity}" if ours.severity else ""
    over = f"{len(names)} corruptions{severity}" if len(names) > 1 else heading(names[0]) + severity
    asked = f"Which of {len(lines)} methods has the lowest error"
    if len(lines) == 1:
        asked = f"What error has {lines.label.iloc[0]}"
    return f"{asked} with {ours.model} on {ours.data}, {over}?"


def title(rows: Rows) -> str:
    """Say in one line what was found in the largest comparison; `headline` says it whole.

    Example:
        >>> title([])
        'Nothing has been measured yet'
    """
    found = comparisons(rows)
    if not found:
        return "Nothing has been measured yet"
    comparison = largest(found)
    ranked = comparison.lines.dropna(subset="mean").sort_values("mean", kind="stable")
    if ranked.empty:
        return "No method was measured on every corruption"
    best, standings = ranked.iloc[0], comparison.standings()
    if len(ranked) == 1:
        return f"{best.label} has a mean error of {_percent(best['mean'])}"
    tested = "" if standings else " (not tested)"
    first = [line for line in ranked.index if standings and standings[line].rank == 1]
    if best.method == SOURCE and len(first) < 2:
        return f"No method beats {UNTOUCHED}{tested}"
    if SOURCE in set(ranked.method[first]):
        return f"No method is shown to beat {UNTOUCHED}"
    if len(first) > 1:
        return f"The lowest errors are not told apart: {listed(ranked.label[first].tolist())}"
    sources = [
        f" where {UNTOUCHED} has {_percent(mean)}"
        for mean in ranked["mean"][ranked.method == SOURCE]
    ]
    return (
        f"{best.label} has the lowest error: {_percent(best['mean'])}{''.join(sources[:1])}{tested}"
    )


def _finding(comparison: Comparison) -> list[str]:
    ours, lines = comparison.conditions, comparison.lines
    severity = f" at severity {ours.severity}" if ours.severity else ""
    where = (
        f"With {ours.model} on {ours.data}{severity} ({ours.setting}, {ours.batches}, "
        f"{ours.images:,} images per corruption)"
    )
    ranked, unranked = lines[lines["mean"].notna()], lines.label[lines["mean"].isna()]
    if ranked.empty:
        return [f"{where}, no method was measured on every corruption."]
    names = comparison.corruptions
    over = f"over {len(names)} corruptions" if len(names) > 1 else f"on {heading(names[0])}"
    ranked = ranked.sort_values("mean", kind="stable")
    known = bool(comparison.standings())
    lead, *more = _tested(comparison, ranked, over) if known else _untested(ranked, over)
    sentences = [f"{where}, {lead}", *more]
    if len(unranked):
        missing = ", ".join(unranked)
        sentences.append(f"Not ranked, because some corruptions are missing: {missing}.")
    return [*sentences, *on_clean_images(comparison, ranked.index[0])]


def _untested(ranked: DataFrame, over: str) -> list[str]:
    """Name the lowest error, where it is not known which images were right."""
    best = ranked.iloc[0]
    if best.method == SOURCE:
        lead = f"no method beats {UNTOUCHED}, {_percent(best['mean'])} mean error {over}"
    else:
        lead = f"{best.label} has the lowest mean error {over}, {_percent(best['mean'])}"
        others = [
            f"{_percent(mean)} {words}"
            for method, words in REFERENCES.items()
            for mean in ranked["mean"][(ranked.method == method) & (ranked.index != best.name)]
        ]
        lead += f", against {' and '.join(others)}" if others else ""
    return [f"{lead}.", *([NOT_TESTED] if len(ranked) > 1 else [])]


def _tested(comparison: Comparison, ranked: DataFrame, over: str) -> list[str]:
    """Name the lowest error, or all errors that are not told apart from it."""
    standings = comparison.standings()
    first = [line for line in ranked.index if standings[line].rank == 1]
    others = [line for line in ranked.index if line not in first]
    best, names = first[0], ranked.label
    found = certain(standings[best].error, "\u00a0%")
    interval = "(±: 95 % interval over images)"
    if len(ranked) == 1:
        return [f"{names[best]} has a mean error {over} of {found} {interval}."]
    if len(first) > 1:
        each = [f"{names[line]} ({certain(standings[line].error)})" for line in first]
        sentences = [
            f"the lowest mean errors {over} are not told apart: {listed(each)} percent {interval}."
        ]
        if SOURCE in set(ranked.method[first]):
            sentences.append(f"So no method is shown to beat {UNTOUCHED}.")
    elif ranked.method[best] == SOURCE:
        sentences = [f"no method beats {UNTOUCHED}, {found} mean error {over} {interval}."]
    else:
        sentences = [f"{names[best]} has the lowest mean error {over}, {found} {interval}."]
    # The next one, and those that everybody knows; all of them are told apart from the best.
    told = [line for line in others if line == others[0] or ranked.method[line] in REFERENCES]
    gaps = comparison.differences(best)
    below = [
        certain(gaps[line], " points" if line == told[0] else "")
        + f" below {UNTOUCHED if ranked.method[line] == SOURCE else names[line]}"
        for line in told
    ]
    return [*sentences, *([f"{names[best]} is {listed(below)}."] if below else [])]


def on_clean_images(comparison: Comparison, line: int) -> list[str]:
    """Compare a line with the untouched network on clean images; nothing if these are missing."""
    lines = comparison.lines
    ours, source = lines.loc[line], lines.clean[lines.method == SOURCE].dropna()
    unknown = source.empty or math.isnan(ours.clean)
    if unknown or ours.method == SOURCE or CLEAN in comparison.corruptions:
        return []
    gap = comparison.differences(source.index[0], CLEAN).get(line)
    end = ""
    if gap is not None and gap.told_apart:
        more = "more" if gap.mean > 0 else "fewer"
        end = f": {certain(gap)} points {more}"
    elif gap is not None:
        end = f": not told apart, {certain(gap)} points"
    return [
        f"On clean images {ours.label} has {_percent(ours.clean)} where {UNTOUCHED} has "
        f"{_percent(source.iloc[0])}{end}."
    ]


def listed(words: Sequence[str]) -> str:
    """Join words with commas and an "and".

    Example:
        >>> listed(["bn", "tent", "wiener"])
        'bn, tent and wiener'
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def certain(found: MeanInterval, unit: str = "") -> str:
    """Write a mean or the size of a difference with its interval, not to be broken over lines."""
    return f"{abs(found.mean):.1f}\u00a0±{found.half_width:.1f}{unit}"


def _percent(number: float) -> str:
    """Write a percentage that does not break over two lines."""
    return f"{number:.1f}\u00a0%"
