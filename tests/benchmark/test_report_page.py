"""The page as text; `test_report_in_browser.py` opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmark.synthetic_rows import (
    cell,
    everything,
    failed,
    grid,
    observations,
    one_comparison,
    paper_grid,
    row,
    without_bits,
)
from ttapca.benchmark.comparisons import comparisons
from ttapca.benchmark.report_page import (
    NOT_TESTED,
    headline,
    report,
    title,
)
from ttapca.benchmark.rows import Row
from ttapca.benchmark.tables import error_table

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [*paper_grid()[:-16], failed(cell("ttapca-exp", "fog"))]
EVIL = '<script>alert("x")</script>'


def ids(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', page)


@pytest.fixture(scope="module")
def page() -> str:
    return report(ROWS, observations())


def test_everything_is_inside_and_the_policy_allows_one_script(page: str) -> None:
    assert page.count("<script") == 1
    assert '<link rel="icon" href="data:,">' in page  # else browsers ask a server for an icon
    targets = re.findall(r'\b(?:src|href|srcset|action|data)="([^"]*)"', page)
    assert all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"<[^>]* on\w+=", page)
    assert len(ids(page)) == len(set(ids(page)))
    assert {target[1:] for target in targets if target.startswith("#")} <= set(ids(page))
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page
    for seen in observations():
        for png in (*seen.before, *seen.after):
            assert base64.b64encode(png).decode() in page
    assert report(ROWS, observations()) == page


def test_words_from_the_file_are_escaped() -> None:
    evil = {"model": EVIL, "data": EVIL}
    rows = [
        row(cell("bn", "fog", **evil), command=EVIL, machine={"cpu": EVIL}),
        failed(cell("tent", "fog", **evil), EVIL),
        row(cell("source", "fog", **evil)),
    ]
    page = report(rows)
    assert "alert" in page
    assert EVIL not in page
    assert page.count("<script") == 1


def test_sections_are_there_when_they_have_something_to_say(page: str) -> None:
    sections = {"run", "tables", "paper", "figures", "images", "cost", "failures", "reproduce"}
    assert sections <= set(ids(page))
    assert not sections & set(ids(report([])))
    few = ids(report([row(cell("bn", "fog", data="digits", images=200))]))
    assert sections.intersection(few) == {"run", "tables", "cost", "reproduce"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (grid({"source": 40.0, "bn": 30.0, "tent": 20.0}), "Lowest mean error: tent 20.0 ±"),
        (grid({"bn": 20.1, "tent": 20.0, "source": 40.0}),
         "The lowest errors are not told apart: tent, bn"),
        (grid({"bn": 20.1, "source": 20.0}),
         "No method is shown to have a lower error than the untouched network"),
        (grid({"bn": 30.0, "source": 20.0}),
         "No method is shown to have a lower error than the untouched network"),
        (grid({"bn": 30.0}), "Mean error: bn 30.0 ±"),
        (without_bits(grid({"source": 40.0, "bn": 30.0, "tent": 20.0})),
         "Lowest mean error: tent 20.0 %, source 40.0 % (not tested)"),
        (without_bits(grid({"bn": 30.0, "source": 20.0})),
         "No method is shown to have a lower error than the untouched network (not tested)"),
        ([failed(cell("bn"))], "No method was measured on every corruption"),
    ],
)  # fmt: skip
def test_the_title_says_what_was_found_and_no_more(rows: list[Row], words: str) -> None:
    assert title(comparisons(rows)).replace("\u00a0", " ").startswith(words)
    assert f"<h1>{title(comparisons(rows))}</h1>" in report(rows)


def test_the_headline_says_what_was_not_tested_or_not_measured() -> None:
    rows = everything()
    text = headline(rows, comparisons(rows))
    assert text.startswith("resnet20 on cifar10, severity 5, episodic, batches of 200, ")
    assert NOT_TESTED in text
    assert "Not measured on every corruption: tent." in text
    assert text.endswith(f"2 of {len(rows)} measurements failed.")
    tested = grid({"bn": 21.0, "tent": 20.0})
    assert headline(tested, comparisons(tested)).endswith(
        "±: 95\u00a0% interval over samples. All 4 measurements finished."
    )
    alone = without_bits(grid({"bn": 21.0}))
    assert NOT_TESTED not in headline(alone, comparisons(alone))


def test_commands_can_be_copied_as_they_are(page: str) -> None:
    (shown,) = re.findall(r"<pre [^>]*>(.*?)</pre>", page, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    assert text.splitlines() == ["ttapca bench resnet20.pth --data cifar10 --settings episodic"]


def test_the_page_says_what_is_told_apart() -> None:
    rows = grid({"bn": 21.0, "tent": 20.8})
    page = report(rows)
    assert '<section id="told-apart">' in page
    assert '<a href="#told-apart">' in page
    for line in error_table(one_comparison(rows)).rows:
        assert f"{line[1].text}</td>" in page
        assert f"{line[1].text}</span></li>" in page  # beside its bar
    assert "told-apart" not in report(rows[:1])


def test_the_picture_of_the_idea_is_whole() -> None:
    root = ET.parse(DOCS / "pictures" / "idea.svg").getroot()
    labels = root.attrib["aria-labelledby"].split()
    assert {each.attrib.get("id") for each in root} >= set(labels)
