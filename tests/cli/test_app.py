"""The command line as a whole: exit codes, help, wording, memory, progress."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import typer
from rich.console import Console

import ttapca
from ttapca import cli
from ttapca.adaptation.chain_passes import Order
from ttapca.benchmark.rows import SETTINGS
from ttapca.cli import app as command_line
from ttapca.cli.console import HELP, ConsoleReporter, on_the_command_line
from ttapca.cli.data import TO_FETCH
from ttapca.cli.reproduce import QUICK_IMAGES
from ttapca.errors import (
    NotEnoughDataError,
    OptionError,
    OutOfMemoryError,
    SavedFilterError,
    enough_memory,
    refused_memory,
)
from ttapca.serving.limits import PoolLimits, RequestLimits
from ttapca.serving.stream_record import Mode
from ttapca.support.progress import Steps


@pytest.mark.parametrize(
    ("words", "code"),
    [("--version", 0), ("--help", 0), ("dmo", 2), ("layers --components 0", 2), ("", 2)],
)
def test_exit_codes(words: str, code: int, command) -> None:
    said = command(words, code)
    if words == "--version":
        assert said.out == f"ttapca {ttapca.__version__}\n"
    assert bool(said.err) == (code != 0) or not words


def refusing(error: BaseException):
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OptionError("lr is above 0; found -1."), 2, "error: lr is above 0; found -1.\n"),
        (NotEnoughDataError("found 5 images."), 2, "error: found 5 images.\n"),
        (SavedFilterError("not JSON."), 1, "error: not JSON.\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: Permission denied: /x\n"),
        (OSError(28, "No space left on device"), 1, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_codes(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, command
) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)
    failing.command()(lambda: refusing(error)())
    monkeypatch.setattr(command_line, "app", failing)
    assert command("", code).err == message


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("typer", "", "cli"),
        ("rich", "", "cli"),
        ("uvicorn", "serve digits", "serve"),
    ],
)
def test_a_missing_package_names_its_extra(package: str, words: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {words.split()}; "
        "from ttapca.cli import main; main()"
    )
    result = run_python(code)
    assert result.returncode == 1
    assert f"pip install 'ttapca[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_any_other_import_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError("No module named 'mine'", name="mine")
    monkeypatch.setattr(command_line, "run", refusing(error))
    with pytest.raises(ModuleNotFoundError, match="mine"):
        cli.main()
    monkeypatch.setattr(command_line, "run", lambda: 7)
    with pytest.raises(SystemExit, match="7"):
        cli.main()


HELPED = ("bench", "demo", "eval", "fit", "layers", "reproduce", "serve", "train")
SERVICE = """
from ttapca.cli import app
from ttapca.benchmark.filters import usual_fit
from ttapca.networks.source import NetworkSource, fingerprint
from ttapca.serving import http_server, metrics, pool, service, stream_store
fingerprint(NetworkSource("digits").load())
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ttapca.cli.app", {"torch", "cv2"}),  # nor may Tab wait for them
        (f"from ttapca.cli.app import run\nfor each in {HELPED}: run([each, '--help'])", {"torch"}),
        (SERVICE, {"cv2", "scipy", "pooch", "pandas", "matplotlib", "sklearn"}),
    ],
)  # fmt: skip
def test_packages_that_are_not_loaded(code: str, heavy: set[str]) -> None:
    found = run_python(f"{code}\nimport sys; print(sorted({heavy} & sys.modules.keys()))")
    assert found.stdout.endswith("[]\n"), found.stderr


def test_help_has_no_types_of_switches(command) -> None:
    for words in ("", *command_line.COMMANDS, "data get", "data list"):
        assert "bool" not in command(f"{words} --help").out


def test_a_terminal_without_unicode() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "ttapca", "methods"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode("latin-1").strip()


def advice() -> list[str]:
    """Return the message of every error in the library, with a 1 for each formatted value."""
    found = []
    for path in sorted(Path(ttapca.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found += [text for part in ast.walk(node.exc) if (text := spoken(part))]
    return found


def spoken(part: ast.AST) -> str:
    if isinstance(part, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "1" for v in part.values)
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""


def test_no_argument_of_python_reaches_the_terminal() -> None:
    """Every `name=` and every `ttapca.function` in an error has words for the command line."""
    python = re.compile(r"`\w+=[^`]*`|`ttapca\.\w+[`(]|fitted\.save|n_components=\d")
    of_python = [text for text in advice() if python.search(text)]
    assert len(of_python) > 10
    said = [on_the_command_line(text) for text in of_python if "module `ttapca" not in text]
    assert [text for text in said if python.search(text)] == []


def test_arguments_become_options() -> None:
    text = 'found n_components=90, or None for all. Use `overwrite=True` or `classifier="head"`.'
    said = 'found --components 90. Use --force or --option classifier="head".'
    assert on_the_command_line(text) == said


REFUSED = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 800000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (REFUSED, "800.0 GB were asked for at once"),
        (MemoryError("Unable to allocate 74.5 GiB for an array"), "Unable to allocate 74.5 GiB"),
        (MemoryError(), "an allocation was refused"),
    ],
)
def test_memory_that_is_not_there(
    error: Exception, said: str, weights: Path, monkeypatch: pytest.MonkeyPatch, command
) -> None:
    network = f"own:flat --weights {weights} --data digits"
    monkeypatch.setattr("ttapca.fitting.routes.fold", refusing(error))
    told = command(f"fit {network} --components 8 --to f", 1).err
    assert f"error: Fitting at `1` needs more memory than there is: {said}" in told
    assert told.endswith("ask for fewer components, or a smaller --batch-size.\n")
    monkeypatch.setattr("ttapca.datasets.load", refusing(error))
    told = command(f"eval {network}", 1).err
    assert told.startswith(f"error: This needs more memory than there is: {said}")
    assert "Use fewer or smaller images" in told


def test_other_failures_are_not_taken_for_memory() -> None:
    assert refused_memory(RuntimeError("mat1 and mat2")) is None
    with pytest.raises(RuntimeError, match="mat1"), enough_memory("Adding", "Add less."):
        raise RuntimeError("mat1")
    with (
        pytest.raises(OutOfMemoryError, match=r"^Adding needs more .* 800"),
        enough_memory("Multiplying", "Multiply less."),
        enough_memory("Adding", "Add less."),
    ):
        raise REFUSED


def test_fitting_reports_every_batch_and_the_steps_without_batches() -> None:
    told: list[tuple[object, ...]] = []
    notes: list[str] = []
    recorder = SimpleNamespace(
        advance=lambda *state: told.append(state), note=lambda text: notes.append(text)
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(0)).split(32)
    ttapca.fit(model, "0", data, 2, progress=Steps(recorder, "fit"))  # type: ignore[arg-type]
    assert [note.partition(",")[0] for note in notes] == ["fit: exact"]
    assert told == [
        *(("fit", done, 3) for done in range(4)),
        ("fit", 3, None, "decomposing"),
        ("fit", 3, None, "calibrating"),
        ("fit", 3, None, "comparing predictions"),
        ("fit", 3, None, "mirroring images"),
    ]


def shown(terminal: bool, lines: bool = False) -> str:
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=120, soft_wrap=True)
    with ConsoleReporter("cifar10", lines=lines, console=screen) as report:
        report.advance("reading [x].tar", 1, 2, "half")
        report._progress.refresh()
        report.advance("unpacking", 0, None, "slowly")
        report._progress.refresh()
        report.note("source [1]: failed")
        report.advance("reading [x].tar", 2, 2, "whole")
    return screen.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_bars_on_a_terminal_and_lines_elsewhere() -> None:
    assert shown(terminal=False) == "cifar10: source [1]: failed\n"
    assert shown(terminal=False, lines=True).endswith("failed\nreading [x].tar  whole\n")
    text = shown(terminal=True)
    for part in ("cifar10: source [1]: failed", "reading [x].tar", "1/2", "half", "slowly"):
        assert part in text


def parameters() -> dict[str, dict[str, str | None]]:
    """The help of each parameter of each command."""

    def of(command: Any, name: str) -> dict[str, dict[str, str | None]]:
        if hasattr(command, "commands"):
            parts = (of(each, key) for key, each in command.commands.items())
            return {key: found for part in parts for key, found in part.items()}
        context = command.make_context(name, [], resilient_parsing=True)
        each = command.get_params(context)
        return {name: {one.name: getattr(one, "help", None) for one in each}}

    return of(typer.main.get_command(command_line.app), "")


def test_every_option_has_words_and_every_word_an_option() -> None:
    found = parameters()
    assert {
        (command, name) for command, each in found.items() for name in each if not each[name]
    } == set()
    for command, words in HELP.items():
        known = found.get(command) or {name: "" for each in found.values() for name in each}
        assert set(words) <= {*known, "about"}, command


def test_words_that_list_names_list_all_of_them() -> None:
    assert HELP["all"]["settings"] == ", ".join(SETTINGS)
    assert HELP["get"]["names"] == f"Any of: {', '.join(TO_FETCH)}."
    assert f"{QUICK_IMAGES:,}" in HELP["reproduce"]["quick"]
    for mode in get_args(Mode):
        assert re.search(rf"\b{mode}\b", HELP["serve"]["mode"])
    for order in get_args(Order):
        assert re.search(rf"\b{order}\b", HELP["serve"]["order"])
    for limits in (PoolLimits(), RequestLimits()):
        for name in ("max_batch", "max_queue", "max_images", "max_resident", "max_streams"):
            if hasattr(limits, name):
                assert f"({getattr(limits, name):,})" in HELP["serve"][name]
