from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import ttapca
from ttapca import cli
from ttapca.cli import app as command_line
from ttapca.errors import OptionError, SavedFilterError


def errors_by_row(text: str) -> dict[str, list[float]]:
    """The demo's first table, by the names of its rows."""
    rows = re.findall(r"^ (Mean of 15|[A-Z]\w+)((?: +\d+\.\d){8})", text, re.MULTILINE)
    return {name: [float(value) for value in values.split()] for name, values in rows[:17]}


@pytest.mark.slow
def test_demo_repairs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method in both settings, and the findings that the demo is there to show."""
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(command_line.app, ["demo", "--to", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split("Mean of 15")) == 3  # episodic and online
    found = errors_by_row(result.stdout)
    readme = errors_by_row((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"))
    assert found.keys() == readme.keys()
    assert len(found) == 17
    for name, errors in found.items():
        # Rounding differs from processor to processor: one digit is 0.17 points.
        assert errors == pytest.approx(readme[name], abs=0.55)
    assert f"The report: {tmp_path / 'demo' / 'report.html'}" in result.stdout
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "ttapca-relu" in page
    assert "done in" in result.stderr
    again = CliRunner().invoke(command_line.app, ["demo", "--to", str(tmp_path / "demo")])
    assert again.stdout == result.stdout
    assert "0 cells to run" in again.stderr


def test_reproduce_runs_both_tables_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    words = ["reproduce", "digits", "digits", "--methods", "source,bn", "--to", str(tmp_path / "r")]
    result = CliRunner().invoke(command_line.app, words)
    assert result.exit_code == 0, result.output
    assert "about 0:00:" in result.stderr
    assert result.stdout.count("Mean of 15") == 2
    assert (tmp_path / "r" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reproduce cifar100", "No network for `cifar100` ships with ttapca"),
        ("reproduce digits nothing", "`nothing` is neither a packaged network nor a file"),
        ("reproduce digits digits --quick", "has 596 test images; asked for are 1,000"),
    ],
)
def test_reproduce_refuses(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert command_line.run(words.split()) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["--help"], 0), (["dmo"], 2), (["demo", "--seed", "-1"], 2), ([], 2)],
    ids=str,
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(arguments) == code
    captured = capsys.readouterr()
    if arguments == ["--version"]:
        assert captured.out == f"ttapca {ttapca.__version__}\n"
    assert bool(captured.err) == (code != 0) or not arguments


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OptionError("lr is above 0; found -1."), 2, "error: lr is above 0; found -1.\n"),
        (SavedFilterError("not JSON."), 1, "error: not JSON.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(command_line, "app", failing)
    assert command_line.run([]) == code
    assert capsys.readouterr().err == message


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("package", "extra"), [("typer", "cli"), ("rich", "cli")])
def test_a_missing_package_names_its_extra(package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from ttapca.cli import main; main()"
    result = run_python(code)
    assert result.returncode == 1
    assert f"pip install 'ttapca[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_any_other_import_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> int:
        raise ModuleNotFoundError("No module named 'mine'", name="mine")

    monkeypatch.setattr(command_line, "run", run)
    with pytest.raises(ModuleNotFoundError, match="mine"):
        cli.main()


def test_main_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "run", lambda: 7)
    with pytest.raises(SystemExit, match="7"):
        cli.main()


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["methods", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ttapca.METHODS)
    assert rows["bn"]["options"] == ["alpha", "prior"]
    assert rows["ttapca-relu"]["needs"] == "source data, unlabelled"
    assert command_line.run(["methods"]) == 0
    assert "tent" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["fit --help", "train --help", "methods", "demo --help"])
def test_a_terminal_that_has_few_letters(words: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ttapca", *words.split()],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode("latin-1").strip()
