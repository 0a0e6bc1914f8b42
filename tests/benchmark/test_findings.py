"""What the report says first: the question, the finding, and what to deploy."""

from __future__ import annotations

import pytest

from benchmark.synthetic_rows import (
    cell,
    everything,
    failed,
    grid,
    half_width,
    mean_wrong,
    paper_grid,
    texts,
    without_bits,
)
from ttapca.benchmark.comparisons import comparisons
from ttapca.benchmark.findings import NOT_TESTED, deployment, headline, question, title
from ttapca.benchmark.report_page import report
from ttapca.benchmark.rows import CLEAN, Row

CLEAR = {"source": 40.0, "bn": 30.0, "tent": 20.0}
EVEN = {"source": 40.0, "bn": 20.1, "tent": 20.0, "ttapca-exp": 20.0}


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def said(rows: list[Row]) -> str:
    return plain(" ".join(headline(rows, comparisons(rows))))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (grid(CLEAR), "Lowest mean error: tent 20.0 ±"),
        (grid({"bn": 20.1, "tent": 20.0, "source": 40.0}),
         "The lowest errors are not told apart: tent, bn"),
        (grid({"bn": 20.1, "source": 20.0}),
         "No method is shown to have a lower error than the untouched network"),
        (grid({"bn": 30.0, "source": 20.0}),
         "No method is shown to have a lower error than the untouched network"),
        (grid({"bn": 30.0}), "Mean error: bn 30.0 ±"),
        (without_bits(grid(CLEAR)), "Lowest mean error: tent 20.0 %, source 40.0 % (not tested)"),
        (without_bits(grid({"bn": 30.0, "source": 20.0})),
         "No method is shown to have a lower error than the untouched network (not tested)"),
        ([failed(cell("bn"))], "No method was measured on every corruption"),
    ],
)  # fmt: skip
def test_the_title_says_what_was_found_and_no_more(rows: list[Row], words: str) -> None:
    assert plain(title(comparisons(rows))).startswith(words)
    assert f"<h1>{title(comparisons(rows))}</h1>" in report(rows)


def test_the_question_names_what_was_compared() -> None:
    asked = "Which of 3 methods has the lowest error with resnet20 on cifar10, 2 corruptions at "
    assert question(comparisons(grid(CLEAR))) == f"{asked}severity 5?"
    assert question(comparisons(grid(CLEAR))) in report(grid(CLEAR))
    assert question(comparisons(grid({"bn": 30.0}, (CLEAN,)))).endswith("on cifar10, Clean?")


def test_the_headline_has_all_errors_and_says_which_are_told_apart() -> None:
    rows = grid({"source": 40.0, "bn": 21.0, "tent": 20.8, "ttapca-exp": 28.0}, batch_size=1)
    lowest, others = said(rows).split(" Told apart from that: ")
    assert lowest.startswith("resnet20 on cifar10, severity 5, episodic, one image at a time, ")
    for method, part in (("tent", lowest), ("bn", lowest), ("ttapca-exp", others)):
        values = mean_wrong(rows, method)
        assert f"{method} {values.mean():.1f} ±{half_width(values):.1f} %" in part
    assert others.endswith("±: 95 % interval over images. All 8 measurements finished.")
    alone = said(grid({"bn": 21.0}))
    assert "Mean error over 2 corruptions at severity 5: bn 21.0 ±" in alone
    assert NOT_TESTED not in alone


def test_the_headline_of_rows_that_cannot_be_tested() -> None:
    rows = everything()
    text = said(rows)
    lines = comparisons(paper_grid())[0].lines.set_index("method")
    assert f"severity 5: ttapca-exp {lines['mean']['ttapca-exp']:.1f} %, " in text
    assert f"source {lines['mean']['source']:.1f} %. {NOT_TESTED}" in text
    assert "Not measured on every corruption: tent." in text
    assert text.endswith(f"2 of {len(rows)} measurements failed.")
    assert "over Clean: bn" in said(grid({"bn": 8.0}, (CLEAN,)))


def test_the_lowest_error_is_deployed_if_it_is_told_apart() -> None:
    clean = grid({"source": 8.0, "bn": 8.2, "tent": 14.0}, (CLEAN,))
    choice, table = deployment(comparisons([*grid(CLEAR), *clean]))
    assert choice == "tent: the lowest error, told apart from all others."
    assert table is not None
    assert list(texts(table, "rank").items()) == [("tent", "1"), ("bn", "2"), ("source", "3")]
    assert texts(table, "times source")["tent"] == "3.25"  # 1.3 s, not 0.4 s
    shown = texts(table, "clean images, minus source")
    assert (shown["source"], shown["tent"], shown["bn"][:5]) == ("0", "+6.0", "(+0.2")
    assert 'id="deploy"' in report(grid(CLEAR))


def test_of_equals_the_fastest_is_deployed() -> None:
    choice, _ = deployment(comparisons(grid(EVEN)))
    assert choice == "bn: the fastest of 3 methods with the lowest error, not told apart."


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (grid({"source": 20.1, "bn": 20.0}), "No adaptation: No method is shown to have a lower"),
        (grid({"source": 20.0, "bn": 30.0}), "No adaptation: No method is shown to have a lower"),
        (without_bits(grid(CLEAR)), f"No choice: {NOT_TESTED}"),
        ([*grid({"source": 20.0}), failed(cell("bn"))], "No choice: fewer than two methods"),
        (grid({"tent": 20.0, "bn": 30.0}), "tent: the lowest error, told apart from all others. "
         "Whether to adapt at all is open: the untouched network was not measured."),
    ],
)  # fmt: skip
def test_nothing_is_deployed_that_the_intervals_do_not_carry(rows: list[Row], words: str) -> None:
    assert deployment(comparisons(rows))[0].startswith(words)


def test_a_single_method_leaves_nothing_to_choose() -> None:
    rows = grid({"bn": 20.0})
    assert deployment(comparisons(rows)) == ("", None)
    assert 'id="deploy"' not in report(rows)


def test_ranks_in_other_streams_of_the_same_network_and_data_count() -> None:
    here = grid(CLEAR, ("fog", "snow", "frost"))
    swapped = {"source": 40.0, "bn": 20.0, "tent": 30.0}
    same, worse = grid(CLEAR, setting="online"), grid(swapped, setting="correlated")
    elsewhere = grid(swapped, data="cifar100")
    _, table = deployment(comparisons([*here, *same, *worse, *elsewhere]))
    assert table is not None
    assert texts(table, "lowest in other streams") == {
        "tent": "1 of 2",
        "bn": "1 of 2",
        "source": "0 of 2",
    }
