"""What the report says of its largest comparison: question, title, finding, and what to deploy.

Nothing is called lowest that is not told apart from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ttapca.benchmark.comparisons import (
    LINE,
    SOURCE,
    Comparison,
    Measurements,
    comparisons,
    frame,
    largest,
)
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


@dataclass(frozen=True)
class Finding:
    """What one comparison shows of its mean errors.

    Attributes:
        comparison: The comparison.
        ranked: The lines that have a mean error, the lowest first.
        first: Those with the lowest error and all that are not told apart from it.
        tested: Whether differences were tested; if not, `first` has the lowest only.
    """

    comparison: Comparison
    ranked: list[int]
    first: list[int]
    tested: bool

    @classmethod
    def of(cls, comparison: Comparison) -> Finding:
        """Return what a comparison shows."""
        means, standings = comparison.lines["mean"].dropna(), comparison.standings()
        ranked = means.sort_values(kind="stable").index.tolist()
        first = [line for line in ranked if standings and standings[line].rank == 1]
        return cls(comparison, ranked, first or ranked[:1], bool(standings))

    @property
    def source_is_first(self) -> bool:
        """Whether no method is shown to have a lower error than the untouched network."""
        return SOURCE in set(self.comparison.lines.method[self.first])

    def named(self, lines: Sequence[int]) -> str:
        """Return the names of lines, each with its mean error."""
        labels = self.comparison.lines.label
        errors = [f"{mean_value(self.comparison, line).text} %" for line in lines]
        pairs = zip(labels[list(lines)], errors, strict=True)
        return ", ".join(f"{label} {error}".replace(" ", "\u00a0") for label, error in pairs)

    def sentence(self) -> str:
        """Return what was found, in one sentence without its full stop."""
        if not self.ranked:
            return "No method was measured on every corruption"
        tested = "" if self.tested or len(self.ranked) == 1 else " (not tested)"
        if len(self.ranked) == 1:
            return f"Mean error: {self.named(self.ranked)}"
        if self.source_is_first:
            return f"No method is shown to have a lower error than {UNTOUCHED}{tested}"
        if len(self.first) > 1:
            labels = self.comparison.lines.label[self.first]
            return f"The lowest errors are not told apart: {', '.join(labels)}"
        methods = self.comparison.lines.method
        source = [line for line in self.ranked if methods[line] == SOURCE][:1]
        return f"Lowest mean error: {self.named([*self.first, *source])}{tested}"


def _over(comparison: Comparison) -> str:
    names, severity = comparison.corruptions, comparison.conditions.severity
    over = f"{len(names)} corruptions" if len(names) > 1 else heading(names[0])
    return f"{over} at severity {severity}" if severity else over


def question(rows: Measurements) -> str:
    """Say what was asked, of the largest comparison.

    Example:
        >>> question([])
        ''
    """
    found = comparisons(rows)
    if not found:
        return ""
    ours, methods = largest(found).conditions, counted(len(largest(found).lines), "method")
    return (
        f"Which of {methods} has the lowest error with {ours.model} on {ours.data}, "
        f"{_over(largest(found))}?"
    )


def title(rows: Measurements) -> str:
    """Say in one line what was found in the largest comparison; `headline` adds the numbers.

    Example:
        >>> title([])
        'Nothing has been measured yet'
    """
    found = comparisons(rows)
    return Finding.of(largest(found)).sentence() if found else NOTHING


def headline(rows: Measurements) -> list[str]:
    """Return the errors of the largest comparison in one sentence, and how many runs failed.

    Example:
        >>> headline([])
        ['Nothing has been measured yet.']
    """
    every = frame(rows)
    if every.empty:
        return [f"{NOTHING}."]
    finding = Finding.of(largest(comparisons(every)))
    comparison, said = finding.comparison, []
    if finding.ranked:
        others = [line for line in finding.ranked if line not in finding.first]
        groups = [finding.named(finding.first), *([finding.named(others)] if others else [])]
        between = ". Told apart from that: " if finding.tested else ", "
        said = [f"Mean error over {_over(comparison)}: {between.join(groups)}."]
        if finding.tested:
            said.append("±: 95\u00a0% interval over images.")
        elif others:
            said.append(NOT_TESTED)
    unranked = comparison.lines.label.drop(finding.ranked).tolist()
    if unranked:
        said.append(f"Not measured on every corruption: {', '.join(unranked)}.")
    failed, count = int((every.status == "failed").sum()), counted(len(every), "measurement")
    end = f"{failed:,} of {count} failed." if failed else f"All {count} finished."
    return [f"{comparison.conditions.title}.", *said, end]


def deployment(found: Sequence[Comparison]) -> tuple[str, ResultTable | None]:
    """Say what to deploy under the conditions of the largest comparison, and what each would cost.

    The lowest error is chosen if it is told apart from all others. Of several that are not told
    apart, the fastest is chosen; nothing, if the untouched network is one of them.

    Returns:
        A sentence, empty with fewer than two methods; and a table with a line for each method.

    Example:
        >>> deployment([])
        ('', None)
    """
    if not found or len(largest(found).lines) < 2:
        return "", None
    finding = Finding.of(largest(found))
    lines, first = finding.comparison.lines, finding.first
    if not finding.tested:
        return f"No choice: {NOT_TESTED}", None
    if len(finding.ranked) < 2:
        return "No choice: fewer than two methods were measured on every corruption.", None
    table = _deployment_table(finding, found)
    if finding.source_is_first:
        return f"No adaptation: {finding.sentence()}, which costs least.", table
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
    clean = _clean_differences(comparison)
    notes = [TEST]
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


def _clean_differences(comparison: Comparison) -> dict[int, Value]:
    """Return the errors on clean images above that of the untouched network, by line."""
    source = comparison.lines.index[comparison.lines.method == SOURCE]
    if not len(source) or CLEAN not in comparison.with_clean or CLEAN in comparison.corruptions:
        return {}
    return differences_to(comparison, source[0], CLEAN)


def _other_streams(
    comparison: Comparison, found: Sequence[Comparison]
) -> list[dict[tuple[object, ...], int]]:
    """Return the ranks of methods in other streams of the same network and data."""
    ours, ranks = comparison.conditions, []
    for other in found:
        theirs = other.conditions
        same = (ours.model, ours.weights, ours.data) == (theirs.model, theirs.weights, theirs.data)
        standings = other.standings()
        if same and other is not comparison and len(standings) > 1:
            keys = other.lines[LINE].apply(tuple, axis=1)
            ranks.append({keys[line]: each.rank for line, each in standings.items()})
    return ranks
