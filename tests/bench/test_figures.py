from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from synthetic_rows import cell, error, everything, failed, observations, paper_grid, row, sweeps
from ttapca.bench.drawing import DASHES, MARKERS, PALETTE, draw
from ttapca.bench.figures import figures
from ttapca.bench.places import Spread
from ttapca.bench.plots import Line, Panel, Plot
from ttapca.corruptions import STANDARD


def by_kind(plots: list[Plot]) -> dict[str, Plot]:
    return {re.sub(r"-\d+$", "", plot.name): plot for plot in plots}


def test_a_figure_is_there_when_the_rows_carry_it() -> None:
    assert figures([]) == []
    assert len(figures([], observations())) == 2  # spectra need no rows
    assert set(by_kind(figures(paper_grid()))) == {"error-parameters", "error-cost", "entropy"}
    assert figures([row(cell("bn", "fog", images=200))]) == []  # one point, one batch
    assert set(by_kind(figures(everything(), observations()))) == {
        "error-components",
        "error-steps",
        "error-batch",
        "error-parameters",
        "error-cost",
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
    plot = by_kind(figures(sweeps()))["error-components"]
    lines = {line.name: line for line in plot.panels[0].lines}
    assert set(lines) == {"bn", "tent", "ttapca-relu", "ttapca-exp"}
    line = lines["ttapca-exp"]
    assert line.x == (50, 200, 1000, 2000)
    for rank, mean, spread in zip(line.x, line.y, line.spread, strict=True):
        expected = mean_over(3, method="ttapca-exp", components=int(rank))
        assert mean == pytest.approx(expected.mean)
        assert spread == pytest.approx(expected.deviation)
    assert lines["tent"].x == ()  # a level
    assert lines["tent"].y[0] == pytest.approx(mean_over(3, method="tent").mean)


def test_error_against_steps_and_batch_size() -> None:
    plots = by_kind(figures(sweeps()))
    steps = {line.name: line for line in plots["error-steps"].panels[0].lines}
    assert steps["tent"].x == (1, 3, 10)
    expected = mean_over(3, method="tent", steps=10, setting="online")
    assert steps["tent"].y[-1] == pytest.approx(expected.mean)
    sizes = {line.name: line for line in plots["error-batch"].panels[0].lines}
    assert sizes["bn"].x == (16, 50, 200, 500)
    assert sizes["bn"].y[0] == pytest.approx(mean_over(3, method="bn", batch_size=16).mean)


def test_batch_sizes_are_compared_on_the_corruptions_that_all_have() -> None:
    rows = [
        row(cell("bn", "fog", batch_size=50), error=30.0),
        row(cell("bn", "fog"), error=20.0),
        row(cell("bn", "snow"), error=90.0),
    ]
    (line,) = by_kind(figures(rows))["error-batch"].panels[0].lines
    assert (line.x, line.y) == ((50, 200), (30.0, 20.0))
    assert "error-batch" not in by_kind(figures([rows[0], rows[2]]))


def test_points_that_lack_a_corruption_are_left_out() -> None:
    gone = cell("ttapca-exp", STANDARD[0], components=200, seed=0, images=600)
    rows = [each for each in sweeps() if each.cell.seed == 0]
    rows = [failed(each.cell) if each.cell == gone else each for each in rows]
    plot = by_kind(figures(rows))["error-components"]
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
