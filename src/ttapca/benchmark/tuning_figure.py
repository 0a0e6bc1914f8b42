"""The figure of a search: mean error against each option, in panels beside one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ttapca.benchmark import svg
from ttapca.benchmark.figures import ERROR, MARGIN, ReportFigure
from ttapca.benchmark.search_space import Choices, Range, SearchSpace
from ttapca.benchmark.session import toml_value
from ttapca.benchmark.tuning import Trial, Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 4.0  # times the lowest error; the axis is logarithmic if there are higher ones
ACROSS = 3  # panels beside one another
PANEL_WIDTH, PANEL_HEIGHT = 2.9, 2.5  # inches
LOOKS: dict[str, dict[str, Any]] = {
    "finished": {"color": svg.PALETTE[0], "marker": "o", "alpha": 0.75},
    "left early": {"color": svg.PALETTE[6], "marker": "v", "fillstyle": "none"},
    "best": {"color": svg.PALETTE[1], "marker": "*", "markersize": 12},
}


def tuning_figure(tuned: Tuned, space: SearchSpace) -> ReportFigure:
    """Draw the mean error of all trials against each option that has several values."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    several = [name for name, each in space.options.items() if each.count != 1]
    names = several or list(space.options)
    with mpl.rc_context(svg.STYLE):
        across = min(ACROSS, len(names))
        down = math.ceil(len(names) / across)
        size = (max(svg.WIDTH, PANEL_WIDTH * across), PANEL_HEIGHT * down + 2 * svg.LEGEND_LINE)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False)
        groups = _groups(tuned)
        for place, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
            _panel(axes, name, space.options[name], groups)
            if tuned.source.mean is not None:
                axes.axhline(
                    tuned.source.mean, color=svg.INK, linestyle=(0, (4, 2)), label="source"
                )
            if place % across == 0:
                axes.set_ylabel(ERROR)
        shown = (tuned.source, *groups["finished"], *groups["best"])
        means = [trial.mean for trial in shown if trial.mean is not None]
        _scale_y(panels.flat[0], means)
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        handles, labels = panels.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
    caption = (
        f"{len(tuned.trials):,} trials, mean error over {len(tuned.conditions)} held-out "
        f"conditions of {tuned.images:,} images, seed {tuned.seed}. Other options vary as well. "
        "Trials that were left early are marked at the upper edge, without their error."
    )
    title = f"Error of {tuned.method} against its options"
    return ReportFigure("tuning", title, caption, figure)


def _groups(tuned: Tuned) -> dict[str, list[Trial]]:
    """Return the trials by how they are drawn."""
    groups: dict[str, list[Trial]] = {name: [] for name in LOOKS}
    for trial in tuned.trials:
        if trial is tuned.best:
            groups["best"].append(trial)
        elif trial.status != "failed":
            groups["finished" if trial.status == "done" else "left early"].append(trial)
    return groups


def _scale_y(axes: Axes, errors: Sequence[float]) -> None:
    """Make the axis logarithmic where a few bad trials would squeeze the good ones together."""
    if errors and 0 < FAR * min(errors) < max(errors):
        axes.set_yscale("log")
        svg.label_plainly(axes.yaxis)


def _panel(axes: Axes, name: str, values: Choices | Range, groups: dict[str, list[Trial]]) -> None:
    """Draw the trials against one option."""
    places = _places(name, values, [trial for some in groups.values() for trial in some])
    for look, trials in groups.items():
        if not trials:
            continue
        x = [places[toml_value(trial.options[name])] for trial in trials]
        y, style = [trial.mean or 0.0 for trial in trials], LOOKS[look]
        if look == "left early":  # at the edge: their means are over fewer conditions
            y = [1.0] * len(x)
            style = {**style, "transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(x, y, linestyle="none", label=look, **style)
    axes.set_xlabel(name)
    if isinstance(values, Range):
        axes.set_xscale("log" if values.log else "linear")
        room = (values.high / values.low) ** MARGIN if values.log else 1.0
        span = 0.0 if values.log else MARGIN * (values.high - values.low)
        axes.set_xlim(values.low / room - span, values.high * room + span)
        svg.label_plainly(axes.xaxis)
    else:
        axes.set_xticks(range(len(values.values)), [_short(each) for each in values.values])
        axes.set_xlim(-0.5, len(values.values) - 0.5)


def _places(name: str, values: Choices | Range, trials: Sequence[Trial]) -> dict[str, float]:
    """Return where each value stands on the axis."""
    if isinstance(values, Range):
        return {toml_value(trial.options[name]): trial.options[name] for trial in trials}
    return {toml_value(value): place for place, value in enumerate(values.values)}


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
