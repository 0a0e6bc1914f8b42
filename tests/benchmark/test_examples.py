"""Every public name of the room is there, and the page about it runs."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ttapca.benchmark
from ttapca.benchmark import Plan, read_preset
from ttapca.benchmark.plan import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"


def test_public_names() -> None:
    for name in ttapca.benchmark.__all__:
        assert getattr(ttapca.benchmark, name) is not None
    with pytest.raises(AttributeError, match="has no `everything`"):
        _ = ttapca.benchmark.everything


def test_reading_results_does_not_wait_for_torch() -> None:
    code = "import sys; from ttapca.benchmark import Results; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_the_plan_of_the_documentation() -> None:
    [block] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.S)
    plan = Plan(**tomllib.loads(block))
    assert plan.method["tent"]["filter"] is True


def test_the_documentation_knows_every_option() -> None:
    page = PAGE.read_text()
    told = set(re.findall(r"\| `--[a-z-]+` \| `([a-z_]+)` \|", page))
    assert told == set(NAMES) - {"model", "data", "method"}


def test_the_documentation_counts_the_results() -> None:
    for name in ("paper-table1", "paper-table2", "paper-rank", "paper-steps"):
        plan = read_preset(name)
        filtered = sum(method.startswith("ttapca") for method in plan.methods)
        ranked = filtered * max(1, len(plan.components)) + len(plan.methods) - filtered
        count = len(plan.corruptions) * len(plan.seeds) * max(1, len(plan.steps)) * ranked
        assert re.search(rf"`{name}` \|.*\| {count} \|", PAGE.read_text())
