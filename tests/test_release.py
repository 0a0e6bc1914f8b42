"""The example that a release is tried with, and the issue forms."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
example = runpy.run_path(str(ROOT / "scripts" / "readme_example.py"))["example"]


def test_the_example_is_the_block_under_its_heading() -> None:
    text = (
        "## One\n```python\na = 1\n```\n## Two\n```sh\nls\n```\n```python\nb = 2\n```\n## Three\n"
    )
    assert example(text, "One") == "a = 1\n"
    assert example(text, "Two") == "b = 2\n"
    with pytest.raises(SystemExit, match="no section called 'Four'"):
        example(text, "Four")
    with pytest.raises(SystemExit, match="no Python block"):
        example(text, "Three")


def test_readme_has_the_example_that_make_release_runs() -> None:
    called = (ROOT / "scripts" / "check_release.sh").read_text(encoding="utf-8")
    assert 'readme_example.py "Ten lines of use"' in called
    code = example((ROOT / "README.md").read_text(encoding="utf-8"), "Ten lines of use")
    assert "ttapca.fit(" in code
    assert "ttapca.adapt(" in code


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_as_github_wants_them(form: Path) -> None:
    # GitHub silently leaves out a form that breaks its rules.
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit")
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    labels = [field["attributes"]["label"] for field in fields]
    assert fields
    assert len(set(ids)) == len(ids)
    assert len(set(labels)) == len(labels)
