"""What the page says first: the question, the finding, what to deploy, and where methods differ."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmark.synthetic_rows import cell, failed, paper_grid, row, with_bits
from ttapca.benchmark.cells import CLEAN, ClassLabels, Row
from ttapca.benchmark.class_table import SHOWN, class_table
from ttapca.benchmark.comparisons import Comparison, comparisons
from ttapca.benchmark.deployment import deployment
from ttapca.benchmark.headline import headline, question, title
from ttapca.benchmark.heat_table import heat_tables
from ttapca.benchmark.report_page import report
from ttapca.benchmark.tables import NO_INTERVALS

NAMES = ("fog", "snow")


def measured(errors: dict[str, float], names: tuple[str, ...] = NAMES, **changes: Any) -> list[Row]:
    pairs = itertools.product(errors, names)
    return [row(cell(method, name, **changes), error=errors[method]) for method, name in pairs]


def per_image(
    errors: dict[str, float], names: tuple[str, ...] = NAMES, **changes: Any
) -> list[Row]:
    """The same rows, and which images were right; the same images are hard for all."""
    return with_bits(measured(errors, names, **changes), noise=0.2)


def said(rows: list[Row]) -> str:
    return " ".join(deployment(comparisons(rows))).replace("\u00a0", " ")


CLEAR = {"source": 40.0, "bn": 30.0, "tent": 20.0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (per_image(CLEAR),
         "tent has the lowest error: 20.0 % where the untouched network has 40.0 %"),
        (per_image({"bn": 30.0, "tent": 20.0}), "tent has the lowest error: 20.0 %"),
        (per_image({"bn": 20.1, "tent": 20.0, "source": 40.0}),
         "The lowest errors are not told apart: tent and bn"),
        (per_image({"bn": 20.1, "source": 20.0}),
         "No method is shown to beat the untouched network"),
        (per_image({"bn": 30.0, "source": 20.0}), "No method beats the untouched network"),
        (per_image({"bn": 30.0}), "bn has a mean error of 30.0 %"),
        (measured({"bn": 30.0, "tent": 20.0}), "tent has the lowest error: 20.0 % (not tested)"),
        (measured({"bn": 30.0, "source": 20.0}),
         "No method beats the untouched network (not tested)"),
        ([failed(cell("bn"))], "No method was measured on every corruption"),
    ],
)  # fmt: skip
def test_the_title_says_what_was_found_and_no_more(rows: list[Row], words: str) -> None:
    assert title(rows).replace("\u00a0", " ") == words


def test_the_headline_names_batches_as_tables_do() -> None:
    rows = per_image(CLEAR, batch_size=1)
    assert "one image at a time" in headline(rows)[0]
    assert "one image at a time" in comparisons(rows)[0].conditions.title


def test_the_question_names_what_was_compared() -> None:
    page = report(per_image(CLEAR))
    assert f"<h1>{title(per_image(CLEAR))}</h1>" in page
    assert question(per_image(CLEAR)) in page
    assert question(per_image(CLEAR)) == (
        "Which of 3 methods has the lowest error with resnet20 on cifar10, 2 corruptions at "
        "severity 5?"
    )
    alone = measured({"bn": 30.0}, (CLEAN,))
    assert question(alone) == "What error has bn with resnet20 on cifar10, Clean?"


def test_what_is_told_apart_is_deployed_with_its_cost() -> None:
    text = said(per_image(CLEAR))
    assert text.startswith("tent: its mean error, 20.0 ±")
    assert " %, is the lowest, and told apart from all others." in text
    assert "It takes 3.2 times the time of the untouched network." in text  # 1.3 s, not 0.4 s
    assert "If that is too slow: bn, 1.0 times the time of the untouched network, 10.0 ±" in text
    assert "Clean images were not measured." in text
    assert text.endswith("measured at severity 5, episodic, batches of 200, 1,000 images.")
    cleaned = [*per_image(CLEAR), *per_image({"source": 8.0, "bn": 9.0, "tent": 14.0}, (CLEAN,))]
    assert "On clean images tent has 14.0 % where the untouched network has 8.0 %: 6.0" in said(
        cleaned
    )


def test_of_equals_the_fastest_is_deployed() -> None:
    text = said(per_image({"source": 40.0, "bn": 20.1, "tent": 20.0, "ttapca-exp": 20.0}))
    assert text.startswith("bn: its mean error, 20.1 ±")
    assert "is not told apart from the lowest, that of tent, and of these 3 it took" in text
    assert "Nor is ttapca-exp. It takes" in text
    assert "too slow" not in text
    text = said(per_image({"source": 40.0, "tent": 20.0, "ttapca-exp": 20.1}))
    assert "is the lowest. It is not told apart from ttapca-exp, and of these 2" in text


def test_nothing_is_deployed_that_the_intervals_do_not_carry() -> None:
    assert "not told apart from that of the untouched" in said(
        per_image({"source": 20.1, "bn": 20.0})
    )
    assert "untouched network has the lowest error" in said(per_image({"source": 20.0, "bn": 30.0}))
    assert said(measured(CLEAR)).startswith("These results carry no choice: no difference was")
    assert "fewer than two methods" in said([*per_image({"source": 20.0}), failed(cell("bn"))])
    assert said(per_image({"bn": 20.0})) == ""
    assert 'id="deploy"' not in report(per_image({"bn": 20.0}))
    assert "Whether to adapt at all is open" in said(per_image({"tent": 20.0, "bn": 30.0}))


def test_other_streams_count_too() -> None:
    here, better = per_image(CLEAR, ("fog", "snow", "frost")), per_image(CLEAR, setting="online")
    worse = per_image(
        {"source": 40.0, "bn": 20.0, "tent": 30.0}, batch_size=1, setting="correlated"
    )
    elsewhere = per_image({"source": 40.0, "bn": 20.0, "tent": 30.0}, data="cifar100")
    even = per_image({"source": 20.0, "bn": 30.0, "tent": 20.0}, severity=1)
    text = said([*here, *better, *worse, *elsewhere, *even])
    assert "It is not shown to help on others: severity 1, episodic, batches of 200" in text
    assert "on other streams: severity 5, online, batches of 200, 1,000 images." in text
    assert text.endswith(
        "worse on others: severity 5, correlated, one image at a time, 1,000 images (than bn)."
    )


def one(rows: list[Row]) -> Comparison:
    (found,) = comparisons(rows)
    return found


def test_heat_tables_are_differences_with_a_colour_where_they_are_told_apart() -> None:
    comparison = one(with_bits(paper_grid()))
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
    rows = [*measured(CLEAR)[1:], failed(cell("source", "fog"))]
    (table,) = [each for each in heat_tables(one(rows)) if each.title.endswith("minus bn")]
    assert NO_INTERVALS in table.notes
    by_name = {line[0].text: [value.text for value in line[1:]] for line in table.rows}
    assert by_name == {"source": ["—", "+10.0", "—"], "tent": ["−10.0", "−10.0", "−10.0"]}  # noqa: RUF001
    assert heat_tables(one(measured({"bn": 20.0}))) == []
    assert heat_tables(one(measured({"tent": 20.0, "ttapca-exp": 21.0}))) == []


def unpacked(each: Row) -> np.ndarray:
    """Whether each image was predicted wrong."""
    bits = "".join(f"{byte:08b}" for byte in each.outcome.correct)
    return np.array([bit == "0" for bit in bits[: each.cell.images]])


def test_errors_by_class_are_those_of_its_images() -> None:
    rows = per_image({"source": 40.0, "bn": 30.0, "tent": 20.0})
    numbers = tuple(number**2 % 7 % 3 for number in range(1000))  # classes 0, 1 and 2
    labels = ClassLabels("cifar10", ("cat", "dog", "frog"), numbers)
    found = class_table(one(rows), [ClassLabels("cifar10", ("a",), (0,) * 10), labels])
    assert found is not None
    assert found.columns == ("class", "images", "source", "bn", "tent")
    for number, line in enumerate(found.rows):
        own = np.array(numbers) == number
        assert (line[0].text, line[1].number) == (labels.names[number], own.sum())
        for method, value in zip(found.columns[2:], line[2:], strict=True):
            wrong = [unpacked(each)[own] for each in rows if each.cell.method == method]
            assert value.number == pytest.approx(100 * np.mean(wrong))
        assert [value.best for value in line[2:]] == [False, False, True]
    page = report(rows, labels=[labels])
    assert "Errors by class" in page
    assert "frog" in page


def test_of_many_classes_those_are_shown_in_which_methods_differ() -> None:
    rows = per_image({"source": 40.0, "bn": 30.0, "tent": 30.0})
    labels = ClassLabels("cifar10", tuple(map(str, range(50))), tuple(np.arange(1000) % 50))
    found = class_table(one(rows), [labels])
    assert found is not None
    assert len(found.rows) == SHOWN
    assert f"the {SHOWN} of 50 classes in which methods differ most" in found.notes[0]

    def span(number: int) -> float:
        own = np.arange(1000) % 50 == number
        errors = [
            np.mean([unpacked(each)[own] for each in rows if each.cell.method == method])
            for method in ("bn", "tent")
        ]
        return float(abs(errors[0] - errors[1]))

    shown = {int(line[0].text) for line in found.rows}
    assert min(map(span, shown)) >= max(span(each) for each in range(50) if each not in shown)


def test_there_is_no_table_by_class_where_something_is_unknown() -> None:
    rows, labels = per_image({"bn": 30.0}), ClassLabels("cifar10", ("a", "b"), (0, 1) * 500)
    assert class_table(one(rows), []) is None
    assert class_table(one(measured({"bn": 30.0})), [labels]) is None
    alone = ClassLabels("cifar10", ("a", "b"), (1,) * 1000)
    assert class_table(one(rows), [alone]) is None
    table = class_table(one(rows), [labels])
    assert table is not None
    assert not any(value.best for line in table.rows for value in line)  # nothing to compare with
