"""The public names of the package, and the pages of documentation about it."""

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

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "bench.md").read_text()


def test_public_names() -> None:
    for name in ttapca.benchmark.__all__:
        assert getattr(ttapca.benchmark, name) is not None
    with pytest.raises(AttributeError, match="has no attribute `everything`"):
        _ = ttapca.benchmark.everything


def test_reading_results_does_not_wait_for_torch() -> None:
    code = "import sys; from ttapca.benchmark import Results; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize("name", ["bench.md", "report.md"])
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testfile(str(DOCS / name), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0
    for picture in re.findall(r"\]\((pictures/[^)]+)\)", (DOCS / name).read_text()):
        assert 1000 < (DOCS / picture).stat().st_size < 150_000


def test_the_page_knows_every_option_and_its_plan_is_one() -> None:
    [block] = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)
    assert Plan(**tomllib.loads(block)).method["tent"]["filter"] is True
    told = set(re.findall(r"\| `--[a-z-]+` \| `([a-z_]+)` \|", PAGE))
    assert told == set(NAMES) - {"model", "data", "method"}


@pytest.mark.parametrize("name", ["paper-table1", "paper-table2", "paper-rank", "paper-steps"])
def test_the_page_counts_the_measurements_of_presets(name: str) -> None:
    plan = read_preset(name)
    filtered = sum(method.startswith("ttapca") for method in plan.methods)
    ranked = filtered * max(1, len(plan.components)) + len(plan.methods) - filtered
    count = len(plan.corruptions) * len(plan.seeds) * max(1, len(plan.steps)) * ranked
    assert re.search(rf"`{name}` \|.*\| {count} \|", PAGE)
