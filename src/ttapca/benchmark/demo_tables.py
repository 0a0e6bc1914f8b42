"""What the demo shows of its rows: three tables, and one line to remember."""

from __future__ import annotations

from pandas import DataFrame

from ttapca.benchmark.cells import CLEAN
from ttapca.benchmark.comparisons import SOURCE, Rows, frame
from ttapca.benchmark.plan import RECOMMENDED
from ttapca.benchmark.tables import MISSING, ResultTable, Value, error_tables, full_name

IN_BATCHES, ONE_BY_ONE = "episodic", "correlated"  # settings
STREAMS = {IN_BATCHES: "in batches", ONE_BY_ONE: "one by one"}


def demo_tables(rows: Rows) -> list[ResultTable]:
    """Return a table for corrupted images in batches, one for single images, one for clean ones."""
    every = frame(rows)
    return [*error_tables(every[every.corruption != CLEAN]), _clean_table(every)]


def mean_errors(rows: Rows) -> DataFrame:
    """Return the mean error of each method, in percent.

    Returns:
        A row for each setting, of corrupted and of clean images: the index is
        `(setting, is clean)`. A column for each method, in the order in which they were run.
    """
    every = frame(rows)
    methods = every.method.unique()
    clean = (every.corruption == CLEAN).rename("clean")
    means = every.groupby(["setting", clean, "method"]).error.mean().unstack("method")
    return means[methods].sort_index(ascending=[False, True])


def _clean_table(every: DataFrame) -> ResultTable:
    means = mean_errors(every).xs(True, level="clean")
    lines = []
    for setting, words in STREAMS.items():
        errors = means.loc[setting] if setting in means.index else means.iloc[0] * float("nan")
        lines.append((Value(words), *(_value(error, errors.min()) for error in errors)))
    first = every.iloc[0]
    title = f"{first.model} on {first.data}, clean images, {first.images:,} images"
    return ResultTable(title, ("", *means.columns), tuple(lines))


def _value(error: float, lowest: float) -> Value:
    if error != error:  # NaN: not measured
        return MISSING
    return Value(f"{error:.1f}", error, "number", best=error == lowest)


def line_to_remember(rows: Rows) -> str:
    """Say in one sentence what the demo found."""
    means = mean_errors(rows).round(1)
    clean, batches = means.loc[IN_BATCHES, True], means.loc[IN_BATCHES, False]
    single = means.loc[ONE_BY_ONE, False]
    every = frame(rows)
    names = every.corruption[(every.setting == ONE_BY_ONE) & (every.corruption != CLEAN)].unique()
    under = ", ".join(map(full_name, names))
    return (
        f"To remember: corruption takes the error of the untouched network from {clean[SOURCE]} % "
        f"to {batches[SOURCE]} %; with {RECOMMENDED} it is {batches[RECOMMENDED]} % (bn "
        f"{batches['bn']} %). One photograph at a time, sorted by class ({under}), it is "
        f"{single[RECOMMENDED]} % instead of {single[SOURCE]} % (bn {single['bn']} %). No label, "
        "no gradient, no weight touched."
    )
