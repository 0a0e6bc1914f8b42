from __future__ import annotations

import dataclasses
import statistics

import pytest

from benchmark.synthetic_rows import (
    METHODS,
    cell,
    error,
    everything,
    failed,
    paper_grid,
    row,
    sweeps,
)
from ttapca.benchmark.cells import CLEAN, Row
from ttapca.benchmark.comparison import comparison_tables
from ttapca.benchmark.paper import paper_row
from ttapca.benchmark.row_groups import Spread, grids
from ttapca.benchmark.summary import cost_table, facts, failure_table, headline
from ttapca.benchmark.tables import Table, error_tables
from ttapca.corruptions import STANDARD


def texts(table: Table, column: str) -> dict[str, str]:
    at = table.columns.index(column)
    return {line[0].text: line[at].text for line in table.rows}


def test_the_papers_layout() -> None:
    (table,) = error_tables(paper_grid())
    assert table.columns == (
        "method", "Mean of 15", "Gauss", "Shot", "Impulse", "Defocus", "Glass", "Motion", "Zoom",
        "Snow", "Frost", "Fog", "Bright", "Contrast", "Elastic", "Pixel", "JPEG", "Clean",
    )  # fmt: skip
    assert tuple(line[0].text for line in table.rows) == METHODS
    for line, method in zip(table.rows, METHODS, strict=True):
        errors = [error(cell(method, name)) for name in STANDARD]
        assert line[1].number == pytest.approx(statistics.fmean(errors))  # clean is left out
        assert [value.text for value in line[2:17]] == [f"{each:.1f}" for each in errors]


def test_the_best_is_the_lowest_as_it_is_shown() -> None:
    (table,) = error_tables(
        [
            row(cell("source", "fog"), error=10.04),
            row(cell("bn", "fog"), error=9.96),  # also shown as 10.0
            row(cell("tent", "fog"), error=10.06),
        ]
    )
    assert [line[1].best for line in table.rows] == [True, True, False]
    (alone,) = error_tables([row(cell("bn", "fog"))])
    assert not any(value.best for value in alone.rows[0])


def test_decimals_follow_the_number_of_images() -> None:
    (table,) = error_tables([row(cell("bn", "fog", images=10_000), error=12.345)])
    assert table.rows[0][1].text in ("12.35", "12.34")


def test_several_seeds_give_mean_and_spread() -> None:
    rows = [
        row(cell("bn", name, seed=seed), error=value)
        for name, values in {"fog": (10.0, 12.0, 14.0), "snow": (20.0, 20.0, 26.0)}.items()
        for seed, value in enumerate(values)
    ]
    (table,) = error_tables(rows)
    assert texts(table, "Fog") == {"bn": "12.0 ±2.0"}
    # The spread of the mean is that of the three means 15, 16, 20.
    assert texts(table, "Mean of 2") == {"bn": "17.0 ±2.6"}
    assert "seeds 0, 1, 2" in table.notes[0]
    assert Spread.of([5.0]).deviation is None


def test_a_line_that_lacks_corruptions_says_so_and_is_never_the_best() -> None:
    rows = [
        row(cell("bn", "fog"), error=30.0),
        row(cell("bn", "snow"), error=30.0),
        row(cell("tent", "fog"), error=10.0),
        failed(cell("tent", "snow"), "it broke"),
        row(cell("source", "fog"), error=20.0),
    ]
    (table,) = error_tables(rows)
    assert texts(table, "Mean of 2") == {"bn": "30.0", "tent": "10.0 (1/2)", "source": "20.0 (1/2)"}
    assert texts(table, "Snow") == {"bn": "30.0", "tent": "failed", "source": "—"}
    best = {line[0].text: [value.best for value in line[1:]] for line in table.rows}
    assert best["bn"] == [True, True, False]  # mean, snow, fog
    assert best["tent"] == [False, False, True]
    (failure,) = [v for line in table.rows for v in line if v.kind == "failed"]
    assert failure.note == "it broke"
    assert any("reasons" in note for note in table.notes)


def test_a_seed_that_failed_is_marked() -> None:
    rows = [row(cell("bn", "fog"), error=10.0), failed(cell("bn", "fog", seed=1), "out of memory")]
    (table,) = error_tables(rows)
    assert table.rows[0][1].text == "10.0†"
    assert table.rows[0][1].note == "1 of 2 seeds failed: out of memory"
    assert any(note.startswith("†") for note in table.notes)


def test_seeds_that_lack_a_corruption_do_not_enter_the_mean() -> None:
    rows = [
        row(cell("bn", "fog"), error=10.0),
        row(cell("bn", "snow"), error=20.0),
        row(cell("bn", "fog", seed=1), error=90.0),
    ]
    (table,) = error_tables(rows)
    assert texts(table, "Mean of 2") == {"bn": "15.0"}


def test_lines_are_told_apart_by_what_differs() -> None:
    names = [
        line[0].text
        for line in error_tables(
            [
                row(cell("tent", "fog")),
                row(cell("tent", "fog", steps=3)),
                row(cell("ttapca-exp", "fog", components=50)),
                row(cell("ttapca-exp", "fog", options='{"initial": 0.5}', lr=0.1)),
            ]
        )[0].rows
    ]
    assert names == [
        "tent, 1 step",
        "tent, 3 steps",
        "ttapca-exp, L = 50, lr 0.001",
        "ttapca-exp, L = 2000, lr 0.1, initial = 0.5",
    ]


def test_one_table_a_place_and_clean_images_join_it() -> None:
    rows = [*paper_grid(), *paper_grid("online"), *paper_grid(batch_size=50)]
    tables = error_tables(rows)
    assert [table.columns[-1] for table in tables] == ["Clean"] * 3
    (only,) = error_tables([row(cell("bn", CLEAN))])
    assert only.columns == ("method", "Clean")
    assert "clean images" in only.title
    assert "on Clean" in headline([row(cell("bn", CLEAN))])[0]


def test_ours_beside_the_papers() -> None:
    (table,) = comparison_tables(paper_grid())
    assert [line[0].text for line in table.rows[6:9]] == [
        "tent, ours",
        "tent, paper",
        "tent, difference",
    ]
    printed = paper_row("cifar10", "episodic", "tent")
    assert printed is not None
    ours, theirs, gap = table.rows[6:9]
    assert theirs[1].text == "20.42 (printed 19.96)"
    at = table.columns.index("Fog")
    assert theirs[at].number == printed.errors["fog"] == 15.23
    assert ours[at].number == pytest.approx(error(cell("tent", "fog")))
    assert gap[at].number == pytest.approx(error(cell("tent", "fog")) - 15.23)
    assert gap[at].text.startswith("−")  # noqa: RUF001
    mean = statistics.fmean(error(cell("tent", name)) for name in STANDARD)
    assert gap[1].number == pytest.approx(mean - printed.mean)


def test_means_beside_the_paper_are_of_the_same_corruptions() -> None:
    rows = [row(cell("bn", name), error=30.0) for name in ("fog", "snow")]
    extra = dataclasses.replace(rows[0].cell, corruption="spatter")  # which the paper has not
    (table,) = comparison_tables([*rows, Row(extra, rows[0].outcome)])
    assert table.columns == ("method", "Mean of 2", "Snow", "Fog")
    assert [line[1].text for line in table.rows] == ["30.0", "16.27", "+13.73"]


def test_only_the_papers_protocol_is_compared() -> None:
    assert comparison_tables(paper_grid(batch_size=50)) == []
    assert comparison_tables(paper_grid(data="digits")) == []
    assert comparison_tables(paper_grid("continual")) == []
    assert comparison_tables([row(cell("bn", "fog", severity=3))]) == []
    # Of ranks the one nearest to the paper's, of grids the fullest.
    tables = comparison_tables([*sweeps(), *paper_grid()])
    assert [len(table.columns) for table in tables] == [17, 4]
    assert [len(table.rows) for table in tables] == [15, 9]
    online = tables[1]  # three seeds, steps 1, 3 and 10: the paper's is one step
    one_step = Spread.of(
        [error(cell("tent", "shot_noise", setting="online", seed=s)) for s in range(3)]
    )
    assert online.rows[0][-1].number == pytest.approx(one_step.mean)


def test_the_headline_is_computed() -> None:
    rows = everything()
    said = " ".join(headline(rows)).replace("\u00a0", " ")
    (grid,) = grids(paper_grid())
    means = {v.method: spread.mean for v in grid.variants if (spread := grid.mean(v))}
    assert (
        f"ttapca-exp has the lowest mean error over 15 corruptions, {means['ttapca-exp']:.1f} %"
        in said
    )
    assert f"{means['source']:.1f} % for the untouched network" in said
    assert "Not ranked, for want of some corruptions: tent." in said
    assert "On clean images ttapca-exp has 8.4 % where the untouched network has 8.0 %." in said
    assert said.endswith(f"2 of {len(rows)} cells failed.")


def test_the_headline_of_a_run_that_helped_nobody() -> None:
    rows = [row(cell("source", "fog"), error=5.0), row(cell("bn", "fog"), error=9.0)]
    said = " ".join(headline(rows)).replace("\u00a0", " ")
    assert "no method beats the untouched network, 5.0 % mean error on Fog." in said
    assert "All 2 cells finished." in said
    assert "no method was measured" in headline([failed(cell("bn", "fog"))])[0]


def test_costs_are_those_of_the_rows() -> None:
    table = cost_table(grids(paper_grid())[0])
    assert table is not None
    lines = {line[0].text: line for line in table.rows}
    at = {name: table.columns.index(name) for name in table.columns}
    assert lines["tent"][at["ms an image"]].number == pytest.approx(1.3)
    assert lines["tent"][at["times source"]].number == pytest.approx(1.3 / 0.4)
    assert lines["tent"][at["parameters"]].text == "1,376"
    assert lines["tent"][at["updates"]].number == 15 * 5
    without = cost_table(grids([row(cell("tent", "fog"))])[0])
    assert without is not None
    assert without.rows[0][at["times source"]].text == "—"
    assert cost_table(grids([failed(cell("tent", "fog"))])[0]) is None


def test_what_was_run_and_what_failed() -> None:
    found = {fact.name: fact.values for fact in facts(everything())}
    assert found["seeds"] == ("0", "1", "2")
    assert found["when"] == ("2026-11-15 12:00 UTC to 2026-11-15 12:14 UTC",)
    assert found["network"] == ("resnet20 (weights 0123456789abcdef)",)
    table = failure_table(everything())
    assert table is not None
    assert [line[2].text for line in table.rows] == ["Frost", "Snow"]
    assert table.rows[0][-1].text == "AttachError: no BatchNorm <layer> & co"
