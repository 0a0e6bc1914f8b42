"""How figures look, and figures as SVG in the colours of the page around them.

Curves differ in colour (after Okabe and Ito's palette, made for colour-blind readers), in marker
and in dash, so that they can be told apart in grey. Matplotlib draws for a light page. In the SVG,
CSS variables then take the place of these colours, so that a dark page can change them.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttapca.benchmark.figures import ReportFigure

INK = "#1c1d21"
PALETTE = ("#0072b2", "#d55e00", "#008a64", "#b8578a", "#9a6d00", "#3d9ad1", "#70747c")
MARKERS = "osD^vP*X<>dph"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
COLOURS = Path(__file__).with_name("page") / "colours.css"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.alpha": 0.18,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def look(number: int) -> dict[str, Any]:
    """Colour, marker and dash of one style, as keywords of matplotlib.

    Example:
        >>> look(1)["color"], look(1)["marker"], look(1)["fillstyle"]
        ('#d55e00', 's', 'full')
    """
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "fillstyle": "none" if number // len(MARKERS) % 2 else "full",  # its second user
        "linestyle": DASHES[number % len(DASHES)],
    }


def page_svg(figure: ReportFigure) -> str:
    """An `<svg>` element for a page, which gives it colours, font and size."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": figure.name}):
        figure.drawing.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    box = re.findall(r'viewBox="[^"]*"', svg)[0]
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    opening = (
        f'<svg role="img" aria-label="{html.escape(figure.title)}" '
        'xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" {box}>'
    )
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    # Two figures of one page must not share the names of their clips and markers.
    svg = re.sub(r'\bid="', f'id="{figure.name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{figure.name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px var(--figure-font, sans-serif)", svg)
    for number, colour in enumerate(PALETTE):
        svg = svg.replace(colour, f"var(--series-{number}, {colour})")
    return svg.replace(INK, "currentColor").strip()


def file_svg(figure: ReportFigure) -> str:
    """The text of an SVG file, with its size, its caption, and colours for light and dark pages."""
    svg = page_svg(figure)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    style = f"<style>{COLOURS.read_text(encoding='utf-8')}svg {{ color: var(--ink); }}</style>"
    start, _, rest = svg.partition(">")
    size = f'width="{width}pt" height="{height}pt"'
    return f"{start} {size}><desc>{html.escape(figure.caption)}</desc>{style}{rest}\n"
