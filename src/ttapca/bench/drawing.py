"""Plots as SVG that takes its ink from the page around it: dark on light, light on dark.

Matplotlib knows no CSS. So it draws with colours that nothing else uses, and these are then
replaced: the ink by `currentColor`, the curves' colours by variables with a fallback. Curves differ
in colour (after Okabe and Ito's palette, made for colour-blind readers), in marker and in dash, so
that they can be told apart in grey.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING

from ttapca.bench.plots import INK, Line, Panel, Plot, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07c00", "#3d9ad1", "#7f7f7f")
MARKERS = "osD^vP*X<>hpd"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
WIDTH, HEIGHT, PANEL_HEIGHT = 4.6, 2.75, 1.7  # inches, of 72 units each in the SVG
LEGEND_HEIGHT = 0.19  # of a line
LONG = 16  # letters, from which names stand in two columns
MARKS = 7  # on a curve of many points

_INK = "#010203"
_SERIES = tuple(f"#0a0b{number:02x}" for number in range(len(PALETTE)))
_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.alpha": 0.18,
    "grid.color": _INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw(plot: Plot) -> str:
    """Draw a plot.

    Args:
        plot: What to draw.

    Returns:
        An `<svg>` element that stands alone or inside a page; the same for the same plot.

    Example:
        >>> line = Line("tent", 0, (1.0, 2.0), (20.0, 19.0))
        >>> plot = Plot("steps", "Error against steps", "", "steps", (Panel("error", (line,)),))
        >>> draw(plot).startswith('<svg role="img" aria-label="Error against steps"')
        True
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {**_STYLE, "svg.hashsalt": plot.name}
    with mpl.rc_context(style):  # type: ignore[arg-type]
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
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _for_pages(stream.getvalue(), plot)


def _fill(place: Axes, panel: Panel) -> None:
    place.set_ylabel(panel.label)
    place.set_yscale(panel.scale)
    place.grid(visible=True)
    place.set_axisbelow(True)
    for line in panel.lines:
        _draw_line(place, line)
    _label_plainly(place.yaxis, panel.scale)


def _draw_line(place: Axes, line: Line) -> None:
    if line.style == INK:
        place.plot(line.x, line.y, color=_INK, label=line.name)
        return
    colour = _SERIES[line.style % len(_SERIES)]
    dash = DASHES[line.style % len(DASHES)]
    if not line.x:
        place.axhline(line.y[0], color=colour, linestyle=dash, label=line.name)
        return
    place.errorbar(
        line.x,
        line.y,
        yerr=line.spread or None,
        color=colour,
        linestyle=dash,
        marker=MARKERS[line.style % len(MARKERS)],
        markevery=max(1, len(line.x) // MARKS),
        capsize=2,
        elinewidth=0.9,
        label=line.name,
    )


def _scale_x(place: Axes, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    if plot.scale == "symlog":
        place.set_xscale("symlog", linthresh=10)
    else:
        place.set_xscale(plot.scale)
    _label_plainly(place.xaxis, plot.scale)
    if plot.ticks:
        place.set_xticks(plot.ticks, [f"{tick:g}" for tick in plot.ticks])
    elif plot.scale == "linear":
        place.xaxis.set_major_locator(MaxNLocator(integer=True))


def _label_plainly(axis: Axis, scale: Scale) -> None:
    """Write 0.01 and 100 on a logarithmic axis, not powers, which need a typesetter."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if scale == "linear":
        return
    if scale == "log":
        low, high = axis.get_view_interval()
        narrow = high / low < 50  # less than two decades
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _for_pages(svg: str, plot: Plot) -> str:
    """Leave the drawing only, and hand colours, font and size to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    size = re.search(r'viewBox="[^"]*"', svg)
    title = html.escape(plot.title)
    box = size.group(0) if size else ""
    opening = (
        f'<svg role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" {box}>'
    )
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    # Two figures of a page must not share the names of their clips and markers.
    svg = re.sub(r'\bid="', f'id="{plot.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--figure-font, sans-serif)", svg)
    for number, (mark, colour) in enumerate(zip(_SERIES, PALETTE, strict=True)):
        svg = svg.replace(mark, f"var(--series-{number}, {colour})")
    return svg.replace(_INK, "currentColor").strip()
