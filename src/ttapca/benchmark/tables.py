"""Tables of results, and results as text: CSV, JSON, Markdown and LaTeX.

There are tables of errors, and of ours beside the paper's. A `ResultTable` has no markup: a
terminal, a page and a LaTeX file show the same table.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from ttapca._checks import OneOf, check_option
from ttapca.benchmark import paper
from ttapca.benchmark.cells import AMONG, CLEAN, SETTINGS
from ttapca.benchmark.comparisons import (
    LINE,
    Comparison,
    Rows,
    comparisons,
    frame,
    labels,
    nearest_to_paper,
)
from ttapca.corruptions import STANDARD

FORMATS = ("csv", "json", "markdown", "latex")
# How the paper heads its columns, where that is not the corruption's name.
SHORT = {
    "gaussian_noise": "Gauss", "shot_noise": "Shot", "impulse_noise": "Impulse",
    "defocus_blur": "Defocus", "glass_blur": "Glass", "motion_blur": "Motion", "zoom_blur": "Zoom",
    "brightness": "Bright", "elastic_transform": "Elastic", "pixelate": "Pixel",
    "jpeg_compression": "JPEG", "speckle_noise": "Speckle", "gaussian_blur": "Gauss blur",
}  # fmt: skip
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{mark: f"\\{mark}" for mark in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",  # noqa: RUF001
        "—": "--",
        "†": r"$\dagger$",
    }
)
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in r"\|*_`<>[]"} | {"\n": " "})
FINE = 5000  # images from which a second decimal means something
LEAST_SETTINGS = 3  # that are worth a table of their own
PARTIAL = "†"  # marks a number for which some seeds failed


@dataclass(frozen=True)
class Value:
    """One entry of a table.

    Attributes:
        text: What is shown.
        number: What the column is sorted by; None for text, and where there is no number.
        kind: What it is.
        best: Whether no other line has a lower number in this column.
        note: More about it, such as why it failed.
    """

    text: str
    number: float | None = None
    kind: Literal["text", "number", "failed", "missing"] = "text"
    best: bool = False
    note: str = ""


MISSING = Value("—", kind="missing", note="not measured")
Line = tuple[Value, ...]


@dataclass(frozen=True)
class ResultTable:
    """A table without markup.

    Attributes:
        title: What is shown, in a few words.
        columns: The headings.
        rows: Each has one value for every heading.
        notes: Sentences for below the table.
        sortable: Whether the lines may be shown in another order.

    Example:
        >>> line = (Value("bn"), Value("20.4", 20.4, "number"))
        >>> ResultTable("errors", ("method", "mean"), (line,)).wordy
        (True, False)
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    sortable: bool = True

    @property
    def wordy(self) -> tuple[bool, ...]:
        """For each column whether it holds words rather than numbers."""
        return tuple(
            all(row[at].kind == "text" for row in self.rows) for at in range(len(self.columns))
        )


def full_name(corruption: str) -> str:
    """Return a corruption's name in words.

    Example:
        >>> full_name("jpeg_compression")
        'JPEG compression'
    """
    return corruption.replace("_", " ").capitalize().replace("Jpeg", "JPEG")


def heading(corruption: str) -> str:
    """Return the heading of a corruption's column."""
    return SHORT.get(corruption, full_name(corruption))


def error_tables(rows: Rows) -> list[ResultTable]:
    """Return the tables of errors: one for each set of conditions that can be compared.

    Example:
        >>> error_tables([])
        []
    """
    return [error_table(each) for each in comparisons(rows)]


def error_table(comparison: Comparison) -> ResultTable:
    """Return the errors of one comparison: the mean first, as in the paper, clean images last."""
    has_clean = CLEAN in set(comparison.rows.corruption)
    names = dict.fromkeys([*comparison.corruptions, *([CLEAN] if has_clean else [])])
    several = len(comparison.corruptions) > 1
    lines = []
    for line, label in comparison.lines.label.items():
        mean = [_mean_value(comparison, line)] if several else []
        lines.append((Value(label), *mean, *(_error_value(comparison, line, n) for n in names)))
    first = ("method", f"Mean of {len(comparison.corruptions)}") if several else ("method",)
    columns = (*first, *map(heading, names))
    title, notes = comparison.conditions.title, _notes(comparison, lines)
    return ResultTable(title, columns, _with_best(lines), notes)


def setting_tables(found: Sequence[Comparison]) -> list[ResultTable]:
    """Return mean errors by setting, where at least three comparisons differ in nothing else.

    Two are easily compared in their own tables. Errors on clean images stand in brackets.

    Example:
        >>> setting_tables([])
        []
    """
    groups: dict[tuple[object, ...], dict[str, Comparison]] = {}
    for each in found:
        ours = each.conditions
        # Corruptions that share an adaptation are named here; their columns are compared instead.
        corrupted = ours.corrupted.partition(AMONG)[0]
        key = (ours._replace(setting="", corrupted=corrupted), each.corruptions)
        groups.setdefault(key, {}).setdefault(ours.setting, each)
    order: dict[str, int] = {name: number for number, name in enumerate(SETTINGS)}
    return [
        _setting_table(dict(sorted(group.items(), key=lambda each: order.get(each[0], len(order)))))
        for group in groups.values()
        if len(group) >= LEAST_SETTINGS
    ]


def _setting_table(group: dict[str, Comparison]) -> ResultTable:
    first = next(iter(group.values()))
    every = pd.concat([each.lines for each in group.values()]).drop_duplicates(LINE)
    lines = [
        (Value(label), *(_value_with_clean(each, line) for each in group.values()))
        for label, line in zip(labels(every), every[LINE].itertuples(index=False), strict=True)
    ]
    names = first.corruptions
    over = f"mean over {len(names)} corruptions" if len(names) > 1 else full_name(names[0])
    values = [value for line in lines for value in line[1:] if value.number is not None]
    brackets = any(value.text.endswith(")") for value in values)
    note = f"Classification error in percent, {over}" + "; clean images in brackets" * brackets
    title = first.conditions._replace(setting="by setting").title
    return ResultTable(title, ("method", *group), _with_best(lines), (f"{note}.",))


def _value_with_clean(comparison: Comparison, line: tuple[Any, ...]) -> Value:
    """Return the mean error of a method with its options, and that on clean images in brackets."""
    for found in comparison.lines.itertuples():
        if tuple(getattr(found, name) for name in LINE) == tuple(line):
            mean = _mean_value(comparison, found.Index)
            if mean.number is None or math.isnan(found.clean) or CLEAN in comparison.corruptions:
                return mean
            return replace(mean, text=f"{mean.text} ({_number(comparison, found.clean)})")
    return MISSING


def _error_value(comparison: Comparison, line: int, corruption: str) -> Value:
    found = comparison.entries.get((line, corruption))
    if found is None:
        return MISSING
    failed, reason = found["failed"], found["reason"]
    if math.isnan(found["mean"]):
        return Value("failed", kind="failed", note=reason) if failed else MISSING
    text = _number(comparison, found["mean"], found["deviation"])
    note = f"{failed} of {found['seeds']} seeds failed: {reason}" if failed else ""
    return Value(text + (PARTIAL if failed else ""), found["mean"], "number", note=note)


def _mean_value(comparison: Comparison, line: int) -> Value:
    mean, deviation = comparison.lines.loc[line, ["mean", "deviation"]]
    if not math.isnan(mean):
        return Value(_number(comparison, mean, deviation), float(mean), "number")
    found = [comparison.entries.get((line, name)) for name in comparison.corruptions]
    values = [each["mean"] for each in found if each and not math.isnan(each["mean"])]
    if not values:
        return MISSING
    text = f"{_number(comparison, statistics.fmean(values))} ({len(values)}/{len(found)})"
    # Without a number, so that it is not sorted among means of all corruptions.
    return Value(text, kind="number", note="no seed was measured on every corruption")


def _number(comparison: Comparison, mean: float, deviation: float = math.nan) -> str:
    decimals = 2 if comparison.conditions.images >= FINE else 1
    spread = "" if math.isnan(deviation) else f" ±{deviation:.{decimals}f}"
    return f"{mean:.{decimals}f}{spread}"


def _with_best(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Mark the lowest of each column as it is shown: what looks equal is equally good."""

    def shown(value: Value) -> float:
        return math.inf if value.number is None else float(value.text.split()[0].rstrip(PARTIAL))

    if len(lines) < 2:
        return tuple(lines)
    lowest = [min(map(shown, column)) for column in zip(*lines, strict=True)]
    return tuple(
        tuple(
            replace(value, best=value.number is not None and shown(value) == low)
            for value, low in zip(line, lowest, strict=True)
        )
        for line in lines
    )


def _notes(comparison: Comparison, lines: Sequence[Line]) -> tuple[str, ...]:
    seeds = ", ".join(map(str, comparison.seeds))
    several = len(comparison.seeds) > 1
    notes = [
        f"Classification error in percent; {comparison.conditions.images:,} images per corruption; "
        + (f"seeds {seeds}: mean and standard deviation" if several else f"seed {seeds}")
        + f"; corrupted images: {comparison.conditions.corrupted}."
    ]
    values = [value for line in lines for value in line]
    if any(value.text.endswith(PARTIAL) for value in values):
        notes.append(f"{PARTIAL} Some seeds failed; the mean is over the others.")
    if any(value.kind == "failed" for value in values):
        notes.append("Failed: the reasons are listed with the failures.")
    return tuple(notes)


def paper_tables(rows: Rows) -> list[ResultTable]:
    """Return our errors beside the paper's, where it has the data set, the setting and the method.

    Each table is made from the comparison with the most corruptions and images.

    Example:
        >>> paper_tables([])
        []
    """

    def size(each: Comparison) -> tuple[int, int]:
        return len(each.corruptions), each.conditions.images

    fullest: dict[tuple[str, ...], Comparison] = {}
    for each in comparisons(rows):
        ours = each.conditions
        key = (ours.model, ours.weights, ours.data, ours.setting)
        if (ours.severity, ours.batch_size) == (paper.SEVERITY, paper.BATCH_SIZE):
            fullest[key] = max(fullest.get(key, each), each, key=size)
    return [table for each in fullest.values() if (table := _paper_table(each)) is not None]


def _paper_table(comparison: Comparison) -> ResultTable | None:
    """Return three lines for each method: ours, the paper's, the difference."""
    ours = comparison.conditions
    shared = tuple(name for name in comparison.corruptions if name in STANDARD)
    comparison = replace(comparison, corruptions=shared)
    lines: list[Line] = []
    for line, method in nearest_to_paper(comparison.lines, ["method"]).method.items():
        printed = paper.paper_row(ours.data, ours.setting, method)
        if printed is not None and shared:
            lines += _beside_paper(comparison, line, printed)
    if not lines:
        return None
    columns = ("method", f"Mean of {len(shared)}", *map(heading, shared))
    notes = (
        f"The paper: {paper.NETWORK}, {paper.IMAGES:,} images per corruption, batches of "
        f"{paper.BATCH_SIZE}, one step at {paper.LR:g}, {paper.COMPONENTS:,} components. Here: "
        f"{ours.model}, {ours.images:,} images per corruption.",
        "Means are computed from the errors shown; where the paper prints another mean, it is "
        "added in brackets.",
        "Difference: ours minus the paper's; below zero, ours has fewer errors.",
    )
    return ResultTable(f"{ours.title}: ours and the paper's", columns, tuple(lines), notes, False)


def _beside_paper(comparison: Comparison, line: int, printed: paper.PaperRow) -> list[Line]:
    names, method = comparison.corruptions, printed.method
    own = [_mean_value(comparison, line), *(_error_value(comparison, line, n) for n in names)]
    errors = [printed.errors[name] for name in names]
    errors = [statistics.fmean(errors), *errors]
    whole = len(names) == len(printed.errors)
    note = f"printed {printed.printed_mean:.2f}" if whole and printed.mean_differs else ""
    spreads = {name: f" ±{spread:.2f}" for name, spread in printed.spreads.items()}
    ends = [f" ({note})" if note else "", *(spreads.get(name, "") for name in names)]
    theirs = [
        Value(f"{error:.2f}{end}", error, "number") for error, end in zip(errors, ends, strict=True)
    ]
    theirs[0] = replace(theirs[0], note=note)
    gaps = [_difference(value, error) for value, error in zip(own, errors, strict=True)]
    return [
        (Value(f"{method}, ours"), *own),
        (Value(f"{method}, paper"), *theirs),
        (Value(f"{method}, difference"), *gaps),
    ]


def _difference(ours: Value, theirs: float) -> Value:
    if ours.number is None:
        return MISSING
    gap = ours.number - theirs
    return Value(f"{gap:+.2f}".replace("-", "−"), gap, "number")  # noqa: RUF001


def export(rows: Rows, form: str) -> str:
    r"""Write results as text.

    Args:
        rows: As `Results.rows()` returns them, or as a frame.
        form: `csv` or `json` for every measurement with all its fields; `markdown` or `latex` for
            the tables.

    Raises:
        OptionError: There is no such format.

    Example:
        >>> export([], "json")
        '[]\n'
    """
    check_option("format", form, OneOf(FORMATS))
    if form in ("markdown", "latex"):
        write = markdown if form == "markdown" else latex
        found = comparisons(rows)
        tables = [*setting_tables(found), *map(error_table, found), *paper_tables(rows)]
        return "\n".join(map(write, tables))
    table = frame(rows)
    if form == "json":  # not `DataFrame.to_json`, which rounds
        records = [_finite(record) for record in table.to_dict("records")]
        return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name in ("error_stream", "entropy_stream", "versions", "machine"):  # as JSON
        table = table.assign(**{name: [json.dumps(_finite(each)) for each in table[name]]})
    table = table.replace([math.inf, -math.inf], math.nan)
    return str(table.to_csv(index=False, lineterminator="\n"))


def _finite(value: Any) -> Any:
    """Put null in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(table: ResultTable) -> str:
    r"""Write a table in Markdown: the title above, the best in bold, the notes below.

    Example:
        >>> line = (Value("a|b"), Value("1.0", 1.0, "number", best=True))
        >>> print(markdown(ResultTable("errors", ("method", "mean"), (line,))))
        ### errors
        <BLANKLINE>
        | method | mean |
        |:--|--:|
        | a\|b | **1.0** |
        <BLANKLINE>
    """
    head, *body = _lines(table, _MARKDOWN, " | ", "**{}**")
    parts = [
        f"### {table.title.translate(_MARKDOWN)}\n",
        f"| {head} |",
        "|" + "|".join(":--" if words else "--:" for words in table.wordy) + "|",
        *(f"| {line} |" for line in body),
        *(f"\n{note.translate(_MARKDOWN)}" for note in table.notes),
        "",
    ]
    return "\n".join(parts)


def latex(table: ResultTable) -> str:
    r"""Write a table in LaTeX, for the package `booktabs`: the best in bold, the notes below.

    Example:
        >>> line = (Value("bn"), Value("1.0", 1.0, "number", best=True))
        >>> latex(ResultTable("50 %", ("method", "mean"), (line,))).splitlines()[7]
        'bn & \\textbf{1.0} \\\\'
    """
    head, *body = _lines(table, _LATEX, " & ", r"\textbf{{{}}}")
    layout = "".join("l" if words else "r" for words in table.wordy)
    parts = [
        r"\begin{table*}",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",  # many columns on one page
        rf"\caption{{{table.title.translate(_LATEX)}}}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *(rf"{line} \\" for line in body),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par {note.translate(_LATEX)}" for note in table.notes),
        r"\end{table*}",
        "",
    ]
    return "\n".join(parts)


def _lines(table: ResultTable, escapes: dict[int, str], between: str, bold: str) -> list[str]:
    """Return the headings and the rows, each as one line."""
    lines = [between.join(name.translate(escapes) for name in table.columns)]
    for row in table.rows:
        texts = [(value.text.translate(escapes), value.best) for value in row]
        lines.append(between.join(bold.format(text) if best else text for text, best in texts))
    return lines
