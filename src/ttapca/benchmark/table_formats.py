"""Results for other programs (CSV, JSON) and for papers (Markdown, LaTeX)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from ttapca._checks import OneOf, check_option
from ttapca.benchmark.comparisons import Rows, frame
from ttapca.benchmark.tables import ResultTable, Value, all_tables

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
        >>> line = (Value("a|b"), Value("1.0", 1.0, "number"))
        >>> print(markdown(ResultTable("errors", ("method", "mean"), (line,))))
        ### errors
        <BLANKLINE>
        | method | mean |
        |:--|--:|
        | a\|b | 1.0 |
        <BLANKLINE>
    """

    def entry(value: Value) -> str:
        text = value.text.translate(_MARKDOWN)
        return f"**{text}**" if value.best else text

    rows = [[name.translate(_MARKDOWN) for name in table.columns]]
    rows += [[entry(value) for value in row] for row in table.rows]
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    rule = "|" + "|".join(":--" if words else "--:" for words in table.wordy) + "|"
    notes = [f"\n{note.translate(_MARKDOWN)}" for note in table.notes]
    return "\n".join([f"### {table.title.translate(_MARKDOWN)}", "", head, rule, *body, *notes, ""])


def latex(table: ResultTable) -> str:
    r"""A table for a paper: the best in bold, the notes below. It needs the package `booktabs`.

    Example:
        >>> line = (Value("bn"), Value("1.0", 1.0, "number", best=True))
        >>> print(latex(ResultTable("50 %", ("method", "mean"), (line,))))
        \begin{table*}
        \centering\footnotesize\setlength{\tabcolsep}{3pt}
        \caption{50 \%}
        \begin{tabular}{lr}
        \toprule
        method & mean \\
        \midrule
        bn & \textbf{1.0} \\
        \bottomrule
        \end{tabular}
        \end{table*}
        <BLANKLINE>
    """

    def entry(value: Value) -> str:
        text = value.text.translate(_LATEX)
        return rf"\textbf{{{text}}}" if value.best else text

    rows = [[name.translate(_LATEX) for name in table.columns]]
    rows += [[entry(value) for value in row] for row in table.rows]
    head, *body = [rf"{' & '.join(row)} \\" for row in rows]
    layout = "".join("l" if words else "r" for words in table.wordy)
    parts = [
        r"\begin{table*}",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",  # many columns on one page
        rf"\caption{{{table.title.translate(_LATEX)}}}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par {note.translate(_LATEX)}" for note in table.notes),
        r"\end{table*}",
        "",
    ]
    return "\n".join(parts)
