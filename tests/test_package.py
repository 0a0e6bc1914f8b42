from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ttapca
from ttapca import errors

ROOT = Path(__file__).parents[1]


def test_import_is_light() -> None:
    heavy = ["matplotlib", "sklearn", "fastapi", "typer", "rich", "scipy", "pandas", "PIL", "cv2"]
    code = f"import sys, ttapca; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_everything_public_is_there_and_documented() -> None:
    for name in ttapca.__all__:
        value = getattr(ttapca, name)
        if callable(value):
            assert value.__doc__, name


def test_every_error_is_also_a_builtin() -> None:
    for value in vars(errors).values():
        if isinstance(value, type) and value is not errors.TtapcaError:
            assert issubclass(value, errors.TtapcaError)
            assert issubclass(value, (ValueError, KeyError, TypeError, RuntimeError))


def test_near_names() -> None:
    assert errors.did_you_mean("conv", ["conv1", "conv2", "fc"]) == (
        " Did you mean `conv2` or `conv1`?"
    )
    assert errors.did_you_mean("zzz", ["conv1"]) == ""


def python_blocks(file: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), flags=re.S)


@pytest.mark.parametrize("file", ["README.md"])
def test_documented_examples_run(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = python_blocks(file)
    assert blocks
    for block in blocks:  # one after the other: a later one may use what an earlier one made
        exec(compile(block, file, "exec"), namespace)


def test_the_changelog_knows_the_version() -> None:
    assert f"## {ttapca.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {ttapca.__version__}" in (ROOT / "CITATION.cff").read_text()
