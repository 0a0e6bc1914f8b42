"""The report: one HTML page with everything inside it, to open and to send.

The page asks the network for nothing. Its style, script, figures and images are in it, and a
content security policy keeps it so. All words that come from a file of results are escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ttapca import __version__
from ttapca.benchmark.cells import Observation, Row
from ttapca.benchmark.commands import condensed
from ttapca.benchmark.comparisons import Comparison, Rows, comparisons, frame, largest
from ttapca.benchmark.figures import conditions_of, figures, one_of_each_family
from ttapca.benchmark.glossary import glossary
from ttapca.benchmark.svg import page_svg
from ttapca.benchmark.tables import (
    SOURCE,
    cost_table,
    error_table,
    failure_table,
    full_name,
    heading,
    paper_tables,
)

PAGE = Path(__file__).with_name("page")
REFERENCES = {SOURCE: "for the untouched network", "bn": "with batch statistics alone"}


def report(rows: Sequence[Row], observations: Sequence[Observation] = ()) -> str:
    """Write the page.

    Args:
        rows: As `Results.rows()` gives them.
        observations: Of the same file. They give spectra, and images before and after the filter.

    Returns:
        One HTML file that needs no other.

    Example:
        >>> "Nothing has been measured yet." in report([])
        True
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    every = frame(rows)
    found = comparisons(every)
    script = _text("report.js")
    # Of our own making, so it goes into the page as it is.
    drawn = [(each, Markup(page_svg(each))) for each in figures(every, observations)]  # noqa: S704
    style = Markup(_text("colours.css") + _text("report.css"))  # noqa: S704
    environment = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=", ".join(dict.fromkeys(every.model + " on " + every.data)) or "No results",
        version=__version__,
        headline=headline(every),
        bars=_bars(largest(found)) if found else [],
        bars_title=largest(found).conditions.title if found else "",
        facts=facts(every),
        glossary=glossary(rows),
        tables=[error_table(each) for each in found if _is_full(each, found)],
        more_tables=[error_table(each) for each in found if not _is_full(each, found)],
        compared=paper_tables(every),
        figures=drawn,
        examples=_examples(observations),
        costs=[table for each in found if (table := cost_table(each)) is not None],
        failures=failure_table(every),
        commands=condensed(every.command),
        style=style,
        script=Markup(script),  # noqa: S704
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _text(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def headline(rows: Rows) -> list[str]:
    """Say in a few sentences what was found."""
    every = frame(rows)
    if every.empty:
        return ["Nothing has been measured yet."]
    failed, count = int((every.status == "failed").sum()), f"{len(every):,} measurements"
    end = f"{failed:,} of {count} failed." if failed else f"All {count} finished."
    return [*_finding(largest(comparisons(every))), end]


def _finding(comparison: Comparison) -> list[str]:
    ours, lines = comparison.conditions, comparison.lines
    severity = f" at severity {ours.severity}" if ours.severity else ""
    where = (
        f"With {ours.model} on {ours.data}{severity} ({ours.setting}, batches of "
        f"{ours.batch_size}, {ours.images:,} images per corruption)"
    )
    ranked, unranked = lines[lines["mean"].notna()], lines.label[lines["mean"].isna()]
    if ranked.empty:
        return [f"{where}, no method was measured on every corruption."]
    best = ranked.loc[ranked["mean"].idxmin()]
    names = comparison.corruptions
    over = f"over {len(names)} corruptions" if len(names) > 1 else f"on {heading(names[0])}"
    if best.method == SOURCE:
        lead = f"no method beats the untouched network, {_percent(best['mean'])} mean error {over}"
    else:
        lead = f"{best.label} has the lowest mean error {over}, {_percent(best['mean'])}"
        others = [
            f"{_percent(mean)} {words}"
            for method, words in REFERENCES.items()
            for mean in ranked["mean"][(ranked.method == method) & (ranked.index != best.name)]
        ]
        lead += f", against {' and '.join(others)}" if others else ""
    sentences = [f"{where}, {lead}."]
    if len(unranked):
        missing = ", ".join(unranked)
        sentences.append(f"Not ranked, because some corruptions are missing: {missing}.")
    source = lines.clean[lines.method == SOURCE].dropna()
    if best.method != SOURCE and len(source) and best.clean >= 0:
        sentences.append(
            f"On clean images {best.label} has {_percent(best.clean)} where the untouched network "
            f"has {_percent(source.iloc[0])}."
        )
    return sentences


def _percent(number: float) -> str:
    """A percentage that does not break over two lines."""
    return f"{number:.1f}\u00a0%"


def facts(rows: Rows) -> dict[str, list[str]]:
    """What was run: names, and the values that occur, in the order in which they do."""
    every = frame(rows)
    if every.empty:
        return {}
    filtered = every[every.components > 0]
    ended = [f"{each[:16].replace('T', ' ')} UTC" for each in sorted(every.finished)]
    told: dict[str, Iterable[str]] = {
        "network": every.model + " (weights " + every.weights + ")",
        "data": every.data + " (" + every.corrupted + ")",
        "corruptions": every.corruption.map(full_name),
        "severities": every.severity[every.severity > 0].astype(str),
        "settings": every.setting,
        "methods": every.method,
        "images per corruption": every.images.map("{:,}".format),
        "batch sizes": every.batch_size.astype(str),
        "seeds": every.seed.astype(str),
        "filter": filtered.components.map("{:,} components at ".format) + filtered.layer,
        "machine": every.machine.map(_pairs),
        "versions": every.versions.map(_pairs),
        "when": [f"{ended[0]} to {ended[-1]}"],
        "time in the methods": [_duration(every.seconds.sum())],
    }
    return {name: list(dict.fromkeys(values)) for name, values in told.items()}


def _pairs(words: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _is_full(comparison: Comparison, found: Sequence[Comparison]) -> bool:
    """Whether no comparison of the same kind has more corruptions; sweeps often have few."""

    def kind(each: Comparison) -> tuple[str, str, str]:
        return each.conditions.model, each.conditions.data, each.conditions.setting

    same = [other for other in found if kind(other) == kind(comparison)]
    return len(comparison.corruptions) == max(len(other.corruptions) for other in same)


def _bars(comparison: Comparison) -> list[dict[str, Any]]:
    """The mean errors to be compared at a glance, the best first."""
    lines = comparison.lines.dropna(subset="mean").sort_values("mean", kind="stable")
    error = lines["mean"]
    share = 100 * error / (error.max() or 1.0)  # of the longest bar
    lines = lines.assign(error=error, share=share, best=error == error.min())
    return list(lines[["label", "error", "share", "best"]].to_dict("records"))


def _examples(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Images before and after the filter, for some corruptions that differ."""
    seen = [each for each in observations if each.before and each.after]
    seen = [each for each in seen if conditions_of(each) == conditions_of(seen[0])]
    found = []
    for name in one_of_each_family(each.cell.corruption for each in seen):
        own = [each for each in seen if each.cell.corruption == name]
        strips = {"as it came": _data_uris(own[0].before)}
        for each in own:  # of each method the first
            strips.setdefault(f"after {each.cell.method}", _data_uris(each.after))
        found.append({"title": full_name(name), "strips": strips})
    return found


def _data_uris(images: Iterable[bytes]) -> list[str]:
    return ["data:image/png;base64," + base64.b64encode(png).decode() for png in images]
