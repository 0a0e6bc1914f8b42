"""The measurements that failed, and why."""

from __future__ import annotations

from ttapca.benchmark.comparisons import Rows, frame
from ttapca.benchmark.tables import ResultTable, Value, heading

COLUMNS = ["method", "setting", "corruption", "severity", "seed", "reason"]


def failure_table(rows: Rows) -> ResultTable | None:
    """Return every measurement that failed, and why; None when all went well."""
    every = frame(rows)
    failed = every[(every.status != "done") | every.error.isna()][COLUMNS]
    failed = failed.assign(corruption=failed.corruption.map(heading))
    body = [tuple(map(_value, line)) for line in failed.itertuples(index=False)]
    return ResultTable("What failed", tuple(COLUMNS), tuple(body)) if body else None


def _value(each: str | int) -> Value:
    return Value(each) if isinstance(each, str) else Value(f"{each}", float(each), "number")
