"""Figures as files: SVG for light and dark pages, PNG and PDF on white."""

from __future__ import annotations

import io

from ttapca.benchmark import svg
from ttapca.benchmark.figures import ReportFigure
from ttapca.errors import OptionError

FORMATS = (".svg", ".png", ".pdf")
POINTS_PER_INCH = 160


def check_format(suffix: str) -> None:
    """Raise `OptionError` unless figures are written to files whose name ends so."""
    if suffix not in FORMATS:
        raise OptionError(f"A figure ends with {', '.join(FORMATS)}; found `{suffix}`.")


def figure_file(figure: ReportFigure, suffix: str) -> bytes:
    """Return a figure as the content of a file.

    Args:
        figure: As `figures` draws it.
        suffix: Of the file: `.svg`, `.png` or `.pdf`.

    Raises:
        OptionError: There is no such format.
    """
    import matplotlib as mpl

    check_format(suffix)
    if suffix == ".svg":
        return svg.file_svg(figure).encode()
    content = io.BytesIO()
    dates = {"CreationDate": None} if suffix == ".pdf" else {}
    with mpl.rc_context(svg.STYLE):
        figure.drawing.savefig(
            content, format=suffix[1:], dpi=POINTS_PER_INCH, metadata=dates, facecolor="white"
        )
    return content.getvalue()
