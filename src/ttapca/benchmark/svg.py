"""How figures look, and figures as files: SVG in the colours of a page, PNG and PDF on white.

Curves differ in colour (Okabe and Ito's palette), marker and dash; a method looks the same in all
reports. In an SVG, CSS variables take the place of colours, so that a dark page can change them.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttapca.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from ttapca.benchmark.figures import ReportFigure

FORMATS = (".svg", ".png", ".pdf")
POINTS_PER_INCH = 160
WIDTH, HEIGHT, LEGEND_LINE = 4.6, 2.75, 0.19  # inches
INK = "#1c1d21"  # as in the style
PALETTE = ("#0072b2", "#d55e00", "#008a64", "#b8578a", "#9a6d00", "#3d9ad1", "#70747c")
MARKERS = "osD^vP*X<>dph"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
# The methods that are compared most often have a colour each, in the order of the palette.
COLOURED = ("wiener", "tent", "bn", "ttapca-exp", "ttapca-relu", "ttapca-closed", "source")
STYLE = Path(__file__).with_name("report.mplstyle")


def look(number: int) -> dict[str, Any]:
    """Return colour, marker and dash of one style, as keywords of matplotlib."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "fillstyle": "none" if number // len(MARKERS) % 2 else "full",  # at its second use
        "linestyle": DASHES[number % len(DASHES)],
    }


def styles_of(methods: Iterable[str]) -> dict[str, int]:
    """Return the number of each method's style, the same in all reports; unknown ones come last."""
    from ttapca.methods import METHODS  # needs torch

    order = dict.fromkeys([*COLOURED, *METHODS, *methods])
    return {name: number for number, name in enumerate(order)}


def page_svg(figure: ReportFigure) -> str:
    """Return an `<svg>` element for a page, which gives it colours, font and size."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": figure.name}, STYLE):
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


def page_colours() -> str:
    """Return a style sheet with the colours of all pages, light and dark, as variables."""
    return (resources.files("ttapca.support") / "page_colours.css").read_text(encoding="utf-8")


def file_svg(figure: ReportFigure) -> str:
    """Return the text of an SVG file, with size, caption, and colours for light and dark pages."""
    svg = page_svg(figure)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    style = f"<style>{page_colours()}svg {{ color: var(--ink); }}</style>"
    start, _, rest = svg.partition(">")
    size = f'width="{width}pt" height="{height}pt"'
    return f"{start} {size}><desc>{html.escape(figure.caption)}</desc>{style}{rest}\n"


def check_format(suffix: str) -> None:
    """Raise `OptionError` unless figures are written to files whose name ends so."""
    if suffix not in FORMATS:
        raise OptionError(f"A figure ends with {', '.join(FORMATS)}; found `{suffix}`.")


def figure_file(figure: ReportFigure, suffix: str) -> bytes:
    """Return a figure as the content of a `.svg`, `.png` or `.pdf` file."""
    import matplotlib as mpl

    check_format(suffix)
    if suffix == ".svg":
        return file_svg(figure).encode()
    content = io.BytesIO()
    dates = {"CreationDate": None} if suffix == ".pdf" else {}
    with mpl.rc_context(fname=STYLE):
        figure.drawing.savefig(
            content, format=suffix[1:], dpi=POINTS_PER_INCH, metadata=dates, facecolor="white"
        )
    return content.getvalue()


def panels(count: int, names: int) -> tuple[Figure, Any]:
    """Make axes above one another, with room for a legend below."""
    from matplotlib.figure import Figure

    height = HEIGHT + 1.7 * (count - 1) + LEGEND_LINE * math.ceil(names / 3)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(count, sharex=True, squeeze=False)[:, 0]


def add_legend(figure: Figure) -> None:
    """Put one legend for all panels below them."""
    names = [name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]
    columns = 2 if max(map(len, names)) > 16 else 3
    figure.legend(loc="outside lower center", ncols=columns)


def label_plainly(axis: Axis) -> None:
    """Write 0.01 and 1,000 on a logarithmic axis, instead of powers, which need a typesetter."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        decades = math.log10(high / low)
        several = (1, 2, 3, 5) if decades < 1.2 else (1, 2, 5)
        axis.set_major_locator(LogLocator(subs=several if decades < 1.7 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_locator(NullLocator())
