"""Curves with a legend below: how one option changes a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttapca.benchmark.palette import DASHES, label_plainly, look, plain, plot_line
from ttapca.benchmark.plots import Line, Panel, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, PANEL_HEIGHT = 4.6, 2.75, 1.7  # inches, of 72 units each in the SVG
LEGEND_HEIGHT = 0.19  # of a line
LONG = 16  # letters, from which names stand in two columns
APART = 4.0  # points between bars of spread that would stand over one another


def curves_figure(plot: Plot) -> Figure:
    """Draw panels above one another.

    Args:
        plot: What to draw.

    Returns:
        A figure of matplotlib.
    """
    from matplotlib.figure import Figure

    names = {line.name for panel in plot.panels for line in panel.lines}
    columns = 2 if max(map(len, names), default=0) > LONG else 3
    height = HEIGHT + PANEL_HEIGHT * (len(plot.panels) - 1)
    height += LEGEND_HEIGHT * -(-len(names) // columns)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(len(plot.panels), sharex=True, squeeze=False)[:, 0]
    for panel, place in zip(plot.panels, axes, strict=True):
        _fill(place, panel)
    last = axes[-1]
    last.set_xlabel(plot.label)
    _scale_x(last, plot)
    handles = {
        name: handle
        for place in axes
        for handle, name in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False
    )
    return figure


def _fill(place: Axes, panel: Panel) -> None:
    from matplotlib.transforms import offset_copy

    place.set_ylabel(panel.label)
    place.set_yscale(panel.scale)
    place.grid(visible=True)
    place.set_axisbelow(True)
    spread = [line for line in panel.lines if line.x and line.spread]
    for line in panel.lines:
        if not line.x:
            _draw_level(place, line)
            continue
        if line not in spread:
            plot_line(place, line)
            continue
        shift = APART * (spread.index(line) - (len(spread) - 1) / 2)
        figure = place.get_figure(root=True)
        plot_line(place, line, offset_copy(place.transData, figure, shift, units="points"))
        # Matplotlib does not look at what was moved when it chooses the limits.
        for sign in (-1, 1):
            ends = [y + sign * each for y, each in zip(line.y, line.spread, strict=True)]
            place.update_datalim(list(zip(line.x, ends, strict=True)))
    place.autoscale_view()
    label_plainly(place.yaxis, panel.scale)


def _draw_level(place: Axes, line: Line) -> None:
    """A line all the way across, with its spread as a band."""
    colour = look(line.style)["color"]
    dash = DASHES[line.style % len(DASHES)]
    (level,) = line.y
    place.axhline(level, color=colour, linestyle=dash, label=line.name)
    for spread in line.spread:
        place.axhspan(level - spread, level + spread, color=colour, alpha=0.18, linewidth=0)


def _scale_x(place: Axes, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    place.set_xscale(plot.scale)
    label_plainly(place.xaxis, plot.scale)
    if plot.ticks:
        place.set_xticks(plot.ticks, [plain(tick) for tick in plot.ticks])
    elif plot.scale == "linear":
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
