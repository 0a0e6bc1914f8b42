"""What tables, headline, figures and page say about the certainty of errors."""

from __future__ import annotations

import dataclasses
import io
import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from scipy import stats

from benchmark.synthetic_rows import METHODS, cell, failed, paper_grid, row, sweeps, with_bits
from ttapca.benchmark import frame
from ttapca.benchmark.cells import CLEAN, Row
from ttapca.benchmark.comparisons import Comparison, comparisons
from ttapca.benchmark.difference_table import difference_table
from ttapca.benchmark.exports import export
from ttapca.benchmark.figures import figures
from ttapca.benchmark.headline import NOT_TESTED, headline
from ttapca.benchmark.paper_tables import paper_tables
from ttapca.benchmark.report_page import report
from ttapca.benchmark.tables import (
    INTERVAL,
    NO_INTERVALS,
    ResultTable,
    error_table,
    error_tables,
    setting_tables,
)
from ttapca.cli.terminal_tables import print_table

NAMES = ("fog", "snow")


def wrong(each: Row) -> NDArray[np.float64]:
    """100 for each image that was predicted wrong, in the order of the images."""
    bits = [int(bit) for byte in each.outcome.correct for bit in f"{byte:08b}"]
    return 100.0 - 100.0 * np.array(bits[: each.cell.images])


def half_width(values: NDArray[np.float64]) -> float:
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return float(high - low) / 2


def grid(errors: dict[str, float], seeds: int = 1, noise: float = 0.5, **changes: int) -> list[Row]:
    """Methods with given errors on two corruptions."""
    cells = itertools.product(errors, NAMES, range(seeds))
    return with_bits(
        [
            row(cell(method, name, seed=seed, **changes), error=errors[method])
            for method, name, seed in cells
        ],
        noise,
    )


def column(table: ResultTable, name: str) -> dict[str, str]:
    at = table.columns.index(name)
    return {line[0].text: line[at].text for line in table.rows}


def bold(table: ResultTable, name: str) -> set[str]:
    at = table.columns.index(name)
    return {line[0].text for line in table.rows if line[at].best}


def one(rows: list[Row]) -> Comparison:
    (found,) = comparisons(rows)
    return found


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_mean_has_the_interval_of_the_images_not_of_the_seeds(seeds: int) -> None:
    rows = grid({"bn": 21.0, "tent": 24.0}, seeds)
    (table,) = error_tables(rows)
    for method in ("bn", "tent"):
        own = [wrong(each) for each in rows if each.cell.method == method]
        values = np.mean(own, axis=0)  # corruptions and seeds first, then the images
        expected = f"{values.mean():.1f} ±{half_width(values):.1f}"
        assert column(table, "Mean of 2")[method] == expected
        assert column(table, "Fog")[method] == f"{values.mean():.1f}"  # too many columns for it
    widths = [half_width(wrong(each)) for each in rows]
    if seeds == 1:
        assert f"at most ±{max(widths):.1f} for a single corruption." in table.notes[1]
    else:
        assert "seeds 0, 1, 2: mean; corrupted" in table.notes[0]
        assert "standard deviation over seeds at most 0.0" in table.notes[1]
    at = table.columns.index("Fog")
    assert all("95 % interval over images: " in line[at].note for line in table.rows)


def test_a_single_corruption_shows_its_interval() -> None:
    rows = [each for each in grid({"bn": 21.0, "tent": 30.0}) if each.cell.corruption == "fog"]
    (table,) = error_tables(rows)
    assert table.columns == ("method", "Fog", "rank")
    assert column(table, "Fog")["bn"] == f"21.0 ±{half_width(wrong(rows[0])):.1f}"
    (alone,) = error_tables(rows[:1])
    assert alone.columns == ("method", "Fog")
    assert not alone.rows[0][1].best


def test_methods_that_are_not_told_apart_share_rank_and_bold() -> None:
    rows = grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0})
    (table,) = error_tables(rows)
    assert column(table, "rank") == {"source": "4", "bn": "1", "tent": "1", "ttapca-exp": "3"}
    assert bold(table, "Mean of 2") == bold(table, "Fog") == {"bn", "tent"}
    assert "Holm" in table.notes[2]
    # The same small difference, on images that are almost the same for both.
    (sure,) = error_tables(grid({"bn": 21.5, "tent": 20.5}, noise=0.0))
    assert column(sure, "rank") == {"bn": "2", "tent": "1"}
    assert bold(sure, "Mean of 2") == {"tent"}


def test_a_line_that_lacks_a_corruption_has_no_rank() -> None:
    rows = grid({"bn": 21.0, "tent": 40.0})
    rows[0] = failed(rows[0].cell)
    (table,) = error_tables([*rows, row(cell("source", "fog"), error=9.0)])
    assert "rank" not in table.columns  # one line is left, and another has no bits
    only_unranked = [row(cell("source", "fog"), error=9.0), row(cell("ttapca-exp", "snow"))]
    (table,) = error_tables([*grid({"bn": 21.0, "tent": 40.0}), *only_unranked])
    assert column(table, "rank") == {"bn": "1", "tent": "2", "source": "—", "ttapca-exp": "—"}
    assert table.notes[1] == f"{INTERVAL}."
    rows = grid({"bn": 21.0, "tent": 40.0, "source": 50.0})
    rows[0] = failed(rows[0].cell)
    (table,) = error_tables(rows)
    assert column(table, "rank") == {"bn": "—", "tent": "1", "source": "2"}
    assert column(table, "Mean of 2")["bn"] == "21.0 (1/2)"
    assert bold(table, "Snow") == {"bn"}


def test_rows_of_before_are_shown_as_before_with_a_note() -> None:
    rows = grid({"bn": 21.0, "tent": 40.0}, seeds=2)
    known = frame(rows)
    old = dataclasses.replace(rows[0], outcome=dataclasses.replace(rows[0].outcome, correct=b""))
    for given in ([old, *rows[1:]], known.assign(correct=b""), known.drop(columns="correct")):
        (table,) = error_tables(given)
        assert "rank" not in table.columns
        assert column(table, "Mean of 2") == {"bn": "21.0 ±0.0", "tent": "40.0 ±0.0"}
        assert "seeds 0, 1: mean and standard deviation" in table.notes[0]
        assert table.notes[1] == NO_INTERVALS
        assert difference_table(comparisons(given)[0]) is None
        assert NOT_TESTED in headline(given)


def test_differences_are_those_of_the_same_images() -> None:
    rows = grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0})
    table = difference_table(one(rows))
    assert table is not None
    assert table.columns == (
        "method",
        "Mean of 2",
        "rank",
        "minus tent",
        "minus bn",
        "minus source",
    )
    assert [line[0].text for line in table.rows] == ["tent", "bn", "ttapca-exp", "source"]
    values = {
        method: np.mean([wrong(each) for each in rows if each.cell.method == method], axis=0)
        for method in ("source", "bn", "tent", "ttapca-exp")
    }
    for method, other in itertools.permutations(values, 2):
        if other == "ttapca-exp":  # nobody's reference
            continue
        gap = values[method] - values[other]
        text = f"{gap.mean():+.1f} ±{half_width(gap):.1f}".replace("-", "−")  # noqa: RUF001
        same = {method, other} == {"bn", "tent"}
        assert column(table, f"minus {other}")[method] == (f"({text})" if same else text)
    assert column(table, "minus bn")["bn"] == "0"
    assert difference_table(one(rows[:2])) is None  # nothing to compare with
    text = export(rows, "markdown")
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert [title.rpartition(":")[2] for title in titles[1:]] == [
        " what is told apart",
        " ours and the paper's",
    ]
    assert "what is told apart" in export(rows, "latex")


def said(rows: list[Row]) -> str:
    return " ".join(headline(rows)).replace("\u00a0", " ")


def test_the_headline_calls_lowest_what_is_told_apart() -> None:
    rows = grid({"source": 40.0, "bn": 24.0, "tent": 20.0, "ttapca-exp": 21.8}, noise=0.2)
    text = said(rows)
    assert (
        "images per corruption), tent has the lowest mean error over 2 corruptions, 20.0 ±" in text
    )
    assert "% (±: 95 % interval over images)." in text
    values = {
        method: np.mean([wrong(each) for each in rows if each.cell.method == method], axis=0)
        for method in ("source", "bn", "tent", "ttapca-exp")
    }
    gaps = {method: values[method] - values["tent"] for method in ("source", "bn", "ttapca-exp")}
    words = {m: f"{gap.mean():.1f} ±{half_width(gap):.1f}" for m, gap in gaps.items()}
    assert (
        f"tent is {words['ttapca-exp']} points below ttapca-exp, {words['bn']} below bn and "
        f"{words['source']} below the untouched network."
    ) in text


def test_the_headline_calls_nothing_lowest_that_is_not() -> None:
    text = said(grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0}))
    assert "the lowest mean errors over 2 corruptions are not told apart: tent (20.8 ±" in text
    assert ") and bn (21.0 ±" in text
    assert "has the lowest" not in text
    assert "below ttapca-exp and " in text
    assert "below the untouched network." in text
    text = said(grid({"source": 20.9, "bn": 21.0, "tent": 30.0}))
    assert "are not told apart: source (20.9 ±" in text
    assert "So no method is shown to beat the untouched network." in text
    text = said(grid({"source": 20.0, "bn": 30.0}))
    assert "no method beats the untouched network, 20.0 ±" in text
    assert "source is 10.0 ±" in text
    text = said(grid({"bn": 21.0}))
    assert "bn has a mean error over 2 corruptions of 21.0 ±" in text
    assert NOT_TESTED not in text


@pytest.mark.parametrize(
    ("error", "words"),
    [(12.0, " points more."), (4.0, " points fewer."), (8.2, ": not told apart, 0.2 ±")],
)
def test_the_headline_on_clean_images(error: float, words: str) -> None:
    errors = {("source", "fog"): 40.0, ("bn", "fog"): 20.0}
    errors |= {("source", CLEAN): 8.0, ("bn", CLEAN): error}
    rows = with_bits([row(cell(*place), error=each) for place, each in errors.items()])
    text = said(rows)
    assert "clean images" not in said(rows[:-1])  # the best was not measured on them
    assert f"On clean images bn has {error:.1f} % where the untouched network has 8.0 %" in text
    assert words in text


def test_figures_draw_the_interval_of_the_images() -> None:
    rows = with_bits([each for each in sweeps() if each.cell.setting == "episodic"])
    drawn = {figure.name: figure for figure in figures(rows)}
    for name in ("rank", "cost"):
        assert "95 % interval over images" in drawn[name].caption
        assert "standard deviation" not in drawn[name].caption
    handles, names = drawn["rank"].drawing.axes[0].get_legend_handles_labels()
    bars = dict(zip(names, handles, strict=True))["ttapca-exp"][2][0].get_segments()
    for components, bar in zip((50, 200, 1000, 2000), bars, strict=True):
        own = [
            wrong(each)
            for each in rows
            if each.cell.method == "ttapca-exp"
            and (each.cell.components, each.cell.setting, each.cell.batch_size)
            == (components, "episodic", 200)
        ]
        assert len(own) == 6  # two corruptions, three seeds
        assert float(np.ptp(bar[:, 1])) / 2 == pytest.approx(half_width(np.mean(own, axis=0)))


def test_settings_and_the_papers_numbers_stand_beside_intervals_too() -> None:
    rows = [
        Row(dataclasses.replace(each.cell, setting=setting), each.outcome)
        for setting in ("episodic", "online", "correlated")
        for each in grid({"source": 40.0, "bn": 21.0, "tent": 20.8})
    ]
    (table,) = setting_tables(comparisons(rows))
    (own,) = error_tables(rows[:6])
    for name in ("episodic", "online", "correlated"):
        assert column(table, name) == column(own, "Mean of 2")
        assert bold(table, name) == {"bn", "tent"}
    assert table.notes[1].startswith("±: half the width of the 95 % interval over images.")
    beside = paper_tables(rows[:6])[0]
    assert beside.rows[0][1].text == column(own, "Mean of 2")["source"]
    assert beside.notes[-1].endswith("interval over images; the paper prints standard deviations.")


def test_the_page_says_what_is_told_apart() -> None:
    rows = grid({"bn": 21.0, "tent": 20.8})
    page = report(rows)
    assert '<section id="told-apart">' in page
    assert '<a href="#told-apart">' in page
    for line in error_table(one(rows)).rows:
        assert f"{line[1].text}</td>" in page
        assert f"{line[1].text}</span></li>" in page  # beside its bar
    assert "told-apart" not in report(rows[:1])


def test_a_narrow_terminal_puts_the_interval_below_the_mean() -> None:
    (table,) = error_tables(with_bits(paper_grid()))
    console = Console(file=io.StringIO(), width=70)
    print_table(console, table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (at,) = [number for number, line in enumerate(lines) if "Mean of 15" in line]
    assert (lines[at].count("±"), lines[at + 1].count("±")) == (0, len(METHODS))
