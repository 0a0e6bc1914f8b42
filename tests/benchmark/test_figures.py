from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmark.synthetic_rows import (
    cell,
    error,
    everything,
    failed,
    observations,
    paper_grid,
    row,
    sweeps,
)
from ttapca.benchmark import Results
from ttapca.benchmark.curves import APART
from ttapca.benchmark.drawing import draw, draw_file
from ttapca.benchmark.figures import figures
from ttapca.benchmark.labelled_scatter import spaced
from ttapca.benchmark.palette import DASHES, MARKERS, PALETTE, look
from ttapca.benchmark.plots import Line, Panel, Plot
from ttapca.benchmark.row_groups import Spread
from ttapca.benchmark.scatters import break_above
from ttapca.cli import app as command_line
from ttapca.corruptions import STANDARD


def by_kind(plots: list[Plot]) -> dict[str, Plot]:
    """By name; of several figures of a kind the first has the name alone."""
    return {plot.name: plot for plot in plots}


def test_a_figure_is_there_when_the_rows_carry_it() -> None:
    assert figures([]) == []
    assert len(figures([], observations())) == 2  # spectra need no rows
    assert set(by_kind(figures(paper_grid()))) == {"parameters", "cost", "entropy"}
    assert figures([row(cell("bn", "fog", images=200))]) == []  # one point, one batch
    assert set(by_kind(figures(everything(), observations()))) == {
        "rank",
        "steps",
        "batch",
        "parameters",
        "cost",
        "entropy",
        "spectrum-gaussian_noise",
        "spectrum-defocus_blur",
    }


def mean_over(seeds: int, **changes: object) -> Spread:
    """What a point of a sweep must be: the mean over two corruptions, spread over seeds."""
    method = str(changes.pop("method"))
    return Spread.of(
        [
            sum(error(cell(method, name, seed=seed, **changes)) for name in STANDARD[:2]) / 2
            for seed in range(seeds)
        ]
    )


def test_error_against_rank_is_the_mean_over_corruptions_with_spread_over_seeds() -> None:
    plot = by_kind(figures(sweeps()))["rank"]
    lines = {line.name: line for line in plot.panels[0].lines}
    assert set(lines) == {"bn", "tent", "ttapca-relu", "ttapca-exp"}
    line = lines["ttapca-exp"]
    assert line.x == (50, 200, 1000, 2000)
    for rank, mean, spread in zip(line.x, line.y, line.spread, strict=True):
        expected = mean_over(3, method="ttapca-exp", components=int(rank))
        assert mean == pytest.approx(expected.mean)
        assert spread == pytest.approx(expected.deviation)
    assert lines["tent"].x == ()  # a level
    expected = mean_over(3, method="tent")
    assert lines["tent"].y == pytest.approx((expected.mean,))
    assert lines["tent"].spread == pytest.approx((expected.deviation,))


def test_error_against_steps_and_batch_size() -> None:
    plots = by_kind(figures(sweeps()))
    steps = {line.name: line for line in plots["steps"].panels[0].lines}
    assert steps["tent"].x == (1, 3, 10)
    expected = mean_over(3, method="tent", steps=10, setting="online")
    assert steps["tent"].y[-1] == pytest.approx(expected.mean)
    sizes = {line.name: line for line in plots["batch"].panels[0].lines}
    assert sizes["bn"].x == (16, 50, 200, 500)
    assert sizes["bn"].y[0] == pytest.approx(mean_over(3, method="bn", batch_size=16).mean)


def test_batch_sizes_are_compared_on_the_corruptions_that_all_have() -> None:
    rows = [
        row(cell("bn", "fog", batch_size=50), error=30.0),
        row(cell("bn", "fog"), error=20.0),
        row(cell("bn", "snow"), error=90.0),
    ]
    (line,) = by_kind(figures(rows))["batch"].panels[0].lines
    assert (line.x, line.y) == ((50, 200), (30.0, 20.0))
    assert "batch" not in by_kind(figures([rows[0], rows[2]]))


def test_points_that_lack_a_corruption_are_left_out() -> None:
    gone = cell("ttapca-exp", STANDARD[0], components=200, seed=0, images=600)
    rows = [each for each in sweeps() if each.cell.seed == 0]
    rows = [failed(each.cell) if each.cell == gone else each for each in rows]
    plot = by_kind(figures(rows))["rank"]
    line = next(each for each in plot.panels[0].lines if each.name == "ttapca-exp")
    assert line.x == (50, 1000, 2000)


def test_entropy_is_averaged_batch_by_batch() -> None:
    rows = [
        row(cell("bn", "fog"), entropy_stream=(1.0, 2.0, 3.0)),
        row(cell("bn", "snow"), entropy_stream=(3.0, 4.0)),
    ]
    (line,) = by_kind(figures(rows))["entropy"].panels[0].lines
    assert (line.x, line.y) == ((1, 2), (2.0, 3.0))


def test_spectra_are_thinned_but_keep_their_ends() -> None:
    seen = observations()[0]
    plot = by_kind(figures(everything(), observations()))["spectrum-gaussian_noise"]
    source, stream = plot.panels[0].lines
    assert (source.y[0], source.y[-1]) == (seen.source_spectrum[0], seen.source_spectrum[-1])
    assert stream.y[-1] == seen.test_spectrum[-1]
    assert len(source.x) < 200
    assert [line.name for line in plot.panels[1].lines] == [
        "gain of ttapca-relu",
        "gain of ttapca-exp",
    ]


def test_a_sweep_is_one_point_where_methods_are_compared() -> None:
    """Thirteen lines of a rank sweep are three methods; the paper's rank stands for the others."""
    rows = [each for each in sweeps() if each.cell.setting == "episodic"]
    rows = [each for each in rows if each.cell.batch_size == 200]
    plots = by_kind(figures(rows))
    for name in ("parameters", "entropy"):
        lines = plots[name].panels[0].lines
        assert [line.name for line in lines] == [
            "source",
            "bn",
            "tent",
            "ttapca-relu",
            "ttapca-exp",
        ]
        assert plots[name].caption.endswith("those nearest to the paper's 2,000 and 1.")
    line = plots["parameters"].panels[0].lines[-1]
    assert line.y == pytest.approx((mean_over(3, method="ttapca-exp", components=2000).mean,))


def test_variants_of_several_methods_look_different() -> None:
    rows = [
        row(cell(method, "fog", options=options))
        for method in ("tent", "ttapca-exp", "ttapca-relu")
        for options in ("{}", '{"logits": "after"}', '{"logits": "before"}')
    ]
    lines = by_kind(figures(rows))["parameters"].panels[0].lines
    assert len({line.style for line in lines}) == len(lines) == 9


def test_the_second_figure_of_a_kind_has_a_name_of_its_own() -> None:
    other = [
        dataclasses.replace(each, cell=dataclasses.replace(each.cell, data="cifar100"))
        for each in paper_grid()
    ]
    names = [plot.name for plot in figures([*paper_grid(), *other])]
    assert names == ["parameters", "parameters-2", "cost", "cost-2", "entropy", "entropy-2"]


def test_cost_is_in_milliseconds_where_source_was_not_run() -> None:
    rows = [row(cell(name, "fog")) for name in ("source", "bn", "tent")]
    for kept, label, bn in (
        (rows, "time an image (source = 1)", 0.42 / 0.4),
        (rows[1:], "milliseconds an image", 0.42),
    ):
        plot = by_kind(figures(kept))["cost"]
        assert plot.label == label
        line = next(each for each in plot.panels[0].lines if each.name == "bn")
        assert line.x == pytest.approx((bn,))


@pytest.mark.parametrize(
    ("values", "cut"),
    [
        ((49.6, 31.0, 30.9, 24.8), 40.3),
        ((53.2, 49.6, 48.4, 31.0, 30.8, 24.8), (48.4 + 31.0) / 2),
        ((30.0, 29.8, 29.5), None),  # near one another: a small gap is not made a large one
        ((50.0, 20.0), None),  # nothing to tell apart below
        ((31.0, 31.0, 31.0, 20.0, 20.1), None),  # most lie above
        ((40.0, 30.0, 20.0, 10.0), None),
        ((), None),
    ],
)
def test_an_axis_is_broken_below_what_squeezes_the_rest(
    values: tuple[float, ...], cut: float | None
) -> None:
    assert break_above(values) == (None if cut is None else pytest.approx(cut))


def test_source_far_above_stands_beyond_a_break_that_is_told() -> None:
    plot = by_kind(figures(paper_grid()))["cost"]
    (panel,) = plot.panels
    assert panel.cut is not None
    assert [line.name for line in panel.lines if line.y[0] > panel.cut] == ["source"]
    assert plot.caption.endswith("The vertical axis is broken.")
    near = [each for each in paper_grid() if each.cell.method != "source"]
    plot = by_kind(figures(near))["cost"]
    assert plot.panels[0].cut is None
    assert "broken" not in plot.caption


@pytest.mark.parametrize("wanted", [(), (3.0,), (1.0, 1.0, 1.0), (0.0, 0.1, 5.0, 9.9, 10.0, 10.0)])
def test_names_are_moved_apart_and_kept_in_order(wanted: tuple[float, ...]) -> None:
    found = spaced(wanted, 1.0, 0.0, 10.0)
    assert all(two - one >= 1.0 - 1e-9 for one, two in itertools.pairwise(found))
    assert all(0.0 <= each <= 10.0 for each in found)
    assert len(found) == len(wanted)


def test_names_that_have_room_stay_and_the_others_move_least() -> None:
    assert spaced((0.0, 2.0, 7.0), 1.0, 0.0, 10.0) == [0.0, 2.0, 7.0]
    wanted = (4.0, 4.2, 4.3)
    places = [at / 20 for at in range(40, 141)]
    best = min(
        (
            trial
            for trial in itertools.combinations(places, 3)
            if trial[1] - trial[0] >= 0.999 and trial[2] - trial[1] >= 0.999
        ),
        key=lambda trial: sum((a - b) ** 2 for a, b in zip(trial, wanted, strict=True)),
    )
    assert spaced(wanted, 1.0, 0.0, 10.0) == pytest.approx(best, abs=0.05)


def test_every_method_is_named_with_its_value_and_no_two_names_touch() -> None:
    plot = by_kind(figures(paper_grid()))["cost"]
    svg = draw(plot)
    heights = []
    for line in plot.panels[0].lines:
        text = f"{line.y[0]:.1f}\u2002{line.name}</text>"
        (height,) = re.findall(rf'<text [^>]*y="([\d.]+)"[^>]*>{re.escape(text)}', svg)
        heights.append(float(height))
    rows = sorted(heights)
    assert all(two - one >= 9 for one, two in itertools.pairwise(rows))  # a letter is 9 high
    order = sorted(plot.panels[0].lines, key=lambda line: line.y, reverse=True)
    by_height = sorted(zip(heights, plot.panels[0].lines, strict=True), key=lambda pair: pair[0])
    assert [line.name for _, line in by_height] == [line.name for line in order]


def test_a_level_has_its_spread_as_a_band() -> None:
    curve = Line("b", 1, (1.0, 2.0), (18.0, 22.0))
    level = Line("tent", 0, (), (20.0,), (0.5,))

    def bands(*lines: Line) -> list[str]:
        svg = draw(Plot("p", "t", "", "x", (Panel("y", lines),)))
        return re.findall(r'd="([^"]*)"[^>]*style="fill: var\(--series-0[^"]*opacity', svg)

    assert bands(curve, dataclasses.replace(level, spread=())) == []
    (one,) = bands(curve, level)
    (two,) = bands(curve, dataclasses.replace(level, spread=(1.0,)))
    heights = []
    for path in (one, two):
        levels = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", path)]
        heights.append(max(levels) - min(levels))
    assert heights[1] == pytest.approx(2 * heights[0])


def test_spreads_stand_side_by_side_and_inside() -> None:
    lines = [Line(name, at, (1.0, 2.0), (21.0, 21.0), (3.0, 3.0)) for at, name in enumerate("ab")]
    svg = draw(Plot("p", "t", "", "x", (Panel("y", tuple(lines)),)))
    bars = re.findall(
        r'id="p-LineCollection_\d+">\s*<path d="M ([\d.]+) ([\d.]+)\s*L [\d.]+ ([\d.]+)', svg
    )
    assert float(bars[1][0]) - float(bars[0][0]) == pytest.approx(APART)
    (y, height), *_ = re.findall(
        r'<rect x="[^"]*" y="([\d.]+)" width="[^"]*" height="([^"]*)"', svg
    )
    bottom, top = (float(each) for each in bars[0][1:])
    assert float(y) < top < bottom < float(y) + float(height)


def test_a_file_has_a_size_and_its_own_colours() -> None:
    plot = by_kind(figures(sweeps()))["rank"]
    svg = draw_file(plot)
    root = ET.fromstring(svg)
    assert float(root.get("width", "").removesuffix("pt")) > 300
    assert root.find("{*}desc").text == plot.caption
    used = set(re.findall(r"var\((--[a-z0-9-]+)", svg))
    light, dark = svg.split("@media (prefers-color-scheme: dark)")
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark or name == "--figure-font"


def test_the_command_writes_one_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.sqlite"
    with Results(results) as file:
        file.add(sweeps())
    plots = by_kind(figures(sweeps()))
    assert command_line.run(["figure", str(results)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == list(plots)
    target = tmp_path / "rank.svg"
    assert command_line.run(["figure", str(results), "rank", "--to", str(target)]) == 0
    assert target.read_text() == draw_file(plots["rank"])
    assert command_line.run(["figure", str(results), "rnak"]) == 2
    assert "and not `rnak`. Did you mean `rank`?" in capsys.readouterr().err


def test_a_method_looks_the_same_in_every_figure() -> None:
    styles: dict[str, set[int]] = {}
    for plot in figures(everything()):
        for line in plot.panels[0].lines:
            styles.setdefault(line.name, set()).add(line.style)
    assert all(len(found) == 1 for found in styles.values())
    assert len({next(iter(found)) for found in styles.values()}) == len(styles)


def test_styles_differ_without_colour() -> None:
    assert len(set(MARKERS)) == len(MARKERS) > len(PALETTE)
    looks = {(MARKERS[at % len(MARKERS)], DASHES[at % len(DASHES)]) for at in range(15)}
    assert len(looks) == 15
    points = {(look(at)["marker"], look(at)["fillstyle"]) for at in range(2 * len(MARKERS))}
    assert len(points) == 2 * len(MARKERS)


def test_the_drawing_is_whole_repeatable_and_takes_the_pages_colours() -> None:
    plots = figures(everything(), observations())
    ids: list[str] = []
    for plot in plots:
        svg = draw(plot)
        ET.fromstring(svg)
        assert "currentColor" in svg
        assert "var(--series-" in svg
        assert "#0a0b" not in svg  # no mark is left behind
        assert "#000000" not in svg
        assert "#ffffff" not in svg
        assert "metadata" not in svg
        assert "mathdefault" not in svg
        found = re.findall(r'\bid="([^"]+)"', svg)
        ids += found
        referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
        assert referred <= set(found)
    assert len(ids) == len(set(ids))
    assert svg == draw(plot)


def test_names_are_escaped_and_read_as_words() -> None:
    line = Line("<b>$x$ & y", 0, (1.0, 2.0), (1.0, 2.0))
    svg = draw(Plot("p", '"><script>', "", "x", (Panel("y", (line,)),)))
    assert "<script>" not in svg
    assert "&lt;b&gt;$x$ &amp; y" in svg
