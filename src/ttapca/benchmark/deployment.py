"""What would I deploy: a choice from the measurements, if the intervals carry one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ttapca.benchmark.comparisons import LINE, SOURCE, Comparison, largest
from ttapca.benchmark.headline import UNTOUCHED, certain, listed, on_clean_images

FASTER = 0.8  # of the time of the chosen method: what is worth naming beside it
NAMED = 3  # other comparisons
UNIT = "\u00a0%"
NO_CHOICE = "These results carry no choice:"


def deployment(found: Sequence[Comparison]) -> list[str]:
    """Say what to deploy under the conditions of the largest comparison, and what it costs.

    The lowest error is chosen if it is told apart from all others. Of several that are not told
    apart, the fastest is chosen; nothing, if the untouched network is one of them.

    Returns:
        A few sentences; none where there is nothing to choose from.

    Example:
        >>> deployment([])
        []
    """
    if not found or len(largest(found).lines) < 2:
        return []
    comparison = largest(found)
    ranked, lines = comparison.standings(), comparison.lines
    if not ranked:
        return [f"{NO_CHOICE} no difference was tested, see below the tables."]
    if len(ranked) < 2:
        return [f"{NO_CHOICE} fewer than two methods were measured on every corruption."]
    first = sorted(
        (line for line in ranked if ranked[line].rank == 1),
        key=lambda line: ranked[line].error.mean,
    )
    if SOURCE in set(lines.method[first]):
        return [
            f"No adaptation: the lowest error is not told apart from that of {UNTOUCHED}, which "
            "costs least."
            if len(first) > 1
            else f"No adaptation: {UNTOUCHED} has the lowest error, and costs least."
        ]
    chosen = min(first, key=lambda line: _time(comparison, line))  # the lowest if none was timed
    return [
        _choice(comparison, first, chosen),
        *_faster(comparison, chosen),
        *_without_source(comparison),
        *(on_clean_images(comparison, chosen) or ["Clean images were not measured."]),
        f"All this was measured at {comparison.conditions.stream}.",
        *_elsewhere(comparison, found, chosen),
    ]


def _time(comparison: Comparison, line: int) -> float:
    milliseconds = float(comparison.lines.milliseconds[line])
    return math.inf if math.isnan(milliseconds) else milliseconds


def _cost(comparison: Comparison, line: int) -> str:
    """Say how long a method takes; nothing where it is not known."""
    times, milliseconds = comparison.lines.loc[line, ["times_source", "milliseconds"]]
    if not math.isnan(times):
        return f"{times:.1f} times the time of {UNTOUCHED}"
    return "" if math.isnan(milliseconds) else f"{milliseconds:.2f} ms per image"


def _choice(comparison: Comparison, first: Sequence[int], chosen: int) -> str:
    labels, error = comparison.lines.label, comparison.standings()[chosen].error
    cost = _cost(comparison, chosen)
    start = f"{labels[chosen]}: its mean error, {certain(error, UNIT)}, is"
    takes = f" It takes {cost}." if cost else ""
    least = f", and of these {len(first)} it took the least time" if cost else ""
    others = [labels[line] for line in first if line != chosen]
    if not others:
        return f"{start} the lowest, and told apart from all others.{takes}"
    if chosen == first[0]:
        return f"{start} the lowest. It is not told apart from {listed(others)}{least}.{takes}"
    rest = f" Nor {'are' if others[2:] else 'is'} {listed(others[1:])}." if others[1:] else ""
    return f"{start} not told apart from the lowest, that of {others[0]}{least}.{rest}{takes}"


def _faster(comparison: Comparison, chosen: int) -> list[str]:
    """Name what is clearly faster, and by how much it is worse."""
    lines, gaps = comparison.lines, comparison.differences(chosen)
    limit = FASTER * _time(comparison, chosen)
    faster = [
        line
        for line, gap in gaps.items()
        if gap.told_apart
        and gap.mean > 0
        and lines.method[line] != SOURCE
        and _time(comparison, line) < limit < math.inf
    ]
    if not faster:
        return []
    best = min(faster, key=lambda line: gaps[line].mean)
    more = certain(gaps[best], " points")
    return [f"If that is too slow: {lines.label[best]}, {_cost(comparison, best)}, {more} more."]


def _without_source(comparison: Comparison) -> list[str]:
    if SOURCE in set(comparison.lines.method[list(comparison.standings())]):
        return []
    return [f"Whether to adapt at all is open: {UNTOUCHED} (source) was not measured."]


def _elsewhere(comparison: Comparison, found: Sequence[Comparison], chosen: int) -> list[str]:
    """Say where else the choice is good, where it does not help, and where another is better."""
    wanted, ours = comparison.lines.loc[chosen, LINE].tolist(), comparison.conditions
    good, useless, bad = [], [], []
    for other in found:
        theirs, ranked, lines = other.conditions, other.standings(), other.lines
        same = (ours.model, ours.weights, ours.data) == (theirs.model, theirs.weights, theirs.data)
        own = [line for line in ranked if lines.loc[line, LINE].tolist() == wanted]
        if not same or not own or len(ranked) < 2 or other is comparison:
            continue
        lowest = min(ranked, key=lambda line: ranked[line].error.mean)
        first = [line for line in ranked if ranked[line].rank == 1]
        if own[0] not in first:
            bad.append(f"{theirs.stream} (than {lines.label[lowest]})")
        elif SOURCE in set(lines.method[first]):
            useless.append(theirs.stream)
        else:
            good.append(theirs.stream)
    return [
        *([f"No method is shown to be better on other streams: {_some(good)}."] if good else []),
        *([f"It is not shown to help on others: {_some(useless)}."] if useless else []),
        *([f"It is worse on others: {_some(bad)}."] if bad else []),
    ]


def _some(words: Sequence[str]) -> str:
    left = len(words) - NAMED
    return "; ".join([*words[:NAMED], *([f"{left} more"] if left > 0 else [])])
