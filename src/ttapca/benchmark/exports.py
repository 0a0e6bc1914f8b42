"""Results as text: CSV and JSON of every measurement, Markdown and LaTeX of the tables."""

from __future__ import annotations

import json
import math

from ttapca._checks import OneOf, check_option
from ttapca.benchmark.comparisons import Measurements, comparisons, frame
from ttapca.benchmark.tables import (
    ResultTable,
    difference_table,
    error_table,
    failure_table,
    paper_tables,
)
from ttapca.support.parsing import finite

FORMATS = ("csv", "json", "markdown", "latex")
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


def export(rows: Measurements, form: str) -> str:
    """Write results as text: `csv` or `json` for all rows, `markdown` or `latex` for the tables.

    Which images were predicted right is in `json` only, in hexadecimal digits.
    """
    check_option("format", form, OneOf(FORMATS))
    if form in ("markdown", "latex"):
        write = markdown if form == "markdown" else latex
        found = [
            table(each) for each in comparisons(rows) for table in (error_table, difference_table)
        ]
        found += [*paper_tables(rows), failure_table(rows)]
        return "\n".join(write(table) for table in found if table is not None)
    table = frame(rows)
    if form == "json":  # not `DataFrame.to_json`, which rounds
        table = table.assign(correct=[bits.hex() for bits in table.correct])
        records = [finite(record) for record in table.to_dict("records")]
        return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name in ("error_stream", "entropy_stream", "versions", "machine"):  # as JSON
        table = table.assign(**{name: [json.dumps(finite(each)) for each in table[name]]})
    table = table.drop(columns="correct").replace([math.inf, -math.inf], math.nan)
    return str(table.to_csv(index=False, lineterminator="\n"))


def markdown(table: ResultTable) -> str:
    """Write a table in Markdown: the title above, the best in bold, the notes below."""
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
    """Write a table in LaTeX, for the package `booktabs`: the best in bold, the notes below."""
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
