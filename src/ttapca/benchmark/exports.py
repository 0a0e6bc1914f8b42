"""Results as text: CSV and JSON of every measurement, Markdown of the tables."""

from __future__ import annotations

import json
import math

from ttapca._checks import OneOf, check_option
from ttapca.benchmark.comparisons import Measurements, comparisons, frame
from ttapca.benchmark.tables import (
    ResultTable,
    Value,
    difference_table,
    error_table,
    failure_table,
    paper_tables,
    setting_tables,
)
from ttapca.support.parsing import finite

FORMATS = ("csv", "json", "markdown")
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in r"\|*_`<>[]"} | {"\n": " "})


def export(rows: Measurements, form: str) -> str:
    """Write results as text: `csv` or `json` for all rows, `markdown` for the tables."""
    check_option("format", form, OneOf(FORMATS))
    if form == "markdown":
        every = comparisons(rows)
        found = [table(each) for each in every for table in (error_table, difference_table)]
        found = [*setting_tables(every), *found, *paper_tables(rows), failure_table(rows)]
        return "\n".join(markdown(table) for table in found if table is not None)
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

    def entry(value: Value) -> str:
        text = value.text.translate(_MARKDOWN)
        return f"**{text}**" if value.best else text

    head = [name.translate(_MARKDOWN) for name in table.columns]
    rules = [":--" if words else "--:" for words in table.wordy]
    lines = [
        f"| {' | '.join(line)} |"
        for line in (head, rules, *(map(entry, row) for row in table.rows))
    ]
    notes = [f"\n{note.translate(_MARKDOWN)}" for note in table.notes]
    return "\n".join([f"### {table.title.translate(_MARKDOWN)}\n", *lines, *notes, ""])
