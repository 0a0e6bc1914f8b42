"""Plots as SVG that takes its ink from the page around it: dark on light, light on dark.

Matplotlib knows no CSS. So it draws with colours that nothing else uses, and these are then
replaced: the ink by `currentColor`, the curves' colours by variables with a fallback.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path

from ttapca.benchmark.curves import curves_figure
from ttapca.benchmark.labelled_scatter import named_figure
from ttapca.benchmark.palette import INK_MARK, PALETTE, SERIES_MARKS, STYLE
from ttapca.benchmark.plots import Plot

COLOURS = Path(__file__).with_name("page") / "colours.css"


def draw(plot: Plot) -> str:
    """Draw a plot.

    Args:
        plot: What to draw.

    Returns:
        An `<svg>` element to stand inside a page; the same for the same plot.

    Example:
        >>> from ttapca.benchmark.plots import Line, Panel
        >>> line = Line("tent", 0, (1.0, 2.0), (20.0, 19.0))
        >>> plot = Plot("steps", "Error against steps", "", "steps", (Panel("error", (line,)),))
        >>> draw(plot).startswith('<svg role="img" aria-label="Error against steps"')
        True
    """
    import matplotlib as mpl

    style = {**STYLE, "svg.hashsalt": plot.name}
    with mpl.rc_context(style):  # type: ignore[arg-type]
        figure = named_figure(plot) if plot.named else curves_figure(plot)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _for_pages(stream.getvalue(), plot)


def draw_file(plot: Plot) -> str:
    """Draw a plot as a file of its own, for a document that shows it as a picture.

    Args:
        plot: What to draw.

    Returns:
        The text of an SVG file with its size, and colours for light and dark surroundings.

    Example:
        >>> from ttapca.benchmark.plots import Line, Panel
        >>> line = Line("tent", 0, (1.0, 2.0), (20.0, 19.0))
        >>> plot = Plot("steps", "Error against steps", "", "steps", (Panel("error", (line,)),))
        >>> "prefers-color-scheme: dark" in draw_file(plot)
        True
    """
    svg = draw(plot)
    colours = COLOURS.read_text(encoding="utf-8")
    style = f"<style>{colours}svg {{ color: var(--ink); }}</style>"
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    size = f' width="{found[1]}pt" height="{found[2]}pt"' if found else ""
    what = f"<desc>{html.escape(plot.caption)}</desc>"
    return (
        re.sub(r"^<svg[^>]*", lambda tag: tag[0] + size, svg).replace(">", f">{what}{style}", 1)
        + "\n"
    )


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
    for number, (mark, colour) in enumerate(zip(SERIES_MARKS, PALETTE, strict=True)):
        svg = svg.replace(mark, f"var(--series-{number}, {colour})")
    return svg.replace(INK_MARK, "currentColor").strip()
