"""The page about tables, figures and the report runs, and shows what it names."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from xml.etree import ElementTree as ET

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documentation() -> None:
    outcome = doctest.testfile(str(DOCS / "report.md"), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_its_pictures_are_there_and_small() -> None:
    names = re.findall(r"\]\((pictures/[^)]+)\)", (DOCS / "report.md").read_text())
    assert names
    for name in names:
        assert 1000 < (DOCS / name).stat().st_size < 150_000


def test_the_picture_of_the_idea_is_whole() -> None:
    root = ET.parse(DOCS / "pictures" / "idea.svg").getroot()
    labels = root.attrib["aria-labelledby"].split()
    assert {each.attrib.get("id") for each in root} >= set(labels)
