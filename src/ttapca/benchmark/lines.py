"""What the figures of errors share: a line of a table as a line of a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ttapca.benchmark import paper
from ttapca.benchmark.plots import Line
from ttapca.benchmark.row_groups import Grid, Spread, Variant
from ttapca.benchmark.tables import full_name, title_of

ERROR = "mean error [%]"
PICKED = (
    f" Of several ranks or steps, those nearest to the paper's {paper.COMPONENTS:,} and "
    f"{paper.STEPS}."
)


def style_of(variant: Variant, styles: dict[str, int], drawn: Iterable[Variant]) -> int:
    """A method's own style; a second curve of the same method gets one that nothing else has.

    Args:
        variant: What is drawn.
        styles: Of the methods.
        drawn: All variants of the figure.

    Returns:
        The number of its style.
    """
    first: dict[str, Variant] = {}
    more = [each for each in drawn if first.setdefault(each.method, each) != each]
    return len(styles) + 1 + more.index(variant) if variant in more else styles[variant.method]


def curve(name: str, style: int, points: Sequence[tuple[float, Spread]]) -> Line:
    """A line through points, with the spread over seeds where there is any."""
    spreads = tuple(spread.deviation or 0.0 for _, spread in points)
    return Line(
        name,
        style,
        tuple(float(x) for x, _ in points),
        tuple(spread.mean for _, spread in points),
        spreads if any(spreads) else (),
    )


def without_sweeps(variants: Iterable[Variant]) -> list[Variant]:
    """Of variants that differ in rank or steps only, the one nearest to the paper's.

    Args:
        variants: The lines of a table.

    Returns:
        One of each such family, in their order.

    Example:
        >>> low = Variant("ttapca-exp", "{}", "conv1", 50, 1, 0.001)
        >>> kept = without_sweeps([low, replace(low, components=1000), replace(low, steps=10)])
        >>> [(each.components, each.steps) for each in kept]
        [(1000, 1)]
    """

    def distance(variant: Variant) -> tuple[int, int]:
        return abs(variant.steps - paper.STEPS), abs(variant.components - paper.COMPONENTS)

    families: dict[Variant, Variant] = {}
    for variant in variants:
        family = replace(variant, components=0, steps=0)
        families[family] = min(families.get(family, variant), variant, key=distance)
    return list(families.values())


def caption(grid: Grid, *, batch: bool = True, spread: str = "bars") -> str:
    """Say what the points of a figure are means of.

    Args:
        grid: Where they were measured.
        batch: Whether all share the size of their batches.
        spread: What the spread over seeds is drawn as; nothing when it is not.

    Returns:
        Two sentences.
    """
    place = grid.place if batch else replace(grid.place, batch_size=0)
    title = title_of(place) if batch else title_of(place).replace("batches of 0, ", "")
    count, seeds = len(grid.corruptions), len(grid.seeds)
    over = f"Mean over {count} corruptions" if count > 1 else full_name(grid.corruptions[0])
    drawn = f"; {spread}: standard deviation over {seeds} seeds" if spread and seeds > 1 else ""
    return f"{title}. {over}{drawn}."
