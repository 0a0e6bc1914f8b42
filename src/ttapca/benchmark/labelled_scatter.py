"""Points with their names beside them, in the order of their values.

A legend makes a reader go back and forth, and names at the points would lie over one another where
methods are nearly equal. So the names stand in a column at the side, each with its marker and its
value, as near to the point's height as the others let it, and a thin line leads to the point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ttapca.benchmark.palette import INK_MARK, SMALL, label_plainly, look, plot_line
from ttapca.benchmark.plots import Line, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.6, 2.75  # inches, of 72 units each in the SVG
LEFT, BOTTOM, TOP = 0.62, 0.5, 0.1  # margins
FIELD = 2.1  # the narrowest the points may have it
ROW = 0.18  # height of a name
GAP = 0.11  # in a broken axis
FAN = 0.3  # width in which the leading lines end
LETTER = 0.58 * SMALL / 72  # a generous guess: the page chooses the font
LEAST_SPAN = 2.0  # less is not magnified: it would show chance as a difference
DECADES = 3  # labelled, for which there is room
PAD = 0.08  # of the span, above and below


def named_figure(plot: Plot) -> Figure:
    """Draw points, and their names at the side.

    Args:
        plot: What to draw: one panel, one point a line.

    Returns:
        A figure of matplotlib.
    """
    from matplotlib.figure import Figure

    (panel,) = plot.panels
    lines = sorted(panel.lines, key=lambda line: line.y)
    column = FAN + 0.12 + LETTER * max(len(_words(line)) for line in lines)
    width = max(WIDTH, LEFT + FIELD + column)
    height = max(HEIGHT, BOTTOM + TOP + ROW * (len(lines) + 1))
    figure = Figure(figsize=(width, height))
    below = [line for line in lines if panel.cut is None or line.y[0] < panel.cut]
    above = lines[len(below) :]
    strip = max(0.3, ROW * len(above)) + GAP if above else 0.0
    field = (LEFT / width, (width - LEFT - column) / width)
    main = figure.add_axes(
        (field[0], BOTTOM / height, field[1], 1 - (BOTTOM + TOP + strip) / height)
    )
    _fill(main, below, plot)
    main.set_ylabel(panel.label)
    main.set_xlabel(plot.label)
    places = [main] * len(below)
    if above:
        strip -= GAP
        top = figure.add_axes((field[0], 1 - (TOP + strip) / height, field[1], strip / height))
        _fill(top, above, plot)
        _break(main, top, above)
        places += [top] * len(above)
    _name(figure, lines, places, 1 - column / width)
    return figure


def _fill(place: Axes, lines: Sequence[Line], plot: Plot) -> None:
    for line in lines:
        plot_line(place, line)
    place.grid(visible=True)
    place.set_axisbelow(True)
    values = [y + sign * s for each in lines for y, s in _spread(each) for sign in (-1, 1)]
    middle, span = (max(values) + min(values)) / 2, max(max(values) - min(values), LEAST_SPAN)
    place.set_ylim(middle - span * (0.5 + PAD), middle + span * (0.5 + PAD))
    _scale_x(place, plot)


def _spread(line: Line) -> list[tuple[float, float]]:
    return list(zip(line.y, line.spread or (0.0,) * len(line.y), strict=True))


def _scale_x(place: Axes, plot: Plot) -> None:
    """The same limits for both parts of a broken axis, and always some number to read."""
    values = [x for line in plot.panels[0].lines for x in line.x]
    if plot.scale == "symlog":
        place.set_xscale("symlog", linthresh=10)
        place.set_xlim(-4, max(10.0, *values) * 2)
        label_plainly(place.xaxis, plot.scale)
        decades = range(1, 1 + int(math.log10(max(10.0, *values))))
        apart = -(-len(decades) // DECADES)
        place.set_xticks([0, *(10**decade for decade in decades[::apart])])
    else:
        place.set_xscale("log")
        margin = (max(values) / min(values)) ** PAD
        place.set_xlim(min(values) / margin, max(values) * margin)
        label_plainly(place.xaxis, plot.scale)


def _break(main: Axes, top: Axes, above: Sequence[Line]) -> None:
    """Two slanted strokes where the y-axis leaves something out."""
    top.spines["bottom"].set_visible(False)
    top.tick_params(axis="x", length=0, labelbottom=False)
    ends = sorted({above[0].y[0], above[-1].y[0]})
    top.set_yticks(ends, [f"{each:.1f}" for each in ends])
    for place, height in ((main, 1.0), (top, 0.0)):
        place.plot(
            (0.0,),
            (height,),
            transform=place.transAxes,
            marker=((-1.0, -0.5), (1.0, 0.5)),
            markersize=8,
            color=INK_MARK,
            markeredgewidth=0.9,
            clip_on=False,
        )


def _name(figure: Figure, lines: Sequence[Line], places: Sequence[Axes], left: float) -> None:
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()
    at = figure.transFigure.inverted()
    points = [
        at.transform(place.transData.transform((line.x[0], line.y[0])))
        for line, place in zip(lines, places, strict=True)
    ]
    row = ROW / height
    heights = spaced([point[1] for point in points], row, row / 2, 1 - row / 2)
    end = left + FAN / width
    for line, point, level in zip(lines, points, heights, strict=True):
        lead = Line2D(
            (point[0], left + 0.06 / width, end - 0.08 / width),
            (point[1], level, level),
            color=INK_MARK,
            alpha=0.3,
            linewidth=0.6,
            zorder=-1,
        )
        figure.add_artist(lead)
        figure.add_artist(Line2D((end,), (level,), linestyle="", **look(line.style)))
        figure.text(end + 0.1 / width, level, _words(line), va="center_baseline", fontsize=SMALL)


def _words(line: Line) -> str:
    spread = f" ±{line.spread[0]:.1f}" if line.spread else ""
    return f"{line.y[0]:.1f}{spread}\u2002{line.name}"


def spaced(wanted: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Move names apart: as near as can be to where they belong, in the same order.

    Args:
        wanted: Where each belongs, from the lowest to the highest.
        step: The least distance between two.
        low: Where the first may stand.
        high: Where the last may stand, if there is room for all.

    Returns:
        A place for each; the sum of squared moves is the least there is.

    Example:
        >>> spaced([1.0, 1.0, 5.0], 1.0, 0.0, 10.0)
        [0.5, 1.5, 5.0]
    """
    # Less a step for each name below, places need only not to fall: pool those that would.
    pools: list[tuple[float, int]] = []  # sum and count
    for number, want in enumerate(wanted):
        pools.append((want - number * step, 1))
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            (one, few), (two, more) = pools.pop(), pools.pop()
            pools.append((one + two, few + more))
    highest = high - step * (len(wanted) - 1)
    levels = [max(low, min(_mean(pool), highest)) for pool in pools for _ in range(pool[1])]
    return [level + number * step for number, level in enumerate(levels)]


def _mean(pool: tuple[float, int]) -> float:
    return pool[0] / pool[1]
