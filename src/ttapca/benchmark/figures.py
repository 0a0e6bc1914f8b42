"""The figures of a report, drawn with matplotlib."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from ttapca.benchmark import paper, svg
from ttapca.benchmark.comparisons import (
    LINE,
    Comparison,
    Conditions,
    Measurements,
    comparisons,
    frame,
    labels,
    largest,
    nearest_to_paper,
    shown_observations,
)
from ttapca.benchmark.rows import EPISODIC, Observation
from ttapca.benchmark.tables import full_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ERROR = "mean error [%]"
PICKED = (
    " Of a method with several ranks or numbers of steps, the one nearest to the paper's "
    f"{paper.COMPONENTS:,} components and {paper.STEPS} step is shown."
)
LEVELS = ("bn", "tent")  # methods that a sweep is compared with
SWEEPS = {  # by option: name, title and label of the figure
    "components": ("rank", "Error against PCA rank", "principal components kept"),
    "steps": ("steps", "Error against steps", "gradient steps per batch"),
    "batch_size": ("batch", "Error against batch size", "samples per batch"),
}
FAMILY = [name for name in LINE if name not in SWEEPS]
APART = 4 / 240  # of the axis, between bars that would hide one another
MARKS = 7  # on a curve of many points
POINTS = 160  # of a spectrum, spaced evenly on a logarithmic axis
LEAST_SPAN = 2.0  # percent; less is not magnified, because it would show chance as a difference
SCATTER_HEIGHT = 3.3  # inches
MARGIN = 0.08  # of the span, on each side of the points


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """One figure; its name is a word that no other figure of the same results has."""

    name: str
    title: str
    caption: str
    drawing: Figure  # of matplotlib, to be changed or saved in any format
    setting: str = ""  # a title names it if figures of several settings share theirs


def figures(rows: Measurements, observations: Sequence[Observation] = ()) -> list[ReportFigure]:
    """Draw every figure for which there are results; the second of a kind has `-2` in its name."""
    import matplotlib as mpl

    every = frame(rows)
    found = comparisons(every)
    styles = svg.styles_of([*every.method, *(each.cell.method for each in observations)])
    streams = [each for each in found if each.conditions.setting not in EPISODIC] or found
    with mpl.rc_context(fname=svg.STYLE):
        drawn = [
            *(_sweep(each, option, styles) for option in ("components", "steps") for each in found),
            *_batch_sizes(found, styles),
            *(_scatter(each, "parameters", styles) for each in _largest_of_each(found)),
            *(_scatter(each, "cost", styles) for each in _largest_of_each(found)),
            *(_entropy(each, styles) for each in _largest_of_each(streams)),
            *_spectra(observations, found, styles),
        ]
    kept = [figure for figure in drawn if figure is not None]
    counts: Counter[str] = Counter()
    named = []
    for figure in kept:
        counts[figure.name] += 1
        number = f"-{counts[figure.name]}" if counts[figure.name] > 1 else ""
        alike = {each.setting for each in kept if each.title == figure.title}
        setting = f", {figure.setting}" if len(alike) > 1 else ""
        named.append(replace(figure, name=figure.name + number, title=figure.title + setting))
    return named


def _largest_of_each(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the largest comparison of each network and data set."""
    keys = dict.fromkeys(each.conditions[:3] for each in found)  # network, weights, data
    return [largest([each for each in found if each.conditions[:3] == key]) for key in keys]


def _caption(comparison: Comparison, spread: str = "bars") -> str:
    """Name the results that the points of a figure are means of, and their bars."""
    count, seeds = len(comparison.corruptions), len(comparison.seeds)
    over = f"Mean over {count} corruptions" if count > 1 else full_name(comparison.corruptions[0])
    drawn = f"; {spread}: standard deviation over {seeds} seeds" if spread and seeds > 1 else ""
    if spread and comparison.standings():
        drawn = (
            f"; {spread}: 95 % interval over samples. All methods saw the same samples, so that "
            "their differences are surer than that"
        )
    return f"{comparison.conditions.title}. {over}{drawn}."


# Curves with a legend below ----------------------------------------------------------------------


def _sweep(comparison: Comparison, option: str, styles: dict[str, int]) -> ReportFigure | None:
    """Draw error against one option, a curve for each method that was run with several values."""
    lines = comparison.lines.dropna(subset="mean")
    swept = lines[lines[option] > 0]
    curves = _curves(swept, [name for name in LINE if name != option], option)
    drawn = {curve.method.iloc[0] for curve in curves}
    levels = lines[lines.method.isin(LEVELS) & ~lines.method.isin(drawn)]
    levels = nearest_to_paper(levels, FAMILY)
    caption = _caption(comparison, "bars and bands" if len(levels) else "bars")
    return _curve_figure(option, curves, levels, styles, caption, comparison.conditions.setting)


def _batch_sizes(
    found: Sequence[Comparison], styles: dict[str, int]
) -> Iterator[ReportFigure | None]:
    """Draw error against batch size, over the corruptions that all sizes have."""
    groups: dict[Conditions, list[Comparison]] = {}
    for each in found:
        if each.conditions.batch_size:  # which a frame made by hand may lack
            groups.setdefault(each.conditions._replace(batch_size=0), []).append(each)
    for conditions, group in groups.items():
        shared = set.intersection(*(set(each.corruptions) for each in group))
        kept = tuple(name for name in group[0].corruptions if name in shared)
        lines = [
            replace(each, corruptions=kept).lines.assign(batch_size=each.conditions.batch_size)
            for each in group
        ]
        curves = _curves(pd.concat(lines).dropna(subset="mean"), LINE, "batch_size")
        if curves:
            caption = _caption(replace(group[0], conditions=conditions, corruptions=kept))
            none = lines[0][:0]
            yield _curve_figure("batch_size", curves, none, styles, caption, conditions.setting)


def _curves(lines: DataFrame, family: list[str], option: str) -> list[DataFrame]:
    """Group lines that differ in one option only; a single point makes no curve."""
    groups = [own.sort_values(option) for _, own in lines.groupby(family, sort=False)]
    return [own for own in groups if len(own) > 1]


def _curve_figure(
    option: str,
    curves: Sequence[DataFrame],
    levels: DataFrame,
    styles: dict[str, int],
    caption: str,
    setting: str,
) -> ReportFigure | None:
    """Draw curves on a logarithmic axis, those with bars a little apart, and lines all across."""
    if not curves:
        return None
    name, title, label = SWEEPS[option]
    figure, (axes,) = svg.panels(1, len(curves) + len(levels))
    families = pd.concat([curve[:1] for curve in curves]).assign(**{option: 0})
    ticks = sorted({value for curve in curves for value in curve[option]})
    apart = (ticks[-1] / ticks[0]) ** APART
    spread = [curve.spread.fillna(0) for curve in curves]
    barred = [at for at, each in enumerate(spread) if each.any()]
    for at, (_, text, number) in enumerate(_drawn_as(families, styles)):
        shift = barred.index(at) - (len(barred) - 1) / 2 if at in barred else 0
        x, y = curves[at][option] * apart**shift, curves[at]["mean"]
        bars = {"yerr": spread[at], "capsize": 2, "elinewidth": 0.9} if at in barred else {}
        axes.errorbar(x, y, label=text, **bars, **svg.look(number))
    for line, text, number in _drawn_as(levels, styles):
        colour, dash = svg.look(number)["color"], svg.look(number)["linestyle"]
        axes.axhline(line.mean, color=colour, linestyle=dash, label=text)
        if line.spread > 0:
            low, high = line.mean - line.spread, line.mean + line.spread
            axes.axhspan(low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set(xscale="log", xlabel=label, ylabel=ERROR)
    svg.label_plainly(axes.xaxis)
    axes.set_xticks(ticks)
    svg.add_legend(figure)
    return ReportFigure(name, title, caption, figure, setting)


def _drawn_as(lines: DataFrame, styles: dict[str, int]) -> Iterator[tuple[Any, str, int]]:
    """Yield lines with label and style: that of the method, a free one for a second line of it."""
    more = iter(range(len(styles), len(styles) + len(lines)))
    again = lines.method.duplicated()
    for line, text, seen in zip(lines.itertuples(), labels(lines), again, strict=True):
        yield line, text, next(more) if seen else styles[line.method]


def _entropy(comparison: Comparison, styles: dict[str, int]) -> ReportFigure | None:
    """Draw the predictions' entropy batch by batch, averaged over corruptions and seeds."""
    from matplotlib.ticker import MaxNLocator

    rows = comparison.rows[comparison.rows.error.notna()]
    rows = rows[rows.corruption.isin(comparison.corruptions)]
    shown = nearest_to_paper(comparison.lines, FAMILY)
    figure, (axes,) = svg.panels(1, len(shown))
    for line, text, number in _drawn_as(shown, styles):
        streams = rows.entropy_stream[rows.line == line.Index]
        length = min(map(len, streams), default=0)
        values = np.array([stream[:length] for stream in streams], dtype=float)
        if length > 1 and np.isfinite(values).all():
            batches, every = np.arange(1, length + 1), max(1, length // MARKS)
            axes.plot(batches, values.mean(0), markevery=every, label=text, **svg.look(number))
    if not axes.lines:
        return None
    axes.set(xlabel="batch", ylabel="entropy [nats]")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    svg.add_legend(figure)
    caption = _caption(comparison, "") + (PICKED if len(shown) < len(comparison.lines) else "")
    return ReportFigure("entropy", "Entropy over the stream", caption, figure)


def _spectra(
    observations: Sequence[Observation], found: Sequence[Comparison], styles: dict[str, int]
) -> Iterator[ReportFigure]:
    """Draw the components of the source and of the stream, and below them the filters' gains."""
    drawable = [each for each in observations if any(value > 0 for value in each.source_spectrum)]
    for corruption, own in shown_observations(drawable, found).items():
        first = own[0]
        gains: dict[str, tuple[float, ...]] = {}
        for each in own:
            gains.setdefault(each.cell.method, each.gains)
        figure, (above, below) = svg.panels(2, 2 + len(gains))
        _draw_spectrum(above, first.source_spectrum, label="source data", color=svg.INK)
        dotted = {"color": svg.INK, "linestyle": svg.DASHES[2]}
        _draw_spectrum(above, first.test_spectrum, label="this stream", **dotted)
        for method, values in gains.items():
            _draw_spectrum(below, values, label=f"gain of {method}", **svg.look(styles[method]))
        above.set(ylabel="standard deviation", xscale="log", yscale="log")
        below.set(ylabel="gain", xlabel="principal component")
        svg.label_plainly(above.yaxis)
        svg.label_plainly(below.xaxis)
        svg.add_legend(figure)
        yield ReportFigure(
            f"spectrum-{corruption}",
            f"Spectrum and gains: {full_name(corruption)}",
            f"{Conditions.of(first.cell).title}, seed {first.cell.seed}. Standard deviation of "
            "each component on source data and at the start of the stream; gains after the last "
            "batch.",
            figure,
        )


def _draw_spectrum(axes: Axes, values: Sequence[float], **style: Any) -> None:
    numbers = np.unique(np.geomspace(1, max(len(values), 1), POINTS).round().astype(int))
    numbers = numbers[: len(values)]
    every = max(1, len(numbers) // MARKS)
    axes.plot(numbers, np.array(values)[numbers - 1], markevery=every, **style)


# Points with their names at the side -------------------------------------------------------------


def _scatter(comparison: Comparison, name: str, styles: dict[str, int]) -> ReportFigure | None:
    """Draw one point for each method; names and errors stand at the side, the highest first."""
    from matplotlib.figure import Figure

    column, label = "milliseconds", "milliseconds per sample"
    if name == "parameters":
        column, label = name, "parameters adapted"
    elif comparison.lines.times_source.notna().any():
        column, label = "times_source", "time per sample (source = 1)"
    title = f"Error against {'cost' if name == 'cost' else label}"
    whole = comparison.lines.dropna(subset=["mean", column])
    shown = nearest_to_paper(whole, FAMILY)
    if shown[column].nunique() < 2:  # nothing to compare the error with
        return None
    height = max(SCATTER_HEIGHT, 0.8 + svg.LEGEND_LINE * len(shown))
    figure = Figure(figsize=(svg.WIDTH, height), layout="constrained")
    axes = figure.subplots()
    handles: dict[str, Any] = {}
    for line, text, number in sorted(_drawn_as(shown, styles), key=lambda each: -each[0].mean):
        spread = line.spread if line.spread > 0 else None
        words = f"{line.mean:.1f}" + (f" ±{spread:.1f}" if spread else "") + f"\u2002{text}"
        style = {**svg.look(number), "linestyle": ""}
        handles[words] = axes.errorbar(getattr(line, column), line.mean, spread, capsize=2, **style)
    reach = shown.spread.fillna(0)
    low, high = (shown["mean"] - reach).min(), (shown["mean"] + reach).max()
    half = max(high - low, LEAST_SPAN) * (0.5 + MARGIN)
    axes.set_ylim((low + high) / 2 - half, (low + high) / 2 + half)
    _scale_x(axes, shown[column])
    axes.set(xlabel=label, ylabel=ERROR)
    figure.legend(handles.values(), handles, loc="outside right center", handletextpad=0.2)
    caption = f"{_caption(comparison)} Down and to the left is better."
    caption += PICKED if len(shown) < len(whole) else ""
    return ReportFigure(name, title, caption, figure)


def _scale_x(axes: Axes, values: Series) -> None:
    """Make the axis logarithmic, with a place for zero if there is one."""
    if values.min() > 0:
        margin = (values.max() / values.min()) ** MARGIN
        axes.set(xscale="log", xlim=(values.min() / margin, values.max() * margin))
        svg.label_plainly(axes.xaxis)
    else:
        top = max(10.0, values.max())
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlim(-4, 2 * top)
        svg.label_plainly(axes.xaxis)
        decades = range(1, 1 + int(math.log10(top)))
        axes.set_xticks([0, *(10**each for each in decades[:: math.ceil(len(decades) / 3)])])
