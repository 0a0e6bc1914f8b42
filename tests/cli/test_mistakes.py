"""Ordinary mistakes: a sentence in the words of the command line, and never a traceback."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import ttapca
from ttapca.benchmark.results import Results
from ttapca.cli import benching
from ttapca.cli.app import COMMANDS, run
from ttapca.cli.reporting import StepReporter
from ttapca.cli.wording import on_the_command_line
from ttapca.errors import OutOfMemoryError, enough_memory, refused_memory

NETWORKS = """
import torch
from torch import nn

class ByTheMean(nn.Module):
    "Bright or dark, by the mean of the batch: lost when a batch has one class."
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
    def forward(self, x):
        self.stem(x)
        light = x.mean((1, 2, 3))
        away = light - light.mean()
        return torch.stack([-away, away + 1e-6], 1)

def mean(): return ByTheMean()
def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(),
                                 nn.Linear(100, 10))
def conv(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
def needy(width): return nn.Linear(width, 2)
def raising(): return {}["gone"]
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTAPCA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_mistakes.py").write_text(NETWORKS)
    sys.modules.pop("cli_mistakes", None)
    return tmp_path


@pytest.fixture
def weights(place: Path) -> Path:
    """Of `flat`, with statistics that are not those of a new network."""
    made: dict[str, Any] = {"__name__": "made"}
    exec(NETWORKS, made)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = made["flat"]()
        network[2].running_mean += 0.1
        network[4].weight *= 20  # predictions that depend on the image, not on the bias
    torch.save(network.state_dict(), place / "w.pth")
    return place / "w.pth"


def pictures(folder: Path, each: int = 40) -> Path:
    """Dark and bright ones, in folders by class."""
    random = np.random.default_rng(0)
    for name, light in (("bright", 150), ("dark", 0)):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = random.integers(0, 100, (8, 8, 3)) + light
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    facts: dict[str, object] = json.loads(capsys.readouterr().out)
    return facts


# Wrong answers without a word.


def test_eval_mixes_the_classes_of_a_folder(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(place / "images")
    command = ["eval", "cli_mistakes:mean", "--data", "images", "--batch-size", "20", "--json"]
    assert run(command) == 0
    facts = printed(capsys)
    # The class `bright` comes first in the alphabet, and the network says 1 for bright.
    assert facts["error"] == 100
    assert facts["chosen"] == "all 80 images, shuffled with seed 0"
    assert run([*command, "--order", "sorted"]) == 0
    facts = printed(capsys)
    assert 30 < float(facts["error"]) < 70  # type: ignore[arg-type]
    assert facts["chosen"] == "all 80 images, class by class"
    assert run([*command, "--limit", "20"]) == 0
    facts = printed(capsys)
    assert facts["chosen"] == "20 of 80 images, 10 of each class, shuffled with seed 0"
    assert facts["images"] == 20
    assert run([*command[:-1], "--limit", "20", "--seed", "3"]) == 0
    assert "10 of each class, shuffled with seed 3\n" in capsys.readouterr().out
    assert run([*command, "--order", "sortd"]) == 2
    assert "found 'sortd'. Did you mean `sorted`" in capsys.readouterr().err


def test_fit_sees_every_class(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures(place / "images")
    command = "fit cli_mistakes:mean --data images --layer stem --components 5 --limit 40 --to f"
    assert run(command.split()) == 0
    assert "images: 40 of 80 images, 20 of each class, shuffled with seed 0" in (
        capsys.readouterr().out
    )
    mean = float(ttapca.load("f").center_.mean())
    assert mean == pytest.approx((50 + 75) / 255, abs=0.02)  # of 50 and of 200


def test_bench_takes_some_of_each_class_and_says_so_in_its_cells(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(place / "images")
    command = (
        "bench cli_mistakes:mean --data images --methods source,eata --corruptions clean "
        "--settings online --batch-sizes 20 --images 20 --to r.sqlite"
    )
    assert run(command.replace(",eata", "").split()) == 0
    assert "bench: 20 of 80 images, 10 of each class of `images`" in capsys.readouterr().err
    with Results("r.sqlite", create=False) as results:
        (row,) = results.rows()
    assert row.cell.data == "images, 10 of each class"
    assert row.outcome.error == 100  # of both classes: of one it would be 50
    assert run(command.replace(",eata", "").replace(" --images 20", "").split()) == 0
    with Results("r.sqlite", create=False) as results:
        assert results.rows()[1].cell.data == "images"  # all images are what they ever were


def test_corrupted_images_of_some_of_each_class(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`corrupt` and `bench` choose the same images."""
    for path in (pictures(place / "images") / "dark").parent.rglob("*.png"):
        Image.open(path).resize((32, 32)).save(path)
    for limit, to in (("--limit 20", "some"), ("", "all")):
        words = f"corrupt images --to {to} --corruptions fog --severities 5 --jobs 1 {limit}"
        assert run(words.split()) == 0
    assert np.bincount(np.load("some/labels.npy")).tolist() == [10, 10]
    errors = []
    for to in ("some", "all"):
        words = (
            "bench cli_mistakes:mean --data images --methods source --corruptions fog --settings "
            f"online --images 20 --corrupted {to} --to {to}.sqlite --json"
        )
        capsys.readouterr()
        assert run(words.split()) == 0
        errors.append(json.loads(capsys.readouterr().out)[0]["calibration_error"])
    assert errors[0] == pytest.approx(errors[1], abs=3)  # other noise on the same pictures


def test_source_images_of_eata_are_part_of_the_key(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ttapca.benchmark.grid import expand
    from ttapca.benchmark.plan import Plan
    from ttapca.benchmark.protocol import adapted
    from ttapca.cli import bench_inputs
    from ttapca.cli.inputs import ModelChoice

    pictures(place / "images")
    monkeypatch.setattr(bench_inputs, "SOURCE_IMAGES", 20)
    (place / "with_norm.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), "
        "nn.Linear(144, 2))\n"
    )
    plan = Plan(data="images", methods=("eata",), corruptions=("clean",), settings=("online",))
    subject = bench_inputs.Inputs(ModelChoice("with_norm:net"), plan, Path("r")).subject(fit=False)
    (unit,) = expand(plan, subject)
    assert json.loads(unit.cells[0].options) == {
        "source": "20 of 80 images, 10 of each class, shuffled with seed 0"
    }
    with adapted(unit.cells[0], subject) as adapter:
        assert adapter(torch.rand(8, 3, 8, 8)).shape == (8, 2)


def test_the_table_has_a_row_for_each_batch_size(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"bench cli_mistakes:flat --weights {weights} --data digits --methods source,bn "
        "--corruptions fog,clean --settings online --batch-sizes 10,50 --images 50 --to r.sqlite"
    )
    assert run(words.split()) == 0
    table = capsys.readouterr().out
    with Results("r.sqlite", create=False) as results:
        rows = results.rows()
    for method in ("source", "bn"):
        for size in (10, 50):
            (line,) = [one for one in table.splitlines() if f" {method}, batch size {size} " in one]
            own = {
                row.cell.corruption: f"{row.outcome.error:.2f}"
                for row in rows
                if (row.cell.method, row.cell.batch_size) == (method, size)
            }
            assert re.findall(r"\d+\.\d\d", line) == [own["fog"], own["clean"]]


def test_clean_images_have_a_row_of_their_own_beside_several_severities(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"bench cli_mistakes:flat --weights {weights} --data digits --methods source --severities "
        "1,5 --corruptions fog,clean --settings online --images 50 --to r.sqlite"
    )
    assert run(words.split()) == 0
    table = capsys.readouterr().out
    for label in ("source, severity 1 ", "source, severity 5 ", "source, clean "):
        assert label in table
    assert benching.VARIED == ("batch_size", "components", "steps", "options")


def test_untrained_weights_are_warned_of(
    weights: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fit", "cli_mistakes:flat", "--data", "digits", "--components", "8", "--to"]
    assert run([*command, "f1"]) == 0
    assert "warning: the weights of `cli_mistakes:flat` look UNTRAINED" in capsys.readouterr().err
    assert run([*command, "f2", "--weights", str(weights)]) == 0
    assert "UNTRAINED" not in capsys.readouterr().err
    pictures(place / "images")
    assert run(["eval", "cli_mistakes:mean", "--data", "images"]) == 0
    assert "warning: no --weights were given" in capsys.readouterr().err
    assert run(["layers", "cli_mistakes:flat", "--input", "1x8x8"]) == 0
    assert capsys.readouterr().err == ""


def test_a_filter_is_replaced_by_force_only(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"fit cli_mistakes:flat --weights {weights} --data digits --components 8 --to f"
    assert run(command.split()) == 0
    kept = Path("f/config.json").read_bytes()
    assert run(command.replace("components 8", "components 5").split()) == 2
    told = capsys.readouterr().err
    assert "`f` holds a saved filter already" in told
    assert "replace it with --force." in told
    assert Path("f/config.json").read_bytes() == kept
    assert run([*command.replace("components 8", "components 5").split(), "--force"]) == 0
    assert ttapca.load("f").n_components_ == 5


@pytest.mark.filterwarnings("always::ttapca.errors.TruncationWarning")
def test_what_truncation_does_is_said_at_fit_and_at_eval(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = f"cli_mistakes:flat --weights {weights} --data digits"
    assert run(f"fit {network} --components 2 --to f".split()) == 0
    told = capsys.readouterr()
    said = r"drops \d\d\.\d\d % of the source variance and changes \d+\.\d % of the source predict"
    assert re.search(f"with learned gains it {said}", told.out)
    assert re.search(f"warning: with learned gains, .* {said}", told.err)
    assert run(f"eval {network} --method ttapca-relu --filter f".split()) == 0
    told = capsys.readouterr()
    assert re.match(f"warning: The filter of 2 components at `1` {said}", told.err)
    assert "warnings.warn" not in told.err
    assert run(f"eval {network} --method wiener --filter f".split()) == 0
    assert capsys.readouterr().err == ""


# Raw tracebacks, and the words of the command line.


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("layers cli_mistakes:conv --input 32x32", 2, "Name it with --input CxHxW"),
        ("layers cli_mistakes:needy", 2, r"`cli_mistakes:needy` takes \(width\): missing"),
        ("layers cli_mistakes:raising", 1, "has failed: KeyError: 'gone' .*line "),
        ("eval {flat} --weights log.csv --data digits", 1, "log.csv is not a whole"),
        ("eval {flat} --weights none.pth --data digits", 2, "(?s)--weights.*does not.*exist"),
        ("eval {own} --data digits --method ttapca-relu", 2, "`ttapca fit` and name it: --filter"),
        ("eval {own} --data digits --method tent --option lrr=1", 2, "Did you mean `lr`"),
        ("eval {own} --data digits --method tent --option lr", 2, "--option takes NAME=VALUE"),
        ("eval {own} --data digits --method ttt", 2, "`ttapca train --rotation-head LAYER` wrote"),
        ("eval {own} --data mixed", 1, "have one size; .* Give --size N to resize them"),
        ("eval {own} --data empty", 1, "is of no known layout"),
        ("eval {own} --data digits --batch-size 0", 2, "--batch-size"),
        ("eval {own} --data digits --severity 9", 2, "--severity"),
        ("eval {own} --data cifarc", 2, "give --corruption NAME and --severity N"),
        ("eval {own} --data cifarc --corruption fogg --severity 5", 2, "Did you mean `fog`"),
        ("fit {own} --data digits --to f --layer 9", 2, "no layer `9`"),
        ("fit {own} --data digits --to f --components 90", 1, "found --components 90. Ask for"),
        ("fit {own} --data digits --to f --limit 20", 1, "on at least 32 samples"),
        ("fit {own} --data digits --to log.csv", 2, "`log.csv` holds something else"),
        ("fit {own} --data digits --to f --dtype int8", 2, "`dtype` must be one of"),
        ("fit {own} --data small --layer 1 --to f", 1, "it does not.* with --size N"),
        ("bench {own} --data digits --option tent.lrr=1", 2, "Did you mean `lr`"),
        ("bench {own} --data digits --methods tnt", 2, "Did you mean `tent`"),
        ("bench {own} --data digits --methods wiener --layer 9", 2, "no layer `9`"),
        ("bench {own} --data digits --corruptions fogg", 2, "Did you mean `fog`"),
        ("bench {own} --data digits --filter none", 2, "(?s)--filter.*does not.*exist"),
        ("bench {own} --data digits --plan none.toml", 2, "Cannot read the plan none.toml"),
        ("bench {own} --data digits --to none/r.sqlite", 2, "there is no .*none"),
        ("bench {own} --data digits --to empty", 2, "--to names a file; empty is a folder"),
        ("export none.sqlite", 2, "no file of results at none.sqlite"),
        ("train none small-cnn --to run", 2, "neither a data set nor a path"),
    ],
)  # fmt: skip
def test_a_mistake_has_a_reason_and_a_code(
    words: str,
    code: int,
    message: str,
    weights: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "log.csv").write_text("epoch,loss\n1,2.0\n")
    (place / "empty").mkdir()
    pictures(place / "mixed", each=2)
    Image.new("RGB", (9, 8)).save(place / "mixed" / "dark" / "000.png")
    pictures(place / "small", each=20)
    (place / "cifarc").mkdir()
    np.save(place / "cifarc" / "labels.npy", np.zeros(50000, np.uint8))
    np.save(place / "cifarc" / "fog.npy", np.zeros((50000, 1, 1, 3), np.uint8))
    flat = "cli_mistakes:flat"
    given = words.format(flat=flat, own=f"{flat} --weights {weights}")
    assert run(given.split()) == code
    told = capsys.readouterr()
    assert re.search(message, told.err), told.err
    assert told.out == ""
    assert "prepare=" not in told.err
    assert not (place / "f").exists()


def advice() -> list[str]:
    """What every error of the library says, with a 1 for every formatted value."""
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("found n_components=90. Ask for 61 or fewer, or None for all.",
         "found --components 90. Ask for 61 or fewer."),
        ("replace it with `overwrite=True`.", "replace it with --force."),
        ('Name the layer: `classifier="head"`.', 'Name the layer: --option classifier="head".'),
        ("nothing to change", "nothing to change"),
    ],
)  # fmt: skip
def test_words(text: str, said: str) -> None:
    assert on_the_command_line(text) == said


def test_help_has_no_types_of_switches(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], *([name] for name in COMMANDS), ["data", "get"], ["data", "list"]):
        assert run([*words, "--help"]) == 0
        assert "bool" not in capsys.readouterr().out


def test_methods_fit_into_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line for line in lines if not line.startswith(" ")]
    assert names == list(ttapca.METHODS)
    assert "    options: alpha, prior" in lines
    assert sum("needs: " in line for line in lines) == len(names)


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "ttapca", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"ttapca {ttapca.__version__}\n")


# Memory.

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
    error: Exception,
    said: str,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    command = f"cli_mistakes:flat --weights {weights} --data digits"
    monkeypatch.setattr("ttapca.fitting.routes.fold", refuse)
    assert run(f"fit {command} --components 8 --to f".split()) == 1
    told = capsys.readouterr().err
    assert f"error: Fitting at `1` needs more memory than there is: {said}" in told
    assert told.endswith("ask for fewer components, or a smaller --batch-size.\n")
    monkeypatch.setattr("ttapca.cli.inputs.load", refuse)
    assert run(f"eval {command}".split()) == 1
    told = capsys.readouterr().err
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


def test_a_full_or_forbidden_place_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/root/secret")

    monkeypatch.setattr("ttapca.cli.data.inventory", refuse)
    assert run(["data", "list"]) == 1
    assert capsys.readouterr().err.endswith("error: Permission denied: /root/secret\n")


# Bars.


def test_the_bar_knows_how_much_there_is_and_names_what_has_no_batches() -> None:
    seen = []

    class Watch(StepReporter):
        def stage(self, name: str) -> None:
            super().stage(name)
            (task,) = self._progress.tasks
            seen.append((task.description, task.completed, task.total))

        def __call__(self, steps):
            for step in super().__call__(steps):
                seen.append(self._progress.tasks[0].total)
                yield step

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(0)).split(32)
    with Watch("fitting", console=Console(file=io.StringIO())) as progress:
        ttapca.fit(model, "0", data, 2, progress=progress)
    assert seen == [
        *[3, 3, 3],
        ("fitting: decomposing", 3, None),
        ("fitting: calibrating", 3, None),
        ("fitting: comparing predictions", 3, None),
    ]


def test_a_count_is_shown_where_it_is_known() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StepReporter("fitting", console=screen) as steps:
        list(steps([1, 2, 3]))
        steps._progress.refresh()
        assert "3/3" in screen.file.getvalue()  # type: ignore[attr-defined]
        screen.file.truncate(0)
        steps.stage("decomposing")
        steps._progress.refresh()
        shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "fitting: decomposing" in shown
    assert "/?" not in shown
    assert "3/3" not in shown
