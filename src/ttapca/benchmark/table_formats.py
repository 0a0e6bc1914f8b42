"""Results for other programs (CSV, JSON) and for papers (Markdown, LaTeX)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from ttapca._checks import OneOf, check_option
from ttapca.benchmark.comparisons import Rows, frame
from ttapca.benchmark.tables import ResultTable, all_tables

Format = Literal["csv", "json", "markdown", "latex"]
FORMATS: tuple[str, ...] = get_args(Format)

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


def export(rows: Rows, form: str) -> str:
    r"""Write results as text.

    Args:
        rows: As `Results.rows()` gives them, or as a frame.
        form: `csv` or `json` for every result with all its fields; `markdown` or `latex` for the
            tables.

    Raises:
        OptionError: There is no such format.

    Example:
        >>> export([], "json")
        '[]\n'
    """
    check_option("format", form, OneOf(FORMATS))
    writers: dict[str, Callable[[Rows], str]] = {
        "csv": to_csv,
        "json": to_json,
        "markdown": lambda rows: "\n".join(map(markdown, all_tables(rows))),
        "latex": lambda rows: "\n".join(map(latex, all_tables(rows))),
    }
    return writers[form](rows)


def to_json(rows: Rows) -> str:
    """Every result as one flat object: what was run, then what was measured."""
    # Not `DataFrame.to_json`, which rounds.
    records = [_finite(record) for record in frame(rows).to_dict("records")]
    return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(rows: Rows) -> str:
    """Every result as one line; lists and dictionaries stand as JSON in their column."""
    table = frame(rows)
    for name in ("error_stream", "entropy_stream", "versions", "machine"):
        table = table.assign(**{name: [json.dumps(_finite(each)) for each in table[name]]})
    text: str = table.replace([math.inf, -math.inf], math.nan).to_csv(
        index=False, lineterminator="\n"
    )
    return text


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(table: ResultTable) -> str:
    r"""A table for a page in Markdown: the best in bold, the title above, the notes below.

    Example:
        >>> from ttapca.benchmark.tables import Value
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
    r"""A table for a paper: the best in bold, the notes below. It needs the package `booktabs`.

    Example:
        >>> from ttapca.benchmark.tables import Value
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
    """The headings and the rows, each in one line."""
    rows = [[name.translate(escapes) for name in table.columns]]
    for row in table.rows:
        texts = [value.text.translate(escapes) for value in row]
        rows.append([bold.format(t) if v.best else t for t, v in zip(texts, row, strict=True)])
    return [between.join(row) for row in rows]
