"""Differences between methods: tested on the same images, by corruption, by class, to the paper."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmark.synthetic_rows import (
    cell,
    error,
    failed,
    grid,
    half_width,
    mean_wrong,
    one_comparison,
    paper_grid,
    row,
    sweeps,
    texts,
    with_bits,
    without_bits,
    wrong,
)
from ttapca.benchmark.difference_tables import (
    MOST_CLASSES,
    class_table,
    difference_table,
    heat_tables,
    paper_tables,
)
from ttapca.benchmark.exports import export
from ttapca.benchmark.report_page import report
from ttapca.benchmark.rows import CLEAN, ClassLabels, Row
from ttapca.benchmark.tables import NO_INTERVALS
from ttapca.corruptions import STANDARD

CLEAR = {"source": 40.0, "bn": 30.0, "tent": 20.0}


def test_heat_tables_have_colours_if_differences_are_told_apart() -> None:
    comparison = one_comparison(with_bits(paper_grid()))
    to_bn, to_source = heat_tables(comparison)
    assert to_bn.title.endswith("minus bn")
    assert [line[0].text for line in to_bn.rows] == ["source", "tent", "ttapca-relu", "ttapca-exp"]
    assert to_source.columns[:3] == ("method", "Mean of 15", "Gauss")
    errors = comparison.rows.pivot(index="method", columns="corruption", values="error")
    strongest = 0.0
    for line in to_source.rows:
        gap = errors.loc[line[0].text] - errors.loc["source"]
        fog = line[to_source.columns.index("Fog")]
        assert fog.number == pytest.approx(gap["fog"])
        assert line[1].number == pytest.approx(gap.drop(CLEAN).mean())
        for value in line[1:]:
            assert (value.heat is None) == value.text.startswith("(")
            if value.heat is not None:
                assert np.sign(value.heat) == np.sign(value.number)
                strongest = max(strongest, abs(value.heat))
    assert strongest == pytest.approx(1.0)


def test_heat_tables_without_bits_show_differences_that_were_not_tested() -> None:
    rows = [*without_bits(grid(CLEAR))[1:], failed(cell("source", "fog"))]
    (table,) = [
        each for each in heat_tables(one_comparison(rows)) if each.title.endswith("minus bn")
    ]
    assert NO_INTERVALS in table.notes
    by_name = {line[0].text: [value.text for value in line[1:]] for line in table.rows}
    assert by_name == {"source": ["—", "+10.0", "—"], "tent": ["−10.0", "−10.0", "−10.0"]}  # noqa: RUF001
    assert heat_tables(one_comparison(without_bits(grid({"bn": 20.0})))) == []
    assert heat_tables(one_comparison(without_bits(grid({"tent": 20.0, "ttapca-exp": 21.0})))) == []


def test_errors_by_class_are_those_of_its_images() -> None:
    rows = grid({"source": 40.0, "bn": 30.0, "tent": 20.0})
    numbers = tuple(number**2 % 7 % 3 for number in range(1000))  # classes 0, 1 and 2
    labels = ClassLabels("cifar10", ("cat", "dog", "frog"), numbers)
    found = class_table(one_comparison(rows), [ClassLabels("cifar10", ("a",), (0,) * 10), labels])
    assert found is not None
    assert found.columns == ("class", "images", "source", "bn", "tent")
    for number, line in enumerate(found.rows):
        own = np.array(numbers) == number
        assert (line[0].text, line[1].number) == (labels.names[number], own.sum())
        for method, value in zip(found.columns[2:], line[2:], strict=True):
            own_wrong = [wrong(each)[own] for each in rows if each.cell.method == method]
            assert value.number == pytest.approx(np.mean(own_wrong))
        assert [value.best for value in line[2:]] == [False, False, True]
    page = report(rows, labels=[labels])
    assert "Errors by class" in page
    assert "frog" in page


def test_of_many_classes_those_are_shown_in_which_methods_differ() -> None:
    rows = grid({"source": 40.0, "bn": 30.0, "tent": 30.0})
    labels = ClassLabels("cifar10", tuple(map(str, range(50))), tuple(np.arange(1000) % 50))
    found = class_table(one_comparison(rows), [labels])
    assert found is not None
    assert len(found.rows) == MOST_CLASSES
    assert f"the {MOST_CLASSES} of 50 classes in which methods differ most" in found.notes[0]

    def span(number: int) -> float:
        own = np.arange(1000) % 50 == number
        errors = [
            np.mean([wrong(each)[own] for each in rows if each.cell.method == method])
            for method in ("bn", "tent")
        ]
        return float(abs(errors[0] - errors[1]))

    shown = {int(line[0].text) for line in found.rows}
    assert min(map(span, shown)) >= max(span(each) for each in range(50) if each not in shown)


def test_there_is_no_table_by_class_where_something_is_unknown() -> None:
    rows, labels = grid({"bn": 30.0}), ClassLabels("cifar10", ("a", "b"), (0, 1) * 500)
    assert class_table(one_comparison(rows), []) is None
    assert class_table(one_comparison(without_bits(grid({"bn": 30.0}))), [labels]) is None
    alone = ClassLabels("cifar10", ("a", "b"), (1,) * 1000)
    assert class_table(one_comparison(rows), [alone]) is None
    table = class_table(one_comparison(rows), [labels])
    assert table is not None
    assert not any(value.best for line in table.rows for value in line)  # nothing to compare with


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
    assert "what is told apart" in export(rows, "latex")


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
