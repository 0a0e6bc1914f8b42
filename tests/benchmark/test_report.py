"""The page as text; `test_page.py` opens it in a browser."""

from __future__ import annotations

import base64
import dataclasses
import doctest
import hashlib
import html
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmark.synthetic_rows import cell, failed, observations, paper_grid, row
from ttapca.benchmark import Results, cells
from ttapca.benchmark.glossary import SETTINGS, glossary
from ttapca.benchmark.report_page import report
from ttapca.cli import app as command_line
from ttapca.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [*paper_grid()[:-16], failed(cell("ttapca-exp", "fog"))]
EVIL = '<script>alert("x")</script>'


def ids(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', page)


@pytest.fixture(scope="module")
def page() -> str:
    return report(ROWS, observations())


def test_everything_is_inside(page: str) -> None:
    assert page.count("<script") == 1
    assert '<link rel="icon" href="data:,">' in page  # else browsers ask a server for an icon
    targets = re.findall(r'\b(?:src|href|srcset|action|data)="([^"]*)"', page)
    assert all(target.startswith(("#", "data:")) for target in targets)
    assert not re.search(r"<[^>]* on\w+=", page)
    assert len(ids(page)) == len(set(ids(page)))
    assert {target[1:] for target in targets if target.startswith("#")} <= set(ids(page))


def test_the_same_rows_give_the_same_page(page: str) -> None:
    assert report(ROWS, observations()) == page


def test_the_policy_allows_this_script_and_no_other(page: str) -> None:
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_words_from_the_file_are_escaped() -> None:
    rows = [
        row(cell("bn", "fog", model=EVIL, data=EVIL), command=EVIL, machine={"cpu": EVIL}),
        failed(cell("tent", "fog", model=EVIL, data=EVIL), EVIL),
        row(cell("source", "fog", model=EVIL, data=EVIL)),
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


def test_images_are_those_of_the_observations(page: str) -> None:
    for seen in observations():
        for png in (*seen.before, *seen.after):
            assert base64.b64encode(png).decode() in page


def test_methods_and_settings_are_explained() -> None:
    rows = [row(cell("tent", "fog")), row(cell("bn", "fog", setting="online"))]
    yours = dataclasses.replace(cell("bn", "fog"), method="yours")
    rows.append(dataclasses.replace(rows[0], cell=yours))
    explained = dict(glossary(rows))
    assert list(explained) == ["tent", "bn", "episodic", "online"]
    assert explained["tent"] == METHODS["tent"].summary
    page = report(rows)
    assert all(f"<dt>{word}</dt><dd>{explained[word]}</dd>" in page for word in explained)


def test_the_glossary_is_complete() -> None:
    assert set(SETTINGS) == set(cells.SETTINGS)


def test_commands_can_be_copied_as_they_are(page: str) -> None:
    (shown,) = re.findall(r"<pre [^>]*>(.*?)</pre>", page, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    assert text.splitlines() == ["ttapca bench resnet20.pth --data cifar10 --settings episodic"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.sqlite"
    with Results(results) as file:
        file.add([row(cell("bn", "fog"))])
    page = tmp_path / "report.html"
    assert command_line.run(["report", str(results), "--to", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: 1 measurement\n"
    assert "</html>" in page.read_text()


def test_the_documentation_runs_and_shows_what_it_names() -> None:
    outcome = doctest.testfile(str(DOCS / "report.md"), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0
    names = re.findall(r"\]\((pictures/[^)]+)\)", (DOCS / "report.md").read_text())
    assert names
    for name in names:
        assert 1000 < (DOCS / name).stat().st_size < 150_000


def test_the_picture_of_the_idea_is_whole() -> None:
    root = ET.parse(DOCS / "pictures" / "idea.svg").getroot()
    labels = root.attrib["aria-labelledby"].split()
    assert {each.attrib.get("id") for each in root} >= set(labels)
