"""Tables of errors, differences, the paper's errors, costs and failures."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import pytest

from benchmark.synthetic_rows import (
    METHODS,
    bold,
    cell,
    error,
    everything,
    failed,
    grid,
    half_width,
    mean_wrong,
    one_comparison,
    paper_grid,
    row,
    sweeps,
    texts,
    wrong,
)
from ttapca.benchmark import frame
from ttapca.benchmark.comparisons import comparisons
from ttapca.benchmark.report_page import NOT_TESTED, facts, headline
from ttapca.benchmark.rows import CLEAN, Row
from ttapca.benchmark.tables import (
    INTERVAL,
    NO_INTERVALS,
    cost_table,
    difference_table,
    error_tables,
    export,
    failure_table,
    paper_tables,
    setting_tables,
)
from ttapca.corruptions import STANDARD


def test_a_frame_has_every_field_and_can_be_selected_from() -> None:
    rows = everything()
    table = frame(rows)
    assert table.error.isna().sum() == 2
    for name in ("model", "corruption", "lr", "error_stream", "machine"):
        values = [vars(each.cell).get(name, vars(each.outcome).get(name)) for each in rows]
        assert table[name].tolist() == values
    online = [each for each in rows if each.cell.setting == "online"]
    assert error_tables(table.query("setting == 'online'")) == error_tables(online)


def errors_of(method: str, names: tuple[str, ...] = STANDARD, **changes: Any) -> list[float]:
    return [error(cell(method, name, **changes)) for name in names]


def test_the_papers_layout() -> None:
    (table,) = error_tables(paper_grid())
    assert table.columns == (
        "method", "Mean of 15", "Gauss", "Shot", "Impulse", "Defocus", "Glass", "Motion", "Zoom",
        "Snow", "Frost", "Fog", "Bright", "Contrast", "Elastic", "Pixel", "JPEG", "Clean",
    )  # fmt: skip
    assert table.title == "resnet20 on cifar10, severity 5, episodic, batches of 200, 1,000 samples"
    assert tuple(line[0].text for line in table.rows) == METHODS
    for line, method in zip(table.rows, METHODS, strict=True):
        errors = errors_of(method)
        assert line[1].number == pytest.approx(statistics.fmean(errors))  # clean is left out
        assert [value.text for value in line[2:17]] == [f"{each:.1f}" for each in errors]


def test_the_best_is_the_lowest_as_it_is_shown() -> None:
    errors = {"source": 10.04, "bn": 9.96, "tent": 10.06}  # bn is also shown as 10.0
    (table,) = error_tables([row(cell(name), error=each) for name, each in errors.items()])
    assert [line[1].best for line in table.rows] == [True, True, False]
    (alone,) = error_tables([row(cell("bn"))])
    assert not any(value.best for value in alone.rows[0])


def test_seeds_give_mean_and_spread_and_many_images_a_second_decimal() -> None:
    errors = {"fog": (10.0, 12.0, 14.0), "snow": (20.0, 20.0, 26.0)}
    for images, fog, mean in (
        (1000, "12.0 ±2.0", "17.0 ±2.6"),
        (5000, "12.00 ±2.00", "17.00 ±2.65"),
    ):
        rows = [
            row(cell("bn", name, seed=seed, images=images), error=value)
            for name, values in errors.items()
            for seed, value in enumerate(values)
        ]
        (table,) = error_tables(rows)
        assert texts(table, "Fog") == {"bn": fog}
        # The spread of the mean is that of the three means 15, 16, 20.
        assert texts(table, "Mean of 2") == {"bn": mean}
        assert "seeds 0, 1, 2" in table.notes[0]
    (table,) = error_tables(rows[:4])  # seeds 1 and 2 lack snow, and do not enter the mean
    assert texts(table, "Mean of 2") == {"bn": "15.00"}


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
    best = [[value.best for value in line[1:]] for line in table.rows]  # mean, snow, fog
    assert best == [[True, True, False], [False, False, True], [False, False, False]]
    assert [v.note for line in table.rows for v in line if v.kind == "failed"] == ["it broke"]
    assert any("reasons" in note for note in table.notes)
    rows = [row(cell("bn"), error=10.0), failed(cell("bn", seed=1), "out of memory")]
    (table,) = error_tables(rows)
    assert table.rows[0][1].text == "10.0†"
    assert table.rows[0][1].note == "1 of 2 seeds failed: out of memory"
    assert any(note.startswith("†") for note in table.notes)


def test_lines_are_told_apart_by_what_differs() -> None:
    cells = {
        "tent, 1 step": cell("tent"),
        "tent, 3 steps": cell("tent", steps=3),
        "ttapca-exp, L = 50, lr 0.001": cell("ttapca-exp", components=50),
        "ttapca-exp, L = 2000, lr 0.1, initial = 0.5": cell(
            "ttapca-exp", options='{"initial": 0.5}', lr=0.1
        ),
    }
    (table,) = error_tables(map(row, cells.values()))
    assert [line[0].text for line in table.rows] == list(cells)


def test_clean_images_join_every_table_of_the_same_conditions() -> None:
    tables = error_tables([*paper_grid(), *paper_grid("online"), *paper_grid(batch_size=50)])
    assert [table.columns[-1] for table in tables] == ["Clean"] * 3
    rows = [row(cell("bn", CLEAN))]
    (only,) = error_tables(rows)
    assert only.columns == ("method", "Clean")
    assert "clean samples" in only.title


def test_settings_beside_one_another() -> None:
    names = ("mixed", "episodic", "dirichlet-0.1")
    rows = [each for name in names for each in paper_grid(name)]
    assert setting_tables(comparisons(rows[: 2 * len(rows) // 3])) == []  # two are few
    mixed = "generated, seed 0, among clean and all the others"
    rows = [
        replace(one, cell=replace(one.cell, corrupted=mixed))
        if one.cell.setting == "mixed"
        else one
        for one in rows
        if (one.cell.setting, one.cell.method) != ("episodic", "tent")
    ]
    slow = [row(cell("tent", name, setting="mixed", corrupted=mixed, lr=0.5)) for name in STANDARD]
    (table,) = setting_tables(comparisons([*rows, *slow]))
    assert table.columns == ("method", "episodic", "dirichlet-0.1", "mixed")
    assert ", severity 5, by setting, batches of 200, " in table.title
    for one in table.columns[1:]:
        found = texts(table, one)
        others = [name for name in METHODS if name != "tent"]
        assert list(found) == [*others, "tent, lr 0.001", "tent, lr 0.5"]
        for method in ("source", "ttapca-exp"):
            errors = [error(cell(method, name, setting=one)) for name in STANDARD]
            clean = error(cell(method, "clean"))
            assert found[method] == f"{statistics.fmean(errors):.1f} ({clean:.1f})"
    assert texts(table, "episodic")["tent, lr 0.001"] == "—"
    assert [texts(table, name)["tent, lr 0.5"] for name in table.columns[1:3]] == ["—", "—"]
    assert "(" not in texts(table, "mixed")["tent, lr 0.5"]  # not run on clean images
    assert table.notes[0].endswith("mean over 15 corruptions; clean samples in brackets.")


def test_clean_images_stand_beside_the_severity_whose_stream_they_share() -> None:
    streams = {
        1: "generated, seed 0, among fog clean at 1",
        5: "generated, seed 0, among fog clean",
    }
    rows = [
        row(cell("bn", name, severity=severity, setting=setting, corrupted=where), error=number)
        for setting in ("continual", "changing", "mixed")
        for at, where in streams.items()
        for name, severity, number in (("fog", at, 40.0 + at), ("clean", 0, 10.0 + at))
    ]
    tables = [table for table in error_tables(rows) if "mixed" in table.title]
    shown = {
        table.title: (texts(table, "Fog")["bn"], texts(table, "Clean")["bn"]) for table in tables
    }
    assert list(shown.values()) == [("41.0", "11.0"), ("45.0", "15.0")]
    first, second = setting_tables(comparisons(rows))
    assert texts(first, "mixed")["bn"] == "41.0 (11.0)"
    assert texts(second, "mixed")["bn"] == "45.0 (15.0)"


def test_costs_are_those_of_the_rows() -> None:
    def costs(rows: list[Row]) -> dict[str, str]:
        table = cost_table(comparisons(rows)[0])
        return {name: texts(table, name)["tent"] for name in table.columns} if table else {}

    found = costs(paper_grid())
    assert (found["ms per sample"], found["times source"]) == ("1.30", "3.25")
    assert (found["parameters"], found["updates"]) == ("1,376", str(15 * 5))
    for setting in ("mixed", "changing"):  # each row counts the whole stream
        assert costs(paper_grid(setting))["updates"] == "5"
    assert costs([row(cell("tent"))])["times source"] == "—"
    assert costs([failed(cell("tent"))]) == {}


def test_what_was_run_and_what_failed() -> None:
    found = facts(everything())
    assert found["seeds"] == ["0", "1", "2"]
    assert found["when"] == ["2026-11-15 12:00 UTC to 2026-11-15 12:14 UTC"]
    assert found["network"] == ["resnet20 (weights 0123456789abcdef)"]
    assert found["filter"][0] == "2,000 components at conv1"
    table = failure_table(everything())
    assert [line[2].text for line in table.rows] == ["Frost", "Snow"]
    assert table.rows[0][-1].text == "AttachError: no BatchNorm <layer> & co"


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_mean_has_the_interval_of_the_images_not_of_the_seeds(seeds: int) -> None:
    rows = grid({"bn": 21.0, "tent": 24.0}, seeds=seeds)
    (table,) = error_tables(rows)
    for method in ("bn", "tent"):
        values = mean_wrong(rows, method)  # corruptions and seeds first, then the images
        expected = f"{values.mean():.1f} ±{half_width(values):.1f}"
        assert texts(table, "Mean of 2")[method] == expected
        assert texts(table, "Fog")[method] == f"{values.mean():.1f}"  # too many columns for it
    widths = [half_width(wrong(each)) for each in rows]
    if seeds == 1:
        assert f"at most ±{max(widths):.1f} for a single corruption." in table.notes[1]
    else:
        assert "seeds 0, 1, 2: mean; corrupted" in table.notes[0]
        assert "standard deviation over seeds at most 0.0" in table.notes[1]
    at = table.columns.index("Fog")
    assert all("95 % interval over samples: " in line[at].note for line in table.rows)


def test_a_single_corruption_shows_its_interval() -> None:
    rows = [each for each in grid({"bn": 21.0, "tent": 30.0}) if each.cell.corruption == "fog"]
    (table,) = error_tables(rows)
    assert table.columns == ("method", "Fog", "rank")
    assert texts(table, "Fog")["bn"] == f"21.0 ±{half_width(wrong(rows[0])):.1f}"
    (alone,) = error_tables(rows[:1])
    assert alone.columns == ("method", "Fog")
    assert not alone.rows[0][1].best


def test_methods_that_are_not_told_apart_share_rank_and_bold() -> None:
    rows = grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0})
    (table,) = error_tables(rows)
    assert texts(table, "rank") == {"source": "4", "bn": "1", "tent": "1", "ttapca-exp": "3"}
    assert bold(table, "Mean of 2") == bold(table, "Fog") == {"bn", "tent"}
    assert "Holm" in table.notes[2]
    # The same small difference, on images that are almost the same for both.
    (sure,) = error_tables(grid({"bn": 21.5, "tent": 20.5}, noise=0.0))
    assert texts(sure, "rank") == {"bn": "2", "tent": "1"}
    assert bold(sure, "Mean of 2") == {"tent"}


def test_a_line_that_lacks_a_corruption_has_no_rank() -> None:
    rows = grid({"bn": 21.0, "tent": 40.0})
    rows[0] = failed(rows[0].cell)
    (table,) = error_tables([*rows, row(cell("source", "fog"), error=9.0)])
    assert "rank" not in table.columns  # one line is left, and another has no bits
    only_unranked = [row(cell("source", "fog"), error=9.0), row(cell("ttapca-exp", "snow"))]
    (table,) = error_tables([*grid({"bn": 21.0, "tent": 40.0}), *only_unranked])
    assert texts(table, "rank") == {"bn": "1", "tent": "2", "source": "—", "ttapca-exp": "—"}
    assert table.notes[1] == f"{INTERVAL}."
    rows = grid({"bn": 21.0, "tent": 40.0, "source": 50.0})
    rows[0] = failed(rows[0].cell)
    (table,) = error_tables(rows)
    assert texts(table, "rank") == {"bn": "—", "tent": "1", "source": "2"}
    assert texts(table, "Mean of 2")["bn"] == "21.0 (1/2)"
    assert bold(table, "Snow") == {"bn"}


def test_rows_of_before_are_shown_as_before_with_a_note() -> None:
    rows = grid({"bn": 21.0, "tent": 40.0}, seeds=2)
    known = frame(rows)
    old = replace(rows[0], outcome=replace(rows[0].outcome, correct=b""))
    for given in ([old, *rows[1:]], known.assign(correct=b""), known.drop(columns="correct")):
        (table,) = error_tables(given)
        assert "rank" not in table.columns
        assert texts(table, "Mean of 2") == {"bn": "21.0 ±0.0", "tent": "40.0 ±0.0"}
        assert "seeds 0, 1: mean and standard deviation" in table.notes[0]
        assert table.notes[1] == NO_INTERVALS
        assert difference_table(comparisons(given)[0]) is None
        assert NOT_TESTED in headline(given, comparisons(given))


def test_settings_and_the_papers_numbers_stand_beside_intervals_too() -> None:
    rows = [
        Row(replace(each.cell, setting=setting), each.outcome)
        for setting in ("episodic", "online", "correlated")
        for each in grid({"source": 40.0, "bn": 21.0, "tent": 20.8})
    ]
    (table,) = setting_tables(comparisons(rows))
    (own,) = error_tables(rows[:6])
    for name in ("episodic", "online", "correlated"):
        assert texts(table, name) == texts(own, "Mean of 2")
        assert bold(table, name) == {"bn", "tent"}
    assert table.notes[1].startswith("±: half the width of the 95 % interval over samples.")
    beside = paper_tables(rows[:6])[0]
    assert beside.rows[0][1].text == texts(own, "Mean of 2")["source"]
    assert beside.notes[-1].endswith("interval over samples; the paper prints standard deviations.")


def test_differences_are_those_of_the_same_images() -> None:
    rows = grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0})
    table = difference_table(one_comparison(rows))
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
    methods = ("source", "bn", "tent", "ttapca-exp")
    values = {method: mean_wrong(rows, method) for method in methods}
    for method, other in itertools.permutations(values, 2):
        if other == "ttapca-exp":  # nobody's reference
            continue
        gap = values[method] - values[other]
        text = f"{gap.mean():+.1f} ±{half_width(gap):.1f}".replace("-", "−")  # noqa: RUF001
        same = {method, other} == {"bn", "tent"}
        assert texts(table, f"minus {other}")[method] == (f"({text})" if same else text)
    assert texts(table, "minus bn")["bn"] == "0"
    assert difference_table(one_comparison(rows[:2])) is None  # nothing to compare with
    text = export(rows, "markdown")
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert [title.rpartition(":")[2] for title in titles[1:]] == [
        " what is told apart",
        " ours and the paper's",
    ]


def test_ours_beside_the_papers() -> None:
    (table,) = paper_tables(paper_grid())
    ours, theirs, gap = table.rows[6:9]
    assert [line[0].text for line in (ours, theirs, gap)] == [
        "tent, ours", "tent, paper", "tent, difference",
    ]  # fmt: skip
    assert theirs[1].text == "20.42 (printed 19.96)"
    at = table.columns.index("Fog")
    assert theirs[at].number == 15.23
    assert ours[at].number == pytest.approx(error(cell("tent")))
    assert gap[at].number == pytest.approx(error(cell("tent")) - 15.23)
    assert gap[at].text.startswith("−")  # noqa: RUF001
    assert gap[1].number == pytest.approx(
        statistics.fmean(error(cell("tent", name)) for name in STANDARD) - theirs[1].number
    )
    rows = [row(cell("bn", name), error=30.0) for name in ("fog", "snow")]
    extra = replace(rows[0].cell, corruption="spatter")  # which the paper has not
    (table,) = paper_tables([*rows, Row(extra, rows[0].outcome)])
    assert table.columns == ("method", "Mean of 2", "Snow", "Fog")
    assert [line[1].text for line in table.rows] == ["30.0", "16.27", "+13.73"]


@pytest.mark.parametrize(
    "changes", [{"batch_size": 50}, {"data": "digits"}, {"setting": "continual"}, {"severity": 3}]
)
def test_only_the_papers_protocol_is_compared(changes: dict[str, Any]) -> None:
    assert paper_tables([row(cell("tent", "fog"))])
    assert paper_tables([row(cell("tent", "fog", **changes))]) == []


def test_of_several_options_the_papers_and_of_several_comparisons_the_fullest() -> None:
    tables = paper_tables([*sweeps(), *paper_grid()])
    assert [len(table.columns) for table in tables] == [17, 4]
    assert [len(table.rows) for table in tables] == [15, 9]
    online = tables[1]  # three seeds, steps 1, 3 and 10: the paper's is one step
    one_step = [error(cell("tent", "shot_noise", setting="online", seed=s)) for s in range(3)]
    assert online.rows[0][-1].number == pytest.approx(statistics.fmean(one_step))
