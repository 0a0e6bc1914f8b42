from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

import ttapca
from ttapca import errors

ROOT = Path(__file__).parents[1]
PACKAGE = Path(ttapca.__file__).parent


def test_import_is_light() -> None:
    """Neither the package nor the corruptions load torch; the core loads nothing but torch."""
    heavy = ["matplotlib", "sklearn", "typer", "rich", "scipy", "pandas", "PIL", "cv2", "pooch"]
    code = (
        "import sys, ttapca; before = set(sys.modules); import ttapca.corruptions.writing; "
        "torch = 'torch' in sys.modules; new = set(sys.modules) - before; ttapca.adapt; "
        f"print(torch, [name for name in {heavy} if name in set(sys.modules) - new])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False []"


def test_the_stub_lists_the_public_names() -> None:
    stub = Path(ttapca.__file__).with_suffix(".pyi").read_text()
    names = re.findall(r"^from ttapca[\w.]+ import (\w+) as \1$", stub, re.M)
    assert sorted(ttapca.__all__) == sorted([*names, "__version__"]) == dir(ttapca)


def module_name(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


# The command has the name of the function, and a fit has a plan as a benchmark has one.
IN_TWO_ROOMS = {"fit", "plan"}


def test_no_two_modules_or_public_classes_share_a_name() -> None:
    # The package itself has the name of the paper's method.
    files = sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "__init__.py"})
    classes = re.compile(r"^class ([A-Z]\w*)", re.M)
    for names in (
        [module_name(path) for path in files],
        [name for path in files for name in classes.findall(path.read_text(encoding="utf-8"))],
    ):
        shared = {name for name, count in Counter(names).items() if count > 1}
        assert shared <= IN_TWO_ROOMS


def test_the_top_level_is_small() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    usual = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
    assert len(entries - usual) <= 14


def test_packages_are_attributes_and_nothing_else_is() -> None:
    assert ttapca.errors is errors
    with pytest.raises(AttributeError, match="`ttapca` has no attribute `fitt`"):
        _ = ttapca.fitt


def test_everything_public_is_there_and_documented() -> None:
    for name in ttapca.__all__:
        value = getattr(ttapca, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert value.__doc__, name


def test_every_error_is_also_a_builtin() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    classes = [value for value in found if value.__module__ == errors.__name__]
    assert len(classes) > 5
    builtins = (ValueError, KeyError, TypeError, RuntimeError, OSError, MemoryError)
    for value in classes:
        if issubclass(value, Warning):
            assert issubclass(value, errors.TtapcaWarning)
        elif value is not errors.TtapcaError:
            assert issubclass(value, errors.TtapcaError)
            assert issubclass(value, builtins)


def test_near_names() -> None:
    assert errors.did_you_mean("conv", ["conv1", "conv2", "fc"]) == (
        " Did you mean `conv2` or `conv1`?"
    )
    assert errors.did_you_mean("zzz", ["conv1"]) == ""


def python_blocks(page: Path) -> list[str]:
    """Return the programs of a page; sessions with `>>>` are doctests, which other tests run."""
    blocks = re.findall(
        r"^```python[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M
    )
    return [block for block in blocks if not block.startswith(">>>")]


# Their programs name files of the reader.
NOT_RUN = {ROOT / "docs" / "data.md", ROOT / "docs" / "networks.md"}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - NOT_RUN)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem
)
def test_documented_examples_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = python_blocks(page)
    if any("from transformers import" in block for block in blocks):
        pytest.importorskip("transformers", reason="comes with the extra hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace: dict[str, object] = {}
    for block in blocks:  # one after the other: a later one may use what an earlier one made
        exec(compile(block, page.name, "exec"), namespace)


def test_the_changelog_knows_the_version() -> None:
    assert f"## {ttapca.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {ttapca.__version__}" in (ROOT / "CITATION.cff").read_text()
