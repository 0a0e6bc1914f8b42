"""Which corruptions are shown: gains and images of all of them would fill many pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ttapca.benchmark.comparisons import SOURCE, Comparison, Conditions
from ttapca.benchmark.rows import CLEAN, Observation
from ttapca.corruptions import CORRUPTIONS, find

MOST = 4  # corruptions


def chosen_observations(
    observations: Iterable[Observation], found: Sequence[Comparison]
) -> dict[str, list[Observation]]:
    """Choose observations by corruption: of each family the one in which methods differ most.

    All of them were made under the same conditions, the most frequent ones.

    Args:
        observations: To choose from.
        found: The comparisons of the same file.
    """
    groups: dict[Conditions, dict[str, list[Observation]]] = {}
    counts: Counter[Conditions] = Counter()
    for each in observations:
        if each.cell.corruption == CLEAN:  # which has conditions of its own, and is not shown
            continue
        conditions = Conditions.of(each.cell)
        counts[conditions] += 1
        groups.setdefault(conditions, {}).setdefault(each.cell.corruption, []).append(each)
    if not counts:
        return {}
    conditions = counts.most_common(1)[0][0]
    seen = groups[conditions]
    spans = next((_spans(each) for each in found if each.conditions == conditions), {})
    families: dict[str, list[str]] = {}
    for name in (name for name in CORRUPTIONS if name in seen):
        families.setdefault(find(name).family, []).append(name)
    picked = [max(own, key=lambda name: spans.get(name, 0.0)) for own in families.values()]
    return {name: seen[name] for name in picked[:MOST]}


def _spans(comparison: Comparison) -> dict[str, float]:
    """Return the highest minus the lowest error of each corruption, without the untouched network.

    The untouched network is left out, because its distance tells how bad a corruption is.
    """
    rows = comparison.rows[(comparison.rows.method != SOURCE) & comparison.rows.error.notna()]
    errors = rows.groupby(["corruption", "line"]).error.mean().groupby("corruption")
    spans: dict[str, float] = (errors.max() - errors.min()).to_dict()
    return spans
