"""`report`: one page that a colleague opens, with everything inside it.

The page asks nobody for anything: its style, script, figures and pictures are in it, and a content
security policy keeps it so. All words that come from a file of results are escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttapca._version import __version__
from ttapca.benchmark.cells import Observation, Row
from ttapca.benchmark.commands import condensed
from ttapca.benchmark.comparison import comparison_tables
from ttapca.benchmark.drawing import draw
from ttapca.benchmark.figures import figures, one_a_family
from ttapca.benchmark.glossary import glossary
from ttapca.benchmark.row_groups import Grid, grids, labels, place_of
from ttapca.benchmark.summary import (
    cost_table,
    facts,
    failure_table,
    headline,
    main_grid,
)
from ttapca.benchmark.tables import error_table, full_name, title_of

if TYPE_CHECKING:
    from jinja2 import Environment

_PAGE = Path(__file__).with_name("page")


@dataclass(frozen=True)
class Bar:
    """A method's mean error, to be compared at a glance."""

    name: str
    error: float
    share: float  # of the longest, in percent
    best: bool


@dataclass(frozen=True)
class Strip:
    """The same images at one stage, as data URIs."""

    name: str
    images: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """What filters did to the images of one corruption."""

    title: str
    strips: tuple[Strip, ...]


def report(rows: Sequence[Row], observations: Sequence[Observation] = ()) -> str:
    """Write the page.

    Args:
        rows: Of a file of results.
        observations: Of the same file: they give spectra, and images before and after the filter.

    Returns:
        One HTML file, self-contained.

    Example:
        >>> "Nothing has been measured yet." in report([])
        True
    """
    found = grids(rows)
    script = _text("report.js")
    costs = [table for grid in found if (table := cost_table(grid)) is not None]
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=_title(rows),
            version=__version__,
            headline=headline(rows),
            bars=_bars(main_grid(found)) if found else [],
            bars_title=title_of(main_grid(found).place) if found else "",
            facts=facts(rows),
            glossary=glossary(rows),
            tables=[error_table(grid) for grid in found if _is_full(grid, found)],
            more_tables=[error_table(grid) for grid in found if not _is_full(grid, found)],
            compared=comparison_tables(rows),
            figures=[(plot, _safe(draw(plot))) for plot in figures(rows, observations)],
            examples=_examples(observations),
            costs=costs,
            failures=failure_table(rows),
            commands=condensed(row.outcome.command for row in rows),
            style=_safe("".join(map(_text, ("colours.css", "report.css")))),
            script=_safe(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _safe(text: str) -> Any:
    """Text of our own making, which goes into the page as it is."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704


def _title(rows: Sequence[Row]) -> str:
    places = dict.fromkeys(f"{row.cell.model} on {row.cell.data}" for row in rows)
    return ", ".join(places) or "No results"


def _is_full(grid: Grid, found: Sequence[Grid]) -> bool:
    """Whether no grid like it has more corruptions: sweeps often have few."""

    def kind(each: Grid) -> tuple[str, str, str]:
        return each.place.model, each.place.data, each.place.setting

    same = [other for other in found if kind(other) == kind(grid)]
    return len(grid.corruptions) == max(len(other.corruptions) for other in same)


def _bars(grid: Grid) -> list[Bar]:
    """The lines of a table by mean error, the best first."""
    names = labels(grid.variants)
    means = {each: mean.mean for each in grid.variants if (mean := grid.mean(each)) is not None}
    if not means:
        return []
    lowest, longest = min(means.values()), max(means.values()) or 1.0
    return [
        Bar(names[each], means[each], 100 * means[each] / longest, means[each] == lowest)
        for each in sorted(means, key=lambda variant: means[variant])
    ]


def _examples(observations: Sequence[Observation]) -> list[Example]:
    """Images before and after, of some corruptions that differ, as the first stream had them."""
    seen = [each for each in observations if each.before and each.after]
    if not seen:
        return []
    place = place_of(seen[0].cell)
    seen = [each for each in seen if place_of(each.cell) == place]
    return [
        _example([each for each in seen if each.cell.corruption == name])
        for name in one_a_family(each.cell.corruption for each in seen)
    ]


def _example(seen: Sequence[Observation]) -> Example:
    first = {each.cell.method: each for each in reversed(seen)}
    strips = [Strip("as it came", tuple(map(_data_uri, seen[0].before)))]
    for method in dict.fromkeys(each.cell.method for each in seen):
        strips.append(Strip(f"after {method}", tuple(map(_data_uri, first[method].after))))
    return Example(full_name(seen[0].cell.corruption), tuple(strips))


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
