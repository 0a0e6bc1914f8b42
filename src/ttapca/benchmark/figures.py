"""The paper's figures, and some more, made of rows. A figure is there when the rows carry it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ttapca.benchmark.cells import Observation, Row
from ttapca.benchmark.lines import ERROR, PICKED, caption, curve, style_of, without_sweeps
from ttapca.benchmark.plots import INK, Line, Panel, Plot
from ttapca.benchmark.row_groups import Grid, Place, Spread, Variant, grids, labels, place_of
from ttapca.benchmark.scatters import error_against_cost, error_against_parameters
from ttapca.benchmark.summary import main_grid
from ttapca.benchmark.tables import full_name, title_of
from ttapca.corruptions import CORRUPTIONS

LEVELS = ("bn", "tent")  # what a sweep of a filter is held against
Swept = Literal["components", "steps"]
SWEEPS: dict[Swept, tuple[str, str, str]] = {  # name, title, label
    "components": ("rank", "Error against PCA rank", "principal components kept"),
    "steps": ("steps", "Error against steps", "gradient steps a batch"),
}
POINTS = 160  # of a spectrum, spaced as a logarithmic axis shows them
SPECTRA = 4  # corruptions whose spectra are shown


def figures(rows: Sequence[Row], observations: Sequence[Observation] = ()) -> list[Plot]:
    """Every figure that the rows carry.

    Args:
        rows: Of a file of results.
        observations: Of the same file.

    Returns:
        Plots: error against rank, steps, batch size, parameters and cost; entropy over the stream;
        spectra and gains.

    Example:
        >>> figures([])
        []
    """
    found = grids(rows)
    cells = [*(row.cell for row in rows), *(each.cell for each in observations)]
    methods = dict.fromkeys(cell.method for cell in cells)
    styles = {name: at for at, name in enumerate(methods)}
    best = _main_of_each(found)
    online = _main_of_each([grid for grid in found if grid.place.setting != "episodic"] or found)
    plots = [
        *(_sweep(grid, "components", styles) for grid in found),
        *(_sweep(grid, "steps", styles) for grid in found),
        *_batch_sizes(found, styles),
        *(error_against_parameters(grid, styles) for grid in best),
        *(error_against_cost(grid, styles) for grid in best),
        *(_entropy(grid, styles) for grid in online),
        *_spectra(observations, styles),
    ]
    return _with_names_of_their_own([plot for plot in plots if plot is not None])


def _with_names_of_their_own(plots: Sequence[Plot]) -> list[Plot]:
    """The second of a name is called `-2`, and so on."""
    counts: Counter[str] = Counter()
    named = []
    for plot in plots:
        counts[plot.name] += 1
        number = counts[plot.name]
        named.append(replace(plot, name=f"{plot.name}-{number}") if number > 1 else plot)
    return named


def _main_of_each(found: Sequence[Grid]) -> list[Grid]:
    """The largest grid of each network and data set."""
    groups: dict[tuple[str, str, str], list[Grid]] = {}
    for grid in found:
        place = grid.place
        groups.setdefault((place.model, place.weights, place.data), []).append(grid)
    return [main_grid(group) for group in groups.values()]


def _sweep(grid: Grid, field: Swept, styles: dict[str, int]) -> Plot | None:
    """Error against one option: a curve a method that has several values of it."""
    families: dict[Variant, list[tuple[float, Spread]]] = {}
    for variant in grid.variants:
        mean = grid.mean(variant)
        if mean is not None and getattr(variant, field):
            family = replace(variant, **{field: 0})  # type: ignore[arg-type]
            families.setdefault(family, []).append((getattr(variant, field), mean))
    curves = {family: sorted(points, key=_first) for family, points in families.items()}
    curves = {family: points for family, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    names = labels(list(curves))
    lines = [curve(names[f], style_of(f, styles, curves), points) for f, points in curves.items()]
    drawn = {family.method for family in curves}
    levels = [v for v in grid.variants if v.method in LEVELS and v.method not in drawn]
    across = _levels(grid, without_sweeps(levels), styles)
    lines += across
    ticks = sorted({x for line in lines for x in line.x})
    name, title, label = SWEEPS[field]
    return Plot(
        name,
        title,
        caption(grid, spread="bars and bands" if across else "bars"),
        label,
        (Panel(ERROR, tuple(lines)),),
        "log",
        tuple(ticks),
    )


def _levels(grid: Grid, variants: list[Variant], styles: dict[str, int]) -> list[Line]:
    """Methods that have no such option: lines all the way across."""
    names = labels(variants)
    return [
        replace(curve(names[v], style_of(v, styles, variants), [(0.0, mean)]), x=())
        for v in variants
        if (mean := grid.mean(v)) is not None
    ]


def _first(pair: tuple[float, Spread]) -> float:
    return pair[0]


def _batch_sizes(found: Sequence[Grid], styles: dict[str, int]) -> list[Plot]:
    groups: dict[Place, list[Grid]] = {}
    for grid in found:
        groups.setdefault(replace(grid.place, batch_size=0), []).append(grid)
    return [plot for group in groups.values() if (plot := _batch_size(group, styles)) is not None]


def _batch_size(group: Sequence[Grid], styles: dict[str, int]) -> Plot | None:
    """Error against batch size, over the corruptions that all sizes have."""
    shared = set.intersection(*(set(grid.corruptions) for grid in group))
    kept = tuple(name for name in group[0].corruptions if name in shared)
    alike = [replace(grid, corruptions=kept) for grid in group if kept]
    points: dict[Variant, list[tuple[float, Spread]]] = {}
    for grid in alike:
        for variant in grid.variants:
            mean = grid.mean(variant)
            if mean is not None:
                points.setdefault(variant, []).append((grid.place.batch_size, mean))
    curves = {each: sorted(own, key=_first) for each, own in points.items() if len(own) > 1}
    if not curves:
        return None
    names = labels(list(curves))
    lines = tuple(curve(names[v], style_of(v, styles, curves), p) for v, p in curves.items())
    return Plot(
        "batch",
        "Error against batch size",
        caption(alike[0], batch=False),
        "images a batch",
        (Panel(ERROR, lines),),
        "log",
        tuple(sorted({x for line in lines for x in line.x})),
    )


def _entropy(grid: Grid, styles: dict[str, int]) -> Plot | None:
    """The predictions' entropy as the stream goes on, averaged over corruptions and seeds."""
    shown = without_sweeps(grid.variants)
    names = labels(shown)
    lines = []
    for variant in shown:
        streams = [row.outcome.entropy_stream for row in grid.of(variant)]
        length = min(map(len, streams), default=0)
        batches = list(zip(*(stream[:length] for stream in streams), strict=True))
        values = tuple(statistics.fmean(batch) for batch in batches)
        if length > 1 and all(map(math.isfinite, values)):
            steps = tuple(float(at) for at in range(1, length + 1))
            lines.append(Line(names[variant], style_of(variant, styles, shown), steps, values))
    if not lines:
        return None
    panels = (Panel("entropy [nats]", tuple(lines)),)
    words = caption(grid, spread="") + (PICKED if len(shown) < len(grid.variants) else "")
    return Plot("entropy", "Entropy over the stream", words, "batch", panels)


def _spectra(observations: Sequence[Observation], styles: dict[str, int]) -> list[Plot]:
    """What the stream did to the components, and what each filter did about it."""
    places: dict[Place, list[Observation]] = {}
    for each in observations:
        places.setdefault(place_of(each.cell), []).append(each)
    if not places:
        return []
    place, chosen = max(places.items(), key=lambda item: len(item[1]))
    return [
        _spectrum(place, [each for each in chosen if each.cell.corruption == corruption], styles)
        for corruption in one_a_family(each.cell.corruption for each in chosen)
    ]


def one_a_family(corruptions: Iterable[str]) -> list[str]:
    """Pick corruptions that differ: the first of each family, a few in all.

    Example:
        >>> one_a_family(["shot_noise", "gaussian_noise", "fog"])
        ['gaussian_noise', 'fog']
    """
    from ttapca.corruptions.catalogue import find

    picked: dict[str, str] = {}
    present = set(corruptions)
    for name in (name for name in CORRUPTIONS if name in present):
        picked.setdefault(find(name).family, name)
    return list(picked.values())[:SPECTRA]


def _spectrum(place: Place, seen: Sequence[Observation], styles: dict[str, int]) -> Plot:
    first = {each.cell.method: each for each in reversed(seen)}  # of each method the first
    any_one = seen[0]
    corruption = any_one.cell.corruption
    top = (
        _thinned("source data", INK, any_one.source_spectrum),
        _thinned("this stream", len(styles), any_one.test_spectrum),
    )
    bottom = tuple(
        _thinned(f"gain of {method}", styles[method], first[method].gains)
        for method in dict.fromkeys(each.cell.method for each in seen)
    )
    return Plot(
        f"spectrum-{corruption}",
        f"Spectrum and gains: {full_name(corruption)}",
        f"{title_of(place)}, seed {any_one.cell.seed}. Standard deviation of each component on "
        "source data and at the start of the stream; gains after the last batch.",
        "principal component",
        (Panel("standard deviation", top, "log"), Panel("gain", bottom)),
        "log",
    )


def _thinned(name: str, style: int, values: Sequence[float]) -> Line:
    """A few of many points, spaced evenly on a logarithmic axis."""
    count = len(values)
    places = sorted({round(count ** (at / (POINTS - 1))) for at in range(POINTS)}) if count else []
    return Line(name, style, tuple(map(float, places)), tuple(values[at - 1] for at in places))
