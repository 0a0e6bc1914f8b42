"""What no other check reads: the example that a release is tried with, and the issue forms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / "readme_example.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_the_block_under_its_heading(script: ModuleType) -> None:
    text = (
        "## One\n```python\na = 1\n```\n## Two\n```sh\nls\n```\n```python\nb = 2\n```\n## Three\n"
    )
    assert script.example(text, "One") == "a = 1\n"
    assert script.example(text, "Two") == "b = 2\n"


@pytest.mark.parametrize(
    ("heading", "message"), [("Two", "no section called 'Two'"), ("One", "no Python block")]
)
def test_a_release_is_not_tried_with_nothing(
    script: ModuleType, heading: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        script.example("## One\n```sh\nls\n```\n## Three\n```python\na\n```\n", heading)


def test_readme_has_the_example_that_make_release_runs(script: ModuleType) -> None:
    called = (ROOT / "scripts" / "check_release.sh").read_text(encoding="utf-8")
    assert 'readme_example.py "Ten lines of use"' in called
    code = script.example(script.README.read_text(encoding="utf-8"), "Ten lines of use")
    assert "ttapca.fit(" in code
    assert "ttapca.adapt(" in code


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_as_github_wants_them(form: Path) -> None:
    # GitHub leaves out a form that breaks its rules, and says so to nobody who opens an issue.
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with pre-commit")
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    labels = [field["attributes"]["label"] for field in fields]
    assert fields
    assert len(set(ids)) == len(ids)
    assert len(set(labels)) == len(labels)
