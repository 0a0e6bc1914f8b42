from __future__ import annotations

import re
import statistics
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmark.synthetic_rows import (
    METHODS,
    cell,
    error,
    everything,
    failed,
    half_width,
    observations,
    paper_grid,
    row,
    sweeps,
    with_bits,
    wrong,
)
from ttapca.benchmark import Row
from ttapca.benchmark.comparisons import comparisons, shown_observations
from ttapca.benchmark.figures import ReportFigure, figures
from ttapca.benchmark.svg import COLOURED, MARKERS, PALETTE, file_svg, look, page_svg, styles_of
from ttapca.corruptions import STANDARD
from ttapca.methods import METHODS as REGISTERED


def by_name(*given: Any) -> dict[str, ReportFigure]:
    return {figure.name: figure for figure in figures(*given)}


def curves(figure: ReportFigure, panel: int = 0) -> dict[str, Any]:
    """By label: what was drawn."""
    handles, names = figure.drawing.axes[panel].get_legend_handles_labels()
    return dict(zip(names, handles, strict=True))


def points(curve: Any) -> tuple[list[float], list[float]]:
    line = curve[0] if isinstance(curve, tuple) else curve
    return list(line.get_xdata()), list(line.get_ydata())


def spreads(curve: Any) -> list[float]:
    return [float(np.ptp(bar[:, 1])) / 2 for bar in curve[2][0].get_segments()]


def at_the_side(figure: ReportFigure) -> list[str]:
    """What the legend of a figure with one point for each method says, from top to bottom."""
    return [text.get_text() for text in figure.drawing.legends[0].get_texts()]


def over_seeds(method: str, **changes: object) -> list[float]:
    """The mean over two corruptions, for each seed."""
    return [
        statistics.fmean(error(cell(method, name, seed=s, **changes)) for name in STANDARD[:2])
        for s in range(3)
    ]


def test_a_figure_is_drawn_where_there_are_results_for_it() -> None:
    assert figures([]) == []
    assert len(figures([], observations())) == 2  # spectra need no rows
    assert list(by_name(paper_grid())) == ["parameters", "cost", "entropy"]
    assert figures([row(cell("bn", "fog", images=200))]) == []  # one point, one batch
    assert list(by_name(everything(), observations())) == [
        "rank", "steps", "batch", "parameters", "cost", "entropy",
        "spectrum-gaussian_noise", "spectrum-defocus_blur",
    ]  # fmt: skip
    other = [Row(replace(r.cell, data="cifar100"), r.outcome) for r in paper_grid()]
    names = [figure.name for figure in figures([*paper_grid(), *other])]
    assert names == ["parameters", "parameters-2", "cost", "cost-2", "entropy", "entropy-2"]


@pytest.mark.parametrize(
    ("name", "method", "option", "values", "changes"),
    [
        ("rank", "ttapca-exp", "components", (50, 200, 1000, 2000), {}),
        ("steps", "tent", "steps", (1, 3, 10), {"setting": "online"}),
        ("batch", "bn", "batch_size", (16, 50, 200, 500), {}),
    ],
)
def test_curves_are_means_over_corruptions_with_the_spread_over_seeds(
    name: str, method: str, option: str, values: tuple[int, ...], changes: dict[str, Any]
) -> None:
    curve = curves(by_name(sweeps())[name])[method]
    x, y = points(curve)
    expected = [over_seeds(method, **changes, **{option: value}) for value in values]
    assert x == pytest.approx(values, rel=0.1)  # bars stand side by side
    assert y == pytest.approx([statistics.fmean(each) for each in expected])
    assert spreads(curve) == pytest.approx([statistics.stdev(each) for each in expected])


def test_a_method_without_the_option_is_a_level_with_a_band() -> None:
    figure = by_name(sweeps())["rank"]
    drawn = curves(figure)
    assert set(drawn) == {"bn", "tent", "ttapca-relu", "ttapca-exp"}
    expected = over_seeds("tent")
    mean, deviation = statistics.fmean(expected), statistics.stdev(expected)
    assert points(drawn["tent"]) == ([0, 1], pytest.approx([mean, mean]))
    boxes = [patch.get_bbox() for patch in figure.drawing.axes[0].patches]
    bands = [(box.y0, box.y1) for box in boxes]
    assert pytest.approx((mean - deviation, mean + deviation)) in bands
    assert figure.caption.endswith("bars and bands: standard deviation over 3 seeds.")
    # A point that lacks a corruption is left out.
    gone = cell("ttapca-exp", STANDARD[0], components=200, seed=0, images=600)
    rows = [failed(each.cell) if each.cell == gone else each for each in sweeps()]
    first = by_name([each for each in rows if each.cell.seed == 0])["rank"]
    assert points(curves(first)["ttapca-exp"])[0] == [50, 1000, 2000]


def test_curves_are_over_what_all_points_have() -> None:
    rows = [
        row(cell("bn", "fog", batch_size=50), error=30.0, entropy_stream=(1.0, 2.0, 3.0)),
        row(cell("bn", "fog"), error=20.0, entropy_stream=(1.0, 2.0, 3.0)),
        row(cell("bn", "snow"), error=90.0, entropy_stream=(3.0, 4.0)),
        row(cell("tent", "fog"), entropy_stream=(1.0, float("nan"))),
    ]
    found = by_name(rows)
    assert points(curves(found["batch"])["bn"]) == ([50, 200], [30.0, 20.0])
    assert "batches" not in found["batch"].caption
    assert "batch" not in by_name([rows[0], rows[2]])
    drawn = {name: points(curve) for name, curve in curves(found["entropy"]).items()}
    assert drawn == {"bn": ([1, 2], [2.0, 3.0])}


def test_spectra_are_thinned_but_keep_their_ends() -> None:
    seen = observations()[0]
    figure = by_name(everything(), observations())["spectrum-gaussian_noise"]
    drawn = curves(figure)
    x, y = points(drawn["source data"])
    assert (y[0], y[-1]) == (seen.source_spectrum[0], seen.source_spectrum[-1])
    assert len(x) < 200
    assert points(drawn["this stream"])[1][-1] == seen.test_spectrum[-1]
    assert list(curves(figure, 1)) == ["gain of ttapca-relu", "gain of ttapca-exp"]
    empty = replace(seen, source_spectrum=(), test_spectrum=(), gains=())
    assert figures([], [empty]) == []


def test_a_title_names_the_setting_where_there_are_several() -> None:
    rows = [row(cell("bn", setting=name, batch_size=size)) for name in ("online", "changing")
            for size in (50, 200)]  # fmt: skip
    titles = {name: figure.title for name, figure in by_name(rows).items()}
    assert titles["batch"] == "Error against batch size, online"
    assert titles["batch-2"] == "Error against batch size, changing"
    assert by_name(rows[:2])["batch"].title == "Error against batch size"


def test_a_sweep_is_one_point_where_methods_are_compared() -> None:
    rows = [each for each in sweeps() if each.cell.setting == "episodic"]
    found = by_name([each for each in rows if each.cell.batch_size == 200])
    order = sorted(METHODS, key=lambda name: -statistics.fmean(over_seeds(name)))
    expected = [over_seeds(name) for name in order]
    assert at_the_side(found["parameters"]) == [
        f"{statistics.fmean(e):.1f} ±{statistics.stdev(e):.1f}\u2002{name}"
        for name, e in zip(order, expected, strict=True)
    ]
    assert list(curves(found["entropy"])) == list(METHODS)
    for name in ("parameters", "entropy"):
        assert found[name].caption.endswith("2,000 components and 1 step is shown.")


def test_cost_is_a_multiple_of_source_where_source_was_run() -> None:
    (axes,) = by_name(paper_grid())["cost"].drawing.axes
    assert axes.get_xlabel() == "time per sample (source = 1)"
    assert len(axes.containers) == len(METHODS)
    assert [pytest.approx(0.42 / 0.4)] in [points(each)[0] for each in axes.containers]
    others = [each for each in paper_grid() if each.cell.method != "source"]
    (axes,) = by_name(others)["cost"].drawing.axes
    assert axes.get_xlabel() == "milliseconds per sample"
    assert [pytest.approx(0.42)] in [points(each)[0] for each in axes.containers]


def test_all_points_and_bars_lie_within_the_axes() -> None:
    for rows in (paper_grid(), with_bits(paper_grid(images=100))):
        for name in ("parameters", "cost"):
            (axes,) = by_name(rows)[name].drawing.axes
            low, high = axes.get_ylim()
            for line, _, bars in axes.containers:
                assert low < min(line.get_ydata()) <= max(line.get_ydata()) < high
                ends = [end for bar in bars for end in bar.get_segments()[0][:, 1]]
                assert all(low < end < high for end in ends)


def test_corruptions_are_shown_in_which_methods_differ_most() -> None:
    def differ(gaps: dict[str, float]) -> list[Row]:
        return [
            row(cell(method, name), error=20.0 + gap * (method == "ttapca-exp") - far)
            for name, gap in gaps.items()
            for method, far in (("source", 15.0), ("bn", 0.0), ("ttapca-exp", 0.0))
        ]

    first = observations()[0]
    names = ("gaussian_noise", "shot_noise", "impulse_noise", "fog", "snow")
    seen = [replace(first, cell=cell("ttapca-exp", name)) for name in names]
    gaps = {
        "gaussian_noise": 1.0,
        "shot_noise": -4.0,
        "impulse_noise": 3.0,
        "fog": 2.0,
        "snow": 0.0,
    }
    assert list(shown_observations(seen, comparisons(differ(gaps)))) == ["shot_noise", "fog"]
    assert list(shown_observations(seen, [])) == ["gaussian_noise", "snow"]  # the first of each
    assert shown_observations([], []) == {}
    clean = replace(first, cell=cell("ttapca-exp", "clean"))
    assert list(shown_observations([clean, clean, seen[3]], [])) == ["fog"]


def test_lines_look_different_and_a_method_the_same_in_every_figure() -> None:
    styles = styles_of(METHODS)
    assert styles_of(["yours", *reversed(METHODS)]) == {**styles, "yours": len(styles)}
    assert set(styles) == set(REGISTERED)
    assert len({look(styles[name])["color"] for name in COLOURED}) == len(COLOURED) == len(PALETTE)
    looks = [look(number) for number in range(2 * len(MARKERS))]
    assert len({(each["marker"], each["fillstyle"]) for each in looks}) == len(looks)
    assert len({(each["marker"], each["linestyle"]) for each in looks[:15]}) == 15
    found = by_name(everything())
    for name in ("rank", "steps", "batch", "entropy"):
        for label, curve in curves(found[name]).items():
            line = curve[0] if isinstance(curve, tuple) else curve
            assert line.get_color() == look(styles[label])["color"]
    rows = [
        row(cell(method, "fog", options=options))
        for method in ("tent", "ttapca-exp", "ttapca-relu")
        for options in ("{}", '{"logits": "after"}', '{"logits": "before"}')
    ]
    axes = by_name(rows)["parameters"].drawing.axes[0]
    assert len({(each[0].get_color(), each[0].get_marker()) for each in axes.containers}) == 9


def test_the_svg_is_whole_repeatable_and_takes_the_pages_colours() -> None:
    ids: list[str] = []
    for figure in figures(everything(), observations()):
        svg = page_svg(figure)
        ET.fromstring(svg)
        assert "currentColor" in svg
        assert "var(--series-" in svg
        for foreign in ("#000000", "#ffffff", "metadata", "mathdefault"):
            assert foreign not in svg
        found = re.findall(r'\bid="([^"]+)"', svg)
        ids += found
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)) <= set(found)
    assert len(ids) == len(set(ids))
    assert svg == page_svg(figure)


def test_a_file_has_a_size_and_its_own_colours() -> None:
    figure = by_name(sweeps())["rank"]
    svg = file_svg(figure)
    root = ET.fromstring(svg)
    assert float(root.get("width", "").removesuffix("pt")) > 300
    assert root.find("{*}desc").text == figure.caption
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    for name in set(re.findall(r"var\((--[a-z0-9-]+)", svg)):
        assert f"{name}:" in light
        assert f"{name}:" in dark or name == "--figure-font"


def test_words_are_escaped_and_not_read_as_mathematics() -> None:
    rows = [row(cell("bn", "fog", options=f'{{"a": "<b>$x$ & {each}"}}')) for each in "yz"]
    figure = by_name([*rows, row(cell("tent", "fog"))])["parameters"]
    svg = page_svg(replace(figure, title='"><script>'))
    assert "<script>" not in svg
    assert "&lt;b&gt;$x$ &amp; y" in svg


def test_figures_draw_the_interval_of_the_images() -> None:
    rows = with_bits([each for each in sweeps() if each.cell.setting == "episodic"])
    drawn = by_name(rows)
    for name in ("rank", "cost"):
        assert "95 % interval over samples" in drawn[name].caption
        assert "standard deviation" not in drawn[name].caption
    widths = []
    for components in (50, 200, 1000, 2000):
        wanted = ("ttapca-exp", components, 200)
        cells = [(each.cell.method, each.cell.components, each.cell.batch_size) for each in rows]
        own = [wrong(each) for each, cell in zip(rows, cells, strict=True) if cell == wanted]
        assert len(own) == 6  # two corruptions, three seeds
        widths.append(half_width(np.mean(own, axis=0)))
    assert spreads(curves(drawn["rank"])["ttapca-exp"]) == pytest.approx(widths)
