"""Results for other programs (CSV, JSON) and for papers (Markdown, LaTeX)."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from ttapca.benchmark.cells import Cell, Outcome, Row
from ttapca.benchmark.comparison import comparison_tables
from ttapca.benchmark.tables import Table, Value, error_tables
from ttapca.errors import OptionError, did_you_mean

Format = Literal["csv", "json", "markdown", "latex"]
FORMATS: tuple[str, ...] = get_args(Format)

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",  # noqa: RUF001
        "—": "--",
        "†": r"$\dagger$",
    }
)
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in r"\|*_`<>[]"} | {"\n": " "})


def export(rows: Sequence[Row], form: str) -> str:
    r"""Write results as text.

    Args:
        rows: Of a file of results.
        form: `csv` or `json` for every row with its full key; `markdown` or `latex` for the tables.

    Returns:
        The text of a file.

    Raises:
        OptionError: There is no such format.

    Example:
        >>> export([], "json")
        '[]\n'
    """
    if form not in FORMATS:
        raise OptionError(
            f"Results are exported as {', '.join(FORMATS)}; found `{form}`."
            f"{did_you_mean(form, FORMATS)}"
        )
    writers: dict[str, Callable[[Sequence[Row]], str]] = {
        "csv": to_csv,
        "json": to_json,
        "markdown": lambda rows: "\n".join(markdown(table) for table in tables(rows)),
        "latex": lambda rows: "\n".join(latex(table) for table in tables(rows)),
    }
    return writers[form](rows)


def tables(rows: Iterable[Row]) -> list[Table]:
    """Every table of a file of results, then those that compare it with the paper."""
    kept = list(rows)
    return [*error_tables(kept), *comparison_tables(kept)]


def to_json(rows: Iterable[Row]) -> str:
    """Every row as one flat object: its key, then what was measured."""
    records = [_record(row) for row in rows]
    return json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(rows: Iterable[Row]) -> str:
    """Every row as one line; streams and tables of versions as JSON inside their column."""
    names = [field.name for kind in (Cell, Outcome) for field in dataclasses.fields(kind)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _plain(value) for name, value in _record(row).items()})
    return text.getvalue()


def _record(row: Row) -> dict[str, Any]:
    values = {**dataclasses.asdict(row.cell), **dataclasses.asdict(row.outcome)}
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a number that is none is null."""
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def markdown(table: Table) -> str:
    r"""A table for a page in Markdown.

    Args:
        table: Any.

    Returns:
        The title as a heading, the table with the best in bold, the notes.

    Example:
        >>> line = (Value("a|b"), Value("1.0", 1.0, "number"))
        >>> print(markdown(Table("errors", ("method", "mean"), (line,))))
        ### errors
        <BLANKLINE>
        | method | mean |
        |:--|--:|
        | a\|b | 1.0 |
        <BLANKLINE>
    """

    def cell(value: Value) -> str:
        text = value.text.translate(_MARKDOWN)
        return f"**{text}**" if value.best else text

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join(":--" if words else "--:" for words in table.wordy) + "|"
    parts = [
        f"### {table.title.translate(_MARKDOWN)}",
        "",
        line(name.translate(_MARKDOWN) for name in table.columns),
        rule,
        *(line(cell(value) for value in row) for row in table.rows),
        *(f"\n{note.translate(_MARKDOWN)}" for note in table.notes),
        "",
    ]
    return "\n".join(parts)


def latex(table: Table) -> str:
    r"""A table for a paper; it needs the package `booktabs`.

    Args:
        table: Any.

    Returns:
        A `table*` with caption, the best in bold, and the notes below.

    Example:
        >>> line = (Value("bn"), Value("1.0", 1.0, "number", best=True))
        >>> print(latex(Table("50 %", ("method", "mean"), (line,))))
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

    def cell(value: Value) -> str:
        text = value.text.translate(_LATEX)
        return rf"\textbf{{{text}}}" if value.best else text

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cells) + r" \\"

    layout = "".join("l" if words else "r" for words in table.wordy)
    parts = [
        r"\begin{table*}",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",  # many columns on one page
        rf"\caption{{{table.title.translate(_LATEX)}}}",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        line(name.translate(_LATEX) for name in table.columns),
        r"\midrule",
        *(line(cell(value) for value in row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par {note.translate(_LATEX)}" for note in table.notes),
        r"\end{table*}",
        "",
    ]
    return "\n".join(parts)
