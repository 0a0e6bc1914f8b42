"""The findings of a report: question, title, headline and choice, of its largest comparison.

Nothing is called lowest that is not told apart from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ttapca.benchmark.comparisons import LINE, SOURCE, Comparison, Measurements, frame, largest
from ttapca.benchmark.difference_tables import differences_to
from ttapca.benchmark.rows import CLEAN
from ttapca.benchmark.tables import (
    COSTS,
    MISSING,
    RANK,
    TEST,
    ResultTable,
    Value,
    cost_value,
    heading,
    mean_heading,
    mean_value,
    rank_value,
)
from ttapca.support.progress import counted

NOTHING = "Nothing has been measured yet"
UNTOUCHED = "the untouched network"
NOT_TESTED = "Differences were not tested: it is not known which images were predicted right."
DEPLOYED_COSTS = ("milliseconds", "times_source")  # columns of the lines


class Finding:
    """The finding of one comparison of mean errors.

    Attributes:
        ranked: The lines that have a mean error, the lowest first.
        first: The lines with the lowest error, and all that are not told apart from it.
        tested: Whether differences were tested; if not, `first` has the lowest only.
        source_is_first: Whether no method is shown to have a lower error than the source.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, standings = comparison, comparison.standings()
        means = comparison.lines["mean"].dropna().sort_values(kind="stable")
        self.ranked: list[int] = means.index.tolist()
        self.tested = bool(standings)
        best = [line for line in self.ranked if self.tested and standings[line].rank == 1]
        self.first = best or self.ranked[:1]
        self.source_is_first = SOURCE in set(comparison.lines.method[self.first])

    def named(self, lines: Sequence[int]) -> str:
        """Return the names of lines, each with its mean error."""
        labels = self.comparison.lines.label
        pairs = (f"{labels[line]} {mean_value(self.comparison, line).text} %" for line in lines)
        return ", ".join(pair.replace(" ", "\u00a0") for pair in pairs)

    @property
    def title(self) -> str:
        """The finding in one sentence without its full stop."""
        lines = self.comparison.lines
        if not self.ranked:
            return "No method was measured on every corruption"
        if len(self.ranked) == 1:
            return f"Mean error: {self.named(self.ranked)}"
        tested = "" if self.tested else " (not tested)"
        if self.source_is_first:
            return f"No method is shown to have a lower error than {UNTOUCHED}{tested}"
        if len(self.first) > 1:
            return f"The lowest errors are not told apart: {', '.join(lines.label[self.first])}"
        source = [line for line in self.ranked if lines.method[line] == SOURCE][:1]
        return f"Lowest mean error: {self.named([*self.first, *source])}{tested}"

    @property
    def over(self) -> str:
        """The corruptions that the means are over."""
        names, severity = self.comparison.corruptions, self.comparison.conditions.severity
        over = f"{len(names)} corruptions" if len(names) > 1 else heading(names[0])
        return f"{over} at severity {severity}" if severity else over


def question(found: Sequence[Comparison]) -> str:
    """Return the question of the largest comparison."""
    if not found:
        return ""
    finding = Finding(largest(found))
    ours, methods = finding.comparison.conditions, len(finding.comparison.lines)
    return (
        f"Which of {counted(methods, 'method')} has the lowest error with {ours.model} on "
        f"{ours.data}, {finding.over}?"
    )


def title(found: Sequence[Comparison]) -> str:
    """Return the finding of the largest comparison in one line."""
    return Finding(largest(found)).title if found else NOTHING


def headline(rows: Measurements, found: Sequence[Comparison]) -> list[str]:
    """Return the errors of the largest comparison in one sentence, and how many runs failed."""
    if not found:
        return [f"{NOTHING}."]
    finding, said = Finding(largest(found)), list[str]()
    if finding.ranked:
        others = [line for line in finding.ranked if line not in finding.first]
        groups = [finding.named(finding.first), *([finding.named(others)] if others else [])]
        between = ". Told apart from that: " if finding.tested else ", "
        said = [f"Mean error over {finding.over}: {between.join(groups)}."]
        if finding.tested:
            said.append("±: 95\u00a0% interval over images.")
        elif others:
            said.append(NOT_TESTED)
    if unranked := finding.comparison.lines.label.drop(finding.ranked).tolist():
        said.append(f"Not measured on every corruption: {', '.join(unranked)}.")
    statuses = frame(rows).status
    failed, count = int((statuses == "failed").sum()), counted(len(statuses), "measurement")
    end = f"{failed:,} of {count} failed." if failed else f"All {count} finished."
    return [f"{finding.comparison.conditions.title}.", *said, end]


def deployment(found: Sequence[Comparison]) -> tuple[str, ResultTable | None]:
    """Return the method to deploy under the conditions of the largest comparison, and its rivals.

    The lowest error is chosen if it is told apart from all others. Of several that are not told
    apart, the fastest is chosen; nothing, if the untouched network is one of them. The sentence is
    empty with fewer than two methods. The table has a line for each method.
    """
    if not found or len(largest(found).lines) < 2:
        return "", None
    finding = Finding(largest(found))
    lines, first = finding.comparison.lines, finding.first
    if not finding.tested:
        return f"No choice: {NOT_TESTED}", None
    if len(finding.ranked) < 2:
        return "No choice: fewer than two methods were measured on every corruption.", None
    table = _deployment_table(finding, found)
    if finding.source_is_first:
        return f"No adaptation: {finding.title}, which costs least.", table
    fastest = lines.milliseconds[first].sort_values(kind="stable").index[0]
    why = "the lowest error, told apart from all others"
    if len(first) > 1:
        why = f"the fastest of {len(first)} methods with the lowest error, not told apart"
    open_ = SOURCE not in set(lines.method[finding.ranked])
    whether = f" Whether to adapt at all is open: {UNTOUCHED} was not measured." if open_ else ""
    return f"{lines.label[fastest]}: {why}.{whether}", table


def _deployment_table(finding: Finding, found: Sequence[Comparison]) -> ResultTable:
    """Return errors, costs, harm on clean images and ranks in other streams, lowest error first."""
    comparison, lines = finding.comparison, finding.comparison.lines
    columns = ["method", mean_heading(comparison.corruptions), RANK]
    columns += [COSTS[name][0] for name in DEPLOYED_COSTS]
    notes = [TEST]
    source = lines.index[lines.method == SOURCE]
    clean: dict[int, Value] = {}
    if len(source) and comparison.with_clean != comparison.corruptions:
        clean = differences_to(comparison, source[0], CLEAN)
    if clean:
        columns.append("clean images, minus source")
        notes.append(f"In brackets: not told apart from {UNTOUCHED}.")
    others = _other_streams(comparison, found)
    if others:
        columns.append("lowest in other streams")
        notes.append(
            "Other streams: in how many of those in this file the error of the method is the "
            "lowest, or not told apart from it."
        )
    body = []
    for line in finding.ranked:
        mean = mean_value(comparison, line)
        values = [Value(lines.label[line]), mean, rank_value(mean)]
        values += [cost_value(comparison, line, name) for name in DEPLOYED_COSTS]
        if clean:
            values.append(replace(clean.get(line, MISSING), heat=None))
        if others:
            options = tuple(lines.loc[line, LINE])
            ranks = [ranks[options] for ranks in others if options in ranks]
            text = f"{ranks.count(1)} of {len(ranks)}"
            values.append(Value(text, float(ranks.count(1)), "number"))
        body.append(tuple(values))
    return ResultTable(comparison.conditions.title, tuple(columns), tuple(body), tuple(notes))


def _other_streams(
    comparison: Comparison, found: Sequence[Comparison]
) -> list[dict[tuple[object, ...], int]]:
    """Return the ranks of methods in other streams of the same network and data."""
    ranks = []
    for other in found:
        standings = other.standings()
        same = other.conditions[:3] == comparison.conditions[:3]  # network, weights, data
        if same and other is not comparison and len(standings) > 1:
            keys = other.lines[LINE].apply(tuple, axis=1)
            ranks.append({keys[line]: each.rank for line, each in standings.items()})
    return ranks
