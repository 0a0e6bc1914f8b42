"""How curves look: colours, markers and dashes, and the axes that all figures share.

Curves differ in colour (after Okabe and Ito's palette, made for colour-blind readers), in marker
and in dash, so that they can be told apart in grey. Matplotlib knows no CSS: here are the colours
that stand for the page's, which `drawing` puts in.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ttapca.benchmark.plots import INK, Line, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.transforms import Transform

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07c00", "#3d9ad1", "#7f7f7f")
MARKERS = "osD^vP*X<>dph"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
MARKS = 7  # on a curve of many points
FONT, SMALL = 9.5, 9.0  # points

INK_MARK = "#010203"
SERIES_MARKS = tuple(f"#0a0b{number:02x}" for number in range(len(PALETTE)))
STYLE = {
    "axes.edgecolor": INK_MARK,
    "axes.labelcolor": INK_MARK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": FONT,
    "grid.alpha": 0.18,
    "grid.color": INK_MARK,
    "grid.linewidth": 0.6,
    "legend.fontsize": SMALL,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.color": INK_MARK,
    "text.parse_math": False,
    "xtick.color": INK_MARK,
    "ytick.color": INK_MARK,
}


def look(style: int) -> dict[str, Any]:
    """Colour and marker of a style, as matplotlib wants them; a marker's second user has it open.

    Example:
        >>> look(1)
        {'color': '#0a0b01', 'marker': 's', 'fillstyle': 'full'}
    """
    if style == INK:
        return {"color": INK_MARK}
    return {
        "color": SERIES_MARKS[style % len(SERIES_MARKS)],
        "marker": MARKERS[style % len(MARKERS)],
        "fillstyle": "none" if style // len(MARKERS) % 2 else "full",
    }


def plot_line(place: Axes, line: Line, transform: Transform | None = None) -> None:
    """Draw a curve or a point with its spread, moved a little where a transform says so."""
    place.errorbar(
        line.x,
        line.y,
        yerr=line.spread or None,
        linestyle="-" if line.style == INK else DASHES[line.style % len(DASHES)],
        markevery=max(1, len(line.x) // MARKS),
        capsize=2,
        elinewidth=0.9,
        label=line.name,
        transform=transform or place.transData,
        **look(line.style),
    )


def label_plainly(axis: Axis, scale: Scale) -> None:
    """Write 0.01 and 1,000 on a logarithmic axis, not powers, which need a typesetter."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if scale == "linear":
        return
    if scale == "log":
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 3, 5) if decades < 1.2 else (1, 2, 5) if decades < 1.7 else (1,))
        )
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())


def plain(value: float) -> str:
    """A number without a power.

    Example:
        >>> plain(0.01), plain(2000.0), plain(1e6)
        ('0.01', '2,000', '1,000,000')
    """
    return f"{value:,.10g}"
