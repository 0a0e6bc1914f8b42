"""Rows of results as a pandas DataFrame, sorted into comparisons.

Rows of one `Comparison` have the same *conditions*: all but corruption, method and seed. One *line*
of it is a method with its options, as in a table.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
from pandas import DataFrame, Series

from ttapca.benchmark import paper
from ttapca.benchmark.rows import CLEAN, INTERLEAVED, Cell, Observation, Outcome, Row
from ttapca.benchmark.uncertainty import Difference, ImageTally, Standing, differences, standings
from ttapca.corruptions import CORRUPTIONS, find
from ttapca.support.progress import counted

Measurements: TypeAlias = "Iterable[Row] | DataFrame"
LINE = ["method", "options", "layer", "components", "steps", "lr"]
SOURCE = "source"
MOST_OBSERVED = 4  # corruptions: gains and images of all of them would fill many pages


def frame(rows: Measurements) -> DataFrame:
    """Put results into one tidy table: the fields of `Cell`, then of `Outcome`.

    `error`, `calibration_error` and `entropy` are NaN if the run failed. Everything that shows
    results takes such a frame too, so you can select rows with pandas first.

    Args:
        rows: As `Results.rows()` returns them; a frame stays as it is, and may lack `correct`.

    Example:
        >>> frame([]).columns[:5].tolist()
        ['model', 'weights', 'data', 'corrupted', 'corruption']
    """
    if isinstance(rows, DataFrame):
        return rows if "correct" in rows else rows.assign(correct=b"")
    names = [field.name for kind in (Cell, Outcome) for field in fields(kind)]
    records = [vars(row.cell) | vars(row.outcome) for row in rows if row.outcome.status != "pruned"]
    numbers = dict.fromkeys(("error", "calibration_error", "entropy"), float)
    return DataFrame(records, columns=names).astype(numbers)


class Conditions(NamedTuple):
    """The values that all numbers of one table share."""

    model: str
    weights: str
    data: str
    corrupted: str
    severity: int
    setting: str
    batch_size: int
    images: int

    @classmethod
    def of(cls, cell: Cell) -> Conditions:
        """Return the conditions of one measurement."""
        return cls(*(getattr(cell, name) for name in cls._fields))

    @property
    def title(self) -> str:
        """The conditions in one line; a batch size of 0 is left out."""
        severity = f"severity {self.severity}" if self.severity else "clean samples"
        parts = [f"{self.model} on {self.data}", severity, self.setting]
        if self.batch_size:
            single = self.batch_size == 1
            parts.append("one sample at a time" if single else f"batches of {self.batch_size}")
        return ", ".join([*parts, f"{self.images:,} samples"])


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results of one set of conditions; `corruptions` has clean images only if nothing else."""

    conditions: Conditions
    corruptions: tuple[str, ...]
    rows: DataFrame  # with a column `line`: the number of each row's line
    # By corruptions: tables, figures and the headline ask again and again.
    _standings: dict[tuple[str, ...], dict[int, Standing]] = field(default_factory=dict, init=False)

    @cached_property
    def lines(self) -> DataFrame:
        """One row for each method with its options, in the order in which they were run."""
        # `mean` is over all corruptions and seeds, without seeds that lack a corruption;
        # `deviation` is over seeds; `spread` is half the 95 % interval over images, or the
        # deviation if that is not known.
        done = self.rows[self.rows.error.notna() & self.rows.corruption.isin(self.corruptions)]
        seeds = self._whole(self.corruptions).groupby(["line", "seed"]).error.agg(_mean)
        whole = seeds.groupby("line")
        means = DataFrame({"mean": whole.agg(_mean), "deviation": whole.std()})
        intervals = {line: each.error.half_width for line, each in self.standings().items()}
        spread = Series(intervals, dtype=float) if intervals else means.deviation
        means = means.assign(spread=spread)
        clean = self.rows[self.rows.corruption == CLEAN].groupby("line").error.agg(clean=_mean)
        costs = done.groupby("line").agg(
            seconds=("seconds", "sum"),
            images=("images", "sum"),
            parameters=("parameters", "max"),
            peak_memory=("peak_memory", "max"),
            updates=("updates", "sum"),
            skipped=("skipped", "sum"),
            calibration_error=("calibration_error", "mean"),
            entropy=("entropy", "mean"),
        )
        if self.conditions.setting in INTERLEAVED:  # each has the counts of the stream
            streams = done.groupby(["line", "seed"])[["updates", "skipped"]].max()
            costs = costs.assign(**streams.groupby("line").sum())
        lines = self.rows.groupby("line")[LINE].first()
        lines = lines.join([means, clean, costs]).assign(label=labels(lines))
        milliseconds = (1000 * lines.seconds / lines.images).where(lines.seconds > 0)
        source = milliseconds[lines.method == SOURCE].dropna()
        times_source = milliseconds / (source.iloc[0] if len(source) else math.nan)
        return lines.assign(milliseconds=milliseconds, times_source=times_source)

    @cached_property
    def entries(self) -> dict[tuple[int, str], dict[str, Any]]:
        """By line and corruption: mean and deviation over seeds, and how many failed and why."""
        failed = self.rows.status.eq("failed")
        rows = self.rows.assign(failed=failed, reason=self.rows.reason.where(failed))
        found = rows.groupby(["line", "corruption"]).agg(
            mean=("error", _mean),
            deviation=("error", "std"),
            seeds=("error", "size"),
            failed=("failed", "sum"),
            reason=("reason", "first"),
        )
        return dict(found.to_dict("index"))

    def standings(self, *names: str) -> dict[int, Standing]:
        """Rank the lines by their mean errors over some corruptions, or all; see `tallies`."""
        chosen = names or self.corruptions
        if chosen not in self._standings:
            tallies = self.tallies(*chosen)
            ranked = standings(list(tallies.values()))
            self._standings[chosen] = dict(zip(tallies, ranked, strict=True))
        return self._standings[chosen]

    def differences(self, reference: int) -> dict[int, Difference]:
        """Return by how much errors lie above that of a line; empty if that has none."""
        tallies = self.tallies()
        if reference not in tallies:
            return {}
        found = differences(list(tallies.values()), list(tallies).index(reference))
        return dict(zip(tallies, found, strict=True))

    def tallies(self, *names: str) -> dict[int, ImageTally]:
        """Return how often each line was wrong on each image; empty if unknown for some line."""
        whole = self._whole(names or self.corruptions)
        if (whole.correct == b"").any():
            return {}
        lines = whole.groupby("line").correct
        return {line: ImageTally.of(bits.tolist(), self.conditions.images) for line, bits in lines}

    def _whole(self, names: Sequence[str]) -> DataFrame:
        """Return the rows of some corruptions, without seeds that lack one of them."""
        rows = self.rows[self.rows.error.notna() & self.rows.corruption.isin(names)]
        return rows[rows.groupby(["line", "seed"]).error.transform("count") == len(names)]

    @property
    def seeds(self) -> list[int]:
        """Every seed that was used."""
        return sorted(self.rows.seed.unique().tolist())


def _mean(values: Series) -> float:
    """Return the exactly rounded mean, which does not depend on the order of the rows."""
    present = [value for value in values.tolist() if not math.isnan(value)]
    return statistics.fmean(present) if present else math.nan


def comparisons(rows: Measurements) -> list[Comparison]:
    """Sort results into comparisons; clean images join all whose other conditions are the same."""
    every = frame(rows)
    every = every.assign(error=every.error.where(every.status == "done"))
    groups = {
        Conditions(*key): own for key, own in every.groupby(list(Conditions._fields), sort=False)
    }
    joined = {each._replace(severity=0) for each in groups if each.severity}
    order = {name: number for number, name in enumerate(CORRUPTIONS)}
    found = []
    for conditions, own in groups.items():
        if conditions in joined:
            continue
        if conditions.severity:
            own = pd.concat([own, groups.get(conditions._replace(severity=0), own[:0])])
        names = [name for name in own.corruption.unique() if name != CLEAN]
        columns = sorted(names, key=lambda name: order.get(name, len(order)))
        own = own.assign(line=own.groupby(LINE, sort=False).ngroup())
        found.append(Comparison(conditions, tuple(columns) or (CLEAN,), own))
    return found


def largest(found: Sequence[Comparison]) -> Comparison:
    """Return the comparison with the most results, the first of equals."""
    return max(found, key=lambda each: len(each.rows))


def labels(lines: DataFrame) -> list[str]:
    """Name each line by its method, and by options that tell it from others of the same method."""
    kinds = lines.groupby("method")[list(_WRITERS)].nunique()
    found = []
    for line in lines.to_dict("records"):
        differ = kinds.loc[line["method"]] > 1
        words = [write(line[name]) for name, write in _WRITERS.items() if differ[name]]
        found.append(", ".join(filter(None, [line["method"], *words])))
    return found


_WRITERS: dict[str, Callable[[Any], str]] = {
    "components": lambda value: f"L = {value}" if value else "no filter",
    "layer": lambda value: f"at {value}" if value else "",
    "steps": lambda value: counted(value, "step"),
    "lr": lambda value: f"lr {value:g}",
    "options": lambda text: ", ".join(f"{n} = {v}" for n, v in json.loads(text).items()),
}


def nearest_to_paper(lines: DataFrame, family: Sequence[str]) -> DataFrame:
    """Of lines that agree in the columns `family`, keep the one nearest to the paper's options."""
    families = lines.groupby(list(family), sort=False).ngroup()
    distances = DataFrame({"family": families, "options": lines.options != "{}"})
    wanted = {"steps": paper.STEPS, "lr": paper.LR, "components": paper.COMPONENTS}
    for name, value in wanted.items():  # 0 if a method has no such option
        distances[name] = (lines[name] - value).abs().where(lines[name] > 0, 0)
    nearest = distances.sort_values(list(distances), kind="stable").drop_duplicates("family")
    return lines.loc[nearest.index]


def shown_observations(
    observations: Iterable[Observation], found: Sequence[Comparison]
) -> dict[str, list[Observation]]:
    """Choose observations: of each family, the corruption in which methods differ most."""
    groups: dict[Conditions, dict[str, list[Observation]]] = {}
    for each in observations:
        if each.cell.corruption != CLEAN:  # which has conditions of its own
            own = groups.setdefault(Conditions.of(each.cell), {})
            own.setdefault(each.cell.corruption, []).append(each)
    if not groups:
        return {}
    conditions = max(groups, key=lambda each: sum(map(len, groups[each].values())))
    observed = groups[conditions]
    spans = next((_spans(each) for each in found if each.conditions == conditions), {})
    families: dict[str, list[str]] = {}
    for name in CORRUPTIONS:
        if name in observed:
            families.setdefault(find(name).family, []).append(name)
    picked = [max(own, key=lambda name: spans.get(name, 0.0)) for own in families.values()]
    return {name: observed[name] for name in picked[:MOST_OBSERVED]}


def _spans(comparison: Comparison) -> dict[str, float]:
    """Return the highest minus the lowest error of methods under each corruption."""
    rows = comparison.rows[(comparison.rows.method != SOURCE) & comparison.rows.error.notna()]
    errors = rows.groupby(["corruption", "line"]).error.mean().groupby("corruption")
    spans: dict[str, float] = (errors.max() - errors.min()).to_dict()
    return spans
