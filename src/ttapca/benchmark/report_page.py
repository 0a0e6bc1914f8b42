"""The report: one HTML page with everything inside it, to open and to send.

A content security policy forbids loading anything, and words of a file of results are escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttapca import __version__
from ttapca.benchmark.comparisons import (
    SOURCE,
    Comparison,
    Measurements,
    comparisons,
    frame,
    largest,
    shown_observations,
)
from ttapca.benchmark.figures import figures
from ttapca.benchmark.rows import Observation, Row
from ttapca.benchmark.svg import PALETTE, page_colours, page_svg, styles_of
from ttapca.benchmark.tables import (
    cost_table,
    difference_table,
    error_table,
    failure_table,
    full_name,
    mean_value,
    paper_tables,
    setting_tables,
)
from ttapca.support.progress import counted

if TYPE_CHECKING:  # it needs torch, which a page does not
    from ttapca.benchmark.demo_report import RepairedImage

NOTHING = "Nothing has been measured yet"
NOT_TESTED = "Differences were not tested: it is not known which samples were predicted right."
PAGE = Path(__file__).with_name("page")


def report(
    rows: Sequence[Row],
    observations: Sequence[Observation] = (),
    remember: str = "",
    repaired: Sequence[RepairedImage] = (),
) -> str:
    """Write the page of rows and observations of a file; it may begin with a line to `remember`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    every = frame(rows)
    found = comparisons(every)
    full = _full(found)
    script, style = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("report.js", "report.css")
    )
    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "full_name": full_name,
        "data_uri": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
    }
    # `Markup` goes into the page as it is: all of it is our own.
    return environment.get_template("report.html").render(
        title=title(found),
        version=__version__,
        headline=headline(every, found),
        remember=remember.replace(" %", "\u00a0%"),
        repaired=repaired,
        bars=_bars(largest(found)) if found else [],
        bars_title=largest(found).conditions.title if found else "",
        facts=facts(every),
        tables=[*setting_tables(found), *(error_table(each) for each in found if each in full)],
        more_tables=[error_table(each) for each in found if each not in full],
        told_apart=[table for each in full if (table := difference_table(each)) is not None],
        compared=paper_tables(every),
        figures=[(each, Markup(page_svg(each))) for each in figures(every, observations)],  # noqa: S704
        examples=_examples(observations, found),
        costs=[table for each in found if (table := cost_table(each)) is not None],
        failures=failure_table(every),
        commands=list(dict.fromkeys(filter(None, every.command))),
        style=Markup(page_colours() + style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def title(found: Sequence[Comparison]) -> str:
    """Return the finding of the largest comparison; the lowest error is one that is told apart."""
    if not found:
        return NOTHING
    comparison = largest(found)
    lines, standings = comparison.lines, comparison.standings()
    ranked = lines["mean"].dropna().sort_values(kind="stable").index.tolist()
    first = [line for line in ranked if standings and standings[line].rank == 1] or ranked[:1]
    tested = "" if standings else " (not tested)"

    def named(chosen: Sequence[int]) -> str:
        pairs = (f"{lines.label[line]} {mean_value(comparison, line).text} %" for line in chosen)
        return ", ".join(pair.replace(" ", "\u00a0") for pair in pairs)

    if not ranked:
        return "No method was measured on every corruption"
    if len(ranked) == 1:
        return f"Mean error: {named(ranked)}"
    if SOURCE in set(lines.method[first]):
        return f"No method is shown to have a lower error than the untouched network{tested}"
    if len(first) > 1:
        return f"The lowest errors are not told apart: {', '.join(lines.label[first])}"
    source = [line for line in ranked if lines.method[line] == SOURCE][:1]
    return f"Lowest mean error: {named([*first, *source])}{tested}"


def headline(rows: Measurements, found: Sequence[Comparison]) -> str:
    """Return the conditions of the largest comparison, and how many measurements failed."""
    if not found:
        return f"{NOTHING}."
    comparison = largest(found)
    parts = [f"{comparison.conditions.title}."]
    if comparison.standings():
        parts.append("±: 95\u00a0% interval over samples.")
    elif comparison.lines["mean"].count() > 1:
        parts.append(NOT_TESTED)
    if unranked := comparison.lines.label[comparison.lines["mean"].isna()].tolist():
        parts.append(f"Not measured on every corruption: {', '.join(unranked)}.")
    statuses = frame(rows).status
    failed, count = int((statuses == "failed").sum()), counted(len(statuses), "measurement")
    parts.append(f"{failed:,} of {count} failed." if failed else f"All {count} finished.")
    return " ".join(parts)


def facts(rows: Measurements) -> dict[str, list[str]]:
    """Return the values that occur in the cells, by name, in the order in which they do."""
    every = frame(rows)
    if every.empty:
        return {}
    filtered = every[every.components > 0]
    ended = [f"{each[:16].replace('T', ' ')} UTC" for each in sorted(every.finished)]
    hours, minutes = divmod(round(every.seconds.sum() / 60), 60)
    spent = f"{hours} h {minutes} min" if hours else f"{minutes} min"

    def pairs(words: dict[str, str]) -> str:
        return ", ".join(f"{name} {value}" for name, value in words.items())

    told: dict[str, Iterable[str]] = {
        "network": every.model + " (weights " + every.weights + ")",
        "data": every.data + " (" + every.corrupted + ")",
        "corruptions": every.corruption.map(full_name),
        "severities": every.severity[every.severity > 0].astype(str),
        "settings": every.setting,
        "methods": every.method,
        "samples per corruption": every.images.map("{:,}".format),
        "batch sizes": every.batch_size.astype(str),
        "seeds": every.seed.astype(str),
        "filter": filtered.components.map("{:,} components at ".format) + filtered.layer,
        "machine": every.machine.map(pairs),
        "versions": every.versions.map(pairs),
        "when": [f"{ended[0]} to {ended[-1]}"],
        "time in the methods": [spent if spent != "0 min" else f"{every.seconds.sum():.1f} s"],
    }
    return {name: list(dict.fromkeys(values)) for name, values in told.items()}


def _full(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with all corruptions, the largest first; sweeps often have few."""

    def kind(each: Comparison) -> tuple[str, str, str]:
        return each.conditions.model, each.conditions.data, each.conditions.setting

    most: dict[tuple[str, str, str], int] = {}
    for each in found:
        most[kind(each)] = max(most.get(kind(each), 0), len(each.corruptions))
    full = [each for each in found if len(each.corruptions) == most[kind(each)]]
    return sorted(full, key=lambda each: len(each.rows), reverse=True)


def _bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the mean errors to be compared at a glance, the best first."""
    lines = comparison.lines.dropna(subset="mean").sort_values("mean", kind="stable")
    ranked, styles = comparison.standings(), styles_of(lines.method)
    return [
        {
            "label": line.label,
            "error": line.mean,
            "share": 100 * line.mean / (lines["mean"].max() or 1.0),  # of the longest bar
            "best": ranked[at].rank == 1 if ranked else line.mean == lines["mean"].min(),
            "spread": f" ±{ranked[at].error.half_width:.1f}" if ranked else "",
            "series": styles[line.method] % len(PALETTE),
        }
        for at, line in zip(lines.index, lines.itertuples(), strict=True)
    ]


def _examples(
    observations: Sequence[Observation], comparisons: Sequence[Comparison]
) -> dict[str, dict[str, tuple[bytes, ...]]]:
    """Return images before and after the filter, for some corruptions that differ."""
    pictured = [each for each in observations if each.before and each.after]
    found = {}
    for corruption, own in shown_observations(pictured, comparisons).items():
        strips = {"as it came": own[0].before}
        for each in own:  # the first of each method
            strips.setdefault(f"after {each.cell.method}", each.after)
        found[corruption] = strips
    return found
