"""The paper's figures, and some more, made of rows. A figure is there when the rows carry it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ttapca.bench.cells import Observation, Row
from ttapca.bench.places import Grid, Place, Spread, Variant, grids, labels, place_of
from ttapca.bench.plots import INK, Line, Panel, Plot, Scale
from ttapca.bench.summary import SOURCE, main_grid, seconds_an_image
from ttapca.bench.tables import full_name, title_of
from ttapca.corruptions import CORRUPTIONS

ERROR = "mean error [%]"
LEVELS = ("bn", "tent")  # what a sweep of a filter is held against
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
        *(_sweep(grid, "components", "principal components kept", styles) for grid in found),
        *(_sweep(grid, "steps", "gradient steps a batch", styles) for grid in found),
        *_batch_sizes(found, styles),
        *(_parameters(grid, styles) for grid in best),
        *(_cost(grid, styles) for grid in best),
        *(_entropy(grid, styles) for grid in online),
        *_spectra(observations, styles),
    ]
    kept = [plot for plot in plots if plot is not None]
    return [replace(plot, name=f"{plot.name}-{at}") for at, plot in enumerate(kept)]


def _main_of_each(found: Sequence[Grid]) -> list[Grid]:
    """The largest grid of each network and data set."""
    groups: dict[tuple[str, str, str], list[Grid]] = {}
    for grid in found:
        place = grid.place
        groups.setdefault((place.model, place.weights, place.data), []).append(grid)
    return [main_grid(group) for group in groups.values()]


def _sweep(grid: Grid, field: str, label: str, styles: dict[str, int]) -> Plot | None:
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
    lines = [_curve(names[f], _style(f, styles, curves), points) for f, points in curves.items()]
    drawn = {family.method for family in curves}
    for variant in grid.variants:
        mean = grid.mean(variant)
        if mean and variant.method in LEVELS and variant.method not in drawn:
            lines.append(Line(variant.method, styles[variant.method], (), (mean.mean,)))
    ticks = sorted({x for line in lines for x in line.x})
    return Plot(
        f"error-{field}",
        f"Error against {label}",
        _caption(grid),
        label,
        (Panel(ERROR, tuple(lines)),),
        "log",
        tuple(ticks),
    )


def _first(pair: tuple[float, Spread]) -> float:
    return pair[0]


def _style(variant: Variant, styles: dict[str, int], drawn: Iterable[Variant]) -> int:
    """A method's own style; a second curve of the same method gets one that no method has."""
    same = [each for each in drawn if each.method == variant.method]
    at = same.index(variant)
    return styles[variant.method] if at == 0 else len(styles) + at


def _curve(name: str, style: int, points: Sequence[tuple[float, Spread]]) -> Line:
    spreads = tuple(spread.deviation or 0.0 for _, spread in points)
    return Line(
        name,
        style,
        tuple(float(x) for x, _ in points),
        tuple(spread.mean for _, spread in points),
        spreads if any(spreads) else (),
    )


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
    lines = tuple(_curve(names[v], _style(v, styles, curves), p) for v, p in curves.items())
    return Plot(
        "error-batch",
        "Error against batch size",
        _caption(alike[0], batch=False),
        "images a batch",
        (Panel(ERROR, lines),),
        "log",
        tuple(sorted({x for line in lines for x in line.x})),
    )


def _parameters(grid: Grid, styles: dict[str, int]) -> Plot | None:
    def adapted(variant: Variant) -> float:
        return max(row.outcome.parameters for row in grid.of(variant))

    lines = _points(grid, adapted, styles)
    title = "Error against parameters adapted"
    return _scatter("error-parameters", title, "parameters adapted", "symlog", lines, grid)


def _cost(grid: Grid, styles: dict[str, int]) -> Plot | None:
    source = next((each for each in grid.variants if each.method == SOURCE), None)
    base = seconds_an_image(grid, source) if source else 0.0
    if not base:
        return None
    lines = _points(grid, lambda variant: seconds_an_image(grid, variant) / base, styles)
    label = "time an image, in times that of source"
    return _scatter("error-cost", "Error against cost", label, "log", lines, grid)


def _points(
    grid: Grid, measure: Callable[[Variant], float], styles: dict[str, int]
) -> tuple[Line, ...]:
    """One point a line of the table."""
    means = {each: mean for each in grid.variants if (mean := grid.mean(each)) is not None}
    names = labels(list(means))
    return tuple(
        _curve(names[each], _style(each, styles, means), [(measure(each), mean)])
        for each, mean in means.items()
    )


def _scatter(
    name: str, title: str, label: str, scale: Scale, lines: tuple[Line, ...], grid: Grid
) -> Plot | None:
    if len({line.x for line in lines}) < 2:  # nothing to hold the error against
        return None
    return Plot(name, title, _caption(grid), label, (Panel(ERROR, lines),), scale)


def _entropy(grid: Grid, styles: dict[str, int]) -> Plot | None:
    """The predictions' entropy as the stream goes on, averaged over corruptions and seeds."""
    names = labels(grid.variants)
    lines = []
    for variant in grid.variants:
        streams = [row.outcome.entropy_stream for row in grid.of(variant)]
        length = min(map(len, streams), default=0)
        batches = list(zip(*(stream[:length] for stream in streams), strict=True))
        values = tuple(statistics.fmean(batch) for batch in batches)
        if length > 1 and all(map(math.isfinite, values)):
            steps = tuple(float(at) for at in range(1, length + 1))
            lines.append(
                Line(names[variant], _style(variant, styles, grid.variants), steps, values)
            )
    if not lines:
        return None
    panels = (Panel("entropy [nats]", tuple(lines)),)
    return Plot("entropy", "Entropy over the stream", _caption(grid), "batch", panels)


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
    from ttapca.corruptions.registry import find

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


def _caption(grid: Grid, *, batch: bool = True) -> str:
    place = grid.place if batch else replace(grid.place, batch_size=0)
    title = title_of(place) if batch else title_of(place).replace("batches of 0, ", "")
    count, seeds = len(grid.corruptions), len(grid.seeds)
    over = f"Mean over {count} corruptions" if count > 1 else full_name(grid.corruptions[0])
    spread = f"; bars: standard deviation over {seeds} seeds" if seeds > 1 else ""
    return f"{title}. {over}{spread}."
