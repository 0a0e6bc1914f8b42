"""Error against what a method needs: one point a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ttapca.benchmark.labelled_scatter import LEAST_SPAN
from ttapca.benchmark.lines import ERROR, PICKED, caption, curve, style_of, without_sweeps
from ttapca.benchmark.plots import Panel, Plot, Scale
from ttapca.benchmark.row_groups import Grid, Variant, labels
from ttapca.benchmark.summary import SOURCE, seconds_an_image


def error_against_parameters(grid: Grid, styles: dict[str, int]) -> Plot | None:
    """Error against the number of parameters that a method adapts.

    Args:
        grid: What was measured in one place.
        styles: Of the methods.

    Returns:
        The figure; None when all methods adapt as many.
    """

    def adapted(variant: Variant) -> float:
        return max(row.outcome.parameters for row in grid.of(variant))

    title = "Error against parameters adapted"
    return _scatter("parameters", title, "parameters adapted", "symlog", grid, adapted, styles)


def error_against_cost(grid: Grid, styles: dict[str, int]) -> Plot | None:
    """Error against time: in times that of the untouched network, where it was measured.

    Args:
        grid: What was measured in one place.
        styles: Of the methods.

    Returns:
        The figure; None where there are no two times.
    """
    source = next((each for each in grid.variants if each.method == SOURCE), None)
    base = seconds_an_image(grid, source) if source else 0.0
    label = "time an image (source = 1)" if base else "milliseconds an image"
    unit = base or 0.001

    def time(variant: Variant) -> float:
        return seconds_an_image(grid, variant) / unit

    return _scatter("cost", "Error against cost", label, "log", grid, time, styles)


def _scatter(
    name: str,
    title: str,
    label: str,
    scale: Scale,
    grid: Grid,
    measure: Callable[[Variant], float],
    styles: dict[str, int],
) -> Plot | None:
    whole = [each for each in grid.variants if grid.mean(each) is not None]
    shown = without_sweeps(whole)
    names = labels(shown)
    lines = tuple(
        curve(names[each], style_of(each, styles, shown), [(measure(each), mean)])
        for each in shown
        if (mean := grid.mean(each)) is not None and (scale != "log" or measure(each) > 0)
    )
    if len({line.x for line in lines}) < 2:  # nothing to hold the error against
        return None
    cut = break_above([line.y[0] for line in lines])
    words = caption(grid) + " Down and to the left is better."
    words += " The vertical axis is broken." if cut is not None else ""
    words += PICKED if len(shown) < len(whole) else ""
    return Plot(name, title, words, label, (Panel(ERROR, lines, cut=cut),), scale, named=True)


def break_above(values: Sequence[float]) -> float | None:
    """Where to break an axis, so that a few high values do not squeeze the others together.

    Args:
        values: All that is to be shown.

    Returns:
        The middle of the first gap that is wider than all below it spans and that has at least
        half of the values, and two, below it; None when there is none.

    Example:
        >>> break_above([30.9, 49.6, 24.8, 31.0])
        40.3
        >>> break_above([20.0, 30.0, 35.0]) is None
        True
    """
    ordered = sorted(values)
    for at in range(max(2, -(-len(ordered) // 2)), len(ordered)):
        low, high = ordered[at - 1], ordered[at]
        if high - low > max(low - ordered[0], LEAST_SPAN):
            return (low + high) / 2
    return None
