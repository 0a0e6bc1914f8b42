from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import ttapca
from ttapca import cli
from ttapca.cli import app as command_line
from ttapca.errors import OptionError, SavedFilterError


def test_demo_prints_every_row() -> None:
    result = CliRunner().invoke(command_line.app, ["demo", "--epochs", "2", "--seed", "4"])
    assert result.exit_code == 0, result.output
    for method in ("source", "bn", "tent", "ttapca-relu", "ttapca-exp"):
        assert result.stdout.count(method) == 2  # episodic and online
    for column in ("clean", "noise", "blur", "contrast"):
        assert column in result.stdout
    assert "seed 4" in result.stdout
    assert "done in" in result.stderr
    assert "done in" not in result.stdout


def test_demo_learns_and_repairs() -> None:
    """The same numbers from the same seed, and the findings that the demo is there to show."""
    tables = [
        CliRunner().invoke(command_line.app, ["demo", "--epochs", "15"]).stdout for _ in range(2)
    ]
    assert tables[0] == tables[1]
    rows = [line.split("│") for line in tables[0].splitlines() if "│" in line]
    errors = {row[2].strip(): [float(cell) for cell in row[3:8]] for row in rows[:5]}
    clean, noise, *_, mean = zip(*errors.values(), strict=True)
    source, *adapted = mean
    assert clean[0] < 10
    assert max(adapted) < source - 20
    assert errors["tent"] == errors["bn"]  # one episodic step, logits from before it
    assert noise[4] < noise[1]  # the exponential filter helps against noise


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--version"], 0), (["--help"], 0), (["dmo"], 2), (["demo", "--epochs", "0"], 2), ([], 2)],
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
    assert list(rows) == list(ttapca.RECIPES)
    assert rows["bn"]["options"] == ["alpha", "prior"]
    assert rows["ttapca-relu"]["needs"] == "source data, unlabelled"
    assert command_line.run(["methods"]) == 0
    assert "tent" in capsys.readouterr().out
