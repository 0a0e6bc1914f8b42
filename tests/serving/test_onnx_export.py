"""An exported network must do in ONNX Runtime what a pool does in PyTorch."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ttapca
from oracles import left_untouched
from ttapca.cli import main
from ttapca.cli.app import run
from ttapca.datasets import TensorBatches, read_digits
from ttapca.errors import ExportError, LayerOutputError, OptionError, ShapeError
from ttapca.serving import StreamPool, export_onnx
from ttapca.serving.stateful_network import StatefulNetwork

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-4
PAGE = Path(__file__).parents[2] / "docs" / "production.md"
State = dict[str, NDArray[np.float32]]


def blocks(language: str) -> list[str]:
    """Return the blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)


class Session:
    """An exported network in ONNX Runtime, and the state of its streams."""

    def __init__(self, path: Path, streams: int = 1) -> None:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = runtime.InferenceSession(path, options, ["CPUExecutionProvider"])
        inputs = self._session.get_inputs()[1:]
        self.state: State = {
            each.name: np.zeros((streams, each.shape[1]), np.float32) for each in inputs
        }

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and shifts for images of shape (streams, images, *shape)."""
        logits, shift, *state = self._session.run(None, {"images": images.numpy(), **self.state})
        self.state = dict(zip(self.state, state, strict=True))
        return torch.from_numpy(logits), torch.from_numpy(shift)


# An exported network has one set of gains for all that a stream shows, and repairs no pixels.
AS_EXPORTED: dict[str, Any] = {"states": 1, "outliers": False}


def conditions(images: Tensor, batches: int = 50, most: int = 24) -> Iterator[Tensor]:
    """Batches of changing sizes: first clean, then with noise, then with less contrast."""
    generator = torch.Generator().manual_seed(0)
    for number in range(batches):
        size = int(torch.randint(1, most + 1, (1,), generator=generator))
        some = images[torch.randint(len(images), (size,), generator=generator)]
        if number % 3 == 1 and number > batches // 4:
            some = some + 0.3 * torch.randn(some.shape, generator=generator)
        if number > 2 * batches // 3:
            some = 0.3 * some + 0.4
        yield some


def assert_same(session: Session, pool: StreamPool, images: Tensor) -> list[float]:
    """Compare predictions, shifts and states of one stream, and return the shifts."""
    shifts = []
    for batch in conditions(images):
        answer = pool.predict("camera", batch)
        logits, shift = session(batch[None])
        torch.testing.assert_close(logits[0], answer.logits, rtol=0, atol=TOLERANCE)
        shifts.append(answer.status.health.shift)
        assert float(shift) == pytest.approx(shifts[-1], abs=TOLERANCE)
    shown = pool._shelf.get("camera").latest.tensors()
    assert {f"stream_{name}" for name in shown} == session.state.keys()
    for name, value in shown.items():
        found = torch.from_numpy(session.state[f"stream_{name}"])
        expected = value.float().reshape(found.shape)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    return shifts


# The network of digits, by the command line ------------------------------------------------------


@pytest.fixture(scope="module")
def said(filter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The exported network, and what the command said."""
    path = tmp_path_factory.mktemp("export") / "adapted.onnx"
    words = io.StringIO()
    with redirect_stdout(words):
        assert run(f"export-onnx digits --filter {filter_folder} --to {path}".split()) == 0
    return path, words.getvalue()


@pytest.fixture(scope="module")
def path(said: tuple[Path, str]) -> Path:
    return said[0]


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return torch.cat([images for images, *_ in TensorBatches(read_digits("test"), 250)])


def test_digits_over_fifty_batches(
    path: Path, digits_network: nn.Module, filter_folder: Path, digits: Tensor
) -> None:
    with StreamPool(digits_network, ttapca.load(filter_folder), **AS_EXPORTED) as pool:
        shifts = assert_same(Session(path), pool, digits)
    assert shifts[0] == 0
    assert max(shifts) > 0.9


def test_streams_of_one_batch_do_not_know_each_other(path: Path, digits: Tensor) -> None:
    together, alone = Session(path, streams=3), [Session(path) for _ in range(3)]
    for number in range(4):
        images = digits[:30].reshape(3, 10, 1, 8, 8).roll(number, 1).clone()
        images[1] += 0.4 * torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(number))
        images[2] *= 0.2
        logits, shifts = together(images)
        found = [session(each[None]) for session, each in zip(alone, images, strict=True)]
        for all_of_them, each in zip((logits, shifts), zip(*found, strict=True), strict=True):
            torch.testing.assert_close(all_of_them, torch.cat(each), rtol=0, atol=TOLERANCE)
    assert shifts[0] < shifts[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_image_leaves_its_stream_and_others_as_they_were(
    path: Path, digits: Tensor, value: float
) -> None:
    session, sound = Session(path, streams=2), Session(path)
    images = digits[:12].reshape(2, 6, 1, 8, 8).clone()
    images[0] += 0.4 * torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    broken = torch.full_like(images, value)
    assert session(broken)[1].tolist() == [[0], [0]]  # nothing was seen of them
    assert not any(each.any() for each in session.state.values())
    _, earlier = session(images)
    sound(images[1:])
    before = session.state
    broken = images.clone()
    broken[0, 3, 0, 4, 4] = value
    logits, shift = session(broken)
    expected, its_shift = sound(broken[1:])
    assert earlier[0] > 0.5
    torch.testing.assert_close(shift, torch.cat([earlier[:1], its_shift]), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits[1], expected[0], rtol=0, atol=TOLERANCE)
    for name, value_now in session.state.items():
        assert np.array_equal(value_now[0], before[name][0])
        assert np.allclose(value_now[1], sound.state[name][0], rtol=1e-5)


def test_what_the_command_says_and_the_file_states(said: tuple[Path, str]) -> None:
    path, words = said
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    facts = {each.key: each.value for each in model.metadata_props}
    state = json.loads(facts["ttapca_state"])
    assert facts["ttapca_layer"] == "conv1"
    sizes = {"stream_samples": 1, "stream_energies": 61, "stream_mean": 61}
    assert {name: each["shape"] for name, each in state.items()} == {
        name: ["streams", size] for name, size in sizes.items()
    }
    assert {each["initial"] for each in state.values()} == {0.0}
    shapes = {
        each.name: [place.dim_param or place.dim_value for place in each.type.tensor_type.shape.dim]
        for each in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {
        "images": ["streams", "images", 1, 8, 8],
        **{name: ["streams", size] for name, size in sizes.items()},
        "logits": ["streams", "images", 10],
        "shift": ["streams", 1],
        **{state[name]["next"]: ["streams", size] for name, size in sizes.items()},
    }
    assert "opset 18, float32" in words
    assert "images (streams x images x 1 x 8 x 8), stream_samples" in words
    assert "logits, shift, next_samples, next_energies, next_mean" in words


def test_the_documented_loop_runs(
    path: Path, digits: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = next(block for block in blocks("py") if "InferenceSession" in block)
    monkeypatch.chdir(path.parent)
    exec(compile(loop, str(PAGE), "exec"), {"camera": digits[:60].reshape(3, 20, 1, 8, 8).numpy()})
    assert capsys.readouterr().out.count("as in training") == 3


def test_the_documented_configuration_of_triton_fits_the_file(path: Path) -> None:
    config = next(block for block in blocks("text") if "sequence_batching" in block)
    found = re.findall(
        r'name: "(\w+)"(?: output_name: "\w+")? data_type: TYPE_FP32 dims: (.*?])', config
    )
    stated = {name: [int(size) for size in re.findall(r"-?\d+", dims)] for name, dims in found}
    model = onnx.load(path)
    sizes = {
        each.name: [place.dim_value or -1 for place in each.type.tensor_type.shape.dim[1:]]
        for each in (*model.graph.input, *model.graph.output)
    }
    inputs = [each.name for each in model.graph.input]
    assert {name: stated[name] for name in (*inputs, "logits", "shift")} == {
        name: sizes[name] for name in (*inputs, "logits", "shift")
    }
    pairs = dict(re.findall(r'input_name: "(\w+)" output_name: "(\w+)"', config))
    facts = {each.key: each.value for each in model.metadata_props}
    state = json.loads(facts["ttapca_state"])
    assert pairs == {name: each["next"] for name, each in state.items()}
    initial = {name: stated[name.removeprefix("stream_")] for name in state}
    assert initial == {name: sizes[name] for name in state}
    assert config.count("zero_data: true") == len(state)


def test_the_file_names_no_place_of_this_machine(path: Path) -> None:
    content = path.read_bytes()
    homes = (path.parent, Path(ttapca.__file__).parent, Path(torch.__file__).parent, Path.home())
    assert [home for home in homes if bytes(home) in content] == []
    assert b".py" not in content


def test_mistakes_on_the_command_line(
    filter_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = f"--filter {filter_folder}"
    for words, code, message in [
        ("digits", 2, "Missing option '--filter'"),
        (chosen, 2, "Name one network"),
        (f"digits {chosen} --to nowhere/adapted.onnx", 2, "there is no"),
        (f"digits {chosen} --images 0", 2, "Invalid value for '--images'"),
        (f"digits {chosen} --input 8by8", 2, "--input takes a shape such as 3x32x32"),
        (f"digits {chosen} --input 1x9x9 --any-size", 1, "fit a filter"),
    ]:
        assert run(["export-onnx", *words.split()]) == code, words
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split()), words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_names_its_extra(
    package: str,
    filter_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"ttapca export-onnx digits --filter {filter_folder} --to {tmp_path / 'adapted.onnx'}"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert f"`{package}`, which is not installed; get it with: pip install 'ttapca[onnx]'" in (
        capsys.readouterr().err
    )


# A small network, by the function ----------------------------------------------------------------

SHAPE = (3, 8, 8)


def pictures(count: int, seed: int) -> Tensor:
    """Smooth random pictures between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, *SHAPE, generator=generator)
    return nn.functional.avg_pool2d(rough, 3, stride=1, padding=1)


@pytest.fixture
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(216, 5)).eval()


def test_truncated_cosines_over_fifty_batches(network: nn.Module, tmp_path: Path) -> None:
    fitted = ttapca.fit(network, "0", pictures(600, seed=1), 60, route="dct")
    path = tmp_path / "adapted.onnx"
    path.write_text("what was there before")
    network[2].train()  # flags stay, too
    with left_untouched(network, pictures(4, seed=2)):
        state = export_onnx(network, fitted, path, streams=1)
    assert list(tmp_path.iterdir()) == [path]
    session = Session(path)
    assert {name: each.shape[1] for name, each in session.state.items()} == state
    assert state["stream_rest_mean"] == 192
    with StreamPool(network, fitted, **AS_EXPORTED) as pool:
        assert max(assert_same(session, pool, pictures(200, seed=3))) > 0.9


def test_a_filter_in_half_precision_takes_any_number_of_images(
    network: nn.Module, tmp_path: Path
) -> None:
    """Outside of exports, a single image is multiplied by other matrices than a batch is."""
    ttapca.fit(network, "0", pictures(200, seed=1), 20).save(tmp_path / "filter", dtype="float16")
    stateful = StatefulNetwork(network, ttapca.load(tmp_path / "filter"))
    state = [torch.zeros(1, size) for size in stateful.state.values()]
    of_images = {1: torch.export.Dim("images")}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own insides
        example = (pictures(3, seed=2)[None], *state)
        shapes = (of_images, ({},) * len(state))
        program = torch.export.export(stateful, example, dynamic_shapes=shapes).module()
        batch = pictures(5, seed=3)[None]
        torch.testing.assert_close(program(batch, *state), stateful(batch, *state))


@pytest.mark.parametrize(
    ("route", "components"),
    [("folded", None), ("folded", 30), ("exact", None), ("exact", 40), ("dct", None), ("dct", 60)],
)
def test_what_is_exported_is_what_a_pool_does(
    network: nn.Module, route: Any, components: int | None
) -> None:
    fitted = ttapca.fit(network, "0", pictures(600, seed=1), components, route=route)
    assert (fitted.rest_ is None) == (components is None)
    stateful = StatefulNetwork(network, fitted)
    batches = [(batch, batch.flip(2) + 0.1) for batch in conditions(pictures(200, seed=3), 25, 9)]
    state = [torch.zeros(2, size) for size in stateful.state.values()]
    found = []
    with torch.no_grad():
        for both in batches:
            logits, _, *state = stateful(torch.stack(both), *state)
            found.append(logits)
    stateful.detach()
    with StreamPool(network, fitted, input_shape=SHAPE, **AS_EXPORTED) as pool:
        for logits, both in zip(found, batches, strict=True):
            for number, images in enumerate(both):
                expected = pool.predict(f"camera-{number}", images).logits
                torch.testing.assert_close(logits[number], expected, rtol=0, atol=TOLERANCE)
        assert pool.status("camera-1").health.shift > 0.5


class Branching(nn.Module):
    """Does something else with bright images than with dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.head = nn.Linear(216, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(self.stem(x).flatten(1))
        return found if x.mean() > 0.5 else -found


class Skipping(Branching):
    """Has a layer that it does not call any more."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.new_zeros(len(x), 216) if self.skips else self.stem(x).flatten(1))


class Mapped(Branching):
    """Returns logits among other things."""

    def forward(self, x: Tensor) -> Tensor:
        return {"logits": self.head(self.stem(x).flatten(1))}


def skipping() -> nn.Module:
    network = Skipping()
    network.skips = True
    return network


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (Branching, {}, ExportError, "torch cannot write this one: .* `images=`.*StreamPool"),
        (skipping, {}, LayerOutputError, "must call the layer of its filter, `stem`"),
        (Mapped, {}, LayerOutputError, "logits of shape .images, classes.; found dict"),
        (lambda: Branching().double(), {}, OptionError, "on cpu in float64. Convert"),
        (Branching, {"images": 0}, OptionError, "`images`.*from 1 on"),
        (Branching, {"streams": 1.5}, OptionError, "`streams`.*whole number"),
        (Branching, {"input_shape": (3, 9, 9)}, ShapeError, "fitted on samples"),
    ],
)
def test_what_cannot_be_exported(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    network, source = make().train(), Skipping()
    network.load_state_dict(source.state_dict())
    fitted = ttapca.fit(source, "stem", pictures(100, seed=1))
    modules = dict(network.named_modules())
    with pytest.raises(error, match=message):
        export_onnx(network, fitted, tmp_path / "adapted.onnx", **options)
    assert list(tmp_path.iterdir()) == []
    assert dict(network.named_modules()) == modules
    assert all(each.training and not each._forward_pre_hooks for each in modules.values())


def test_a_filter_that_does_not_know_the_images(tmp_path: Path) -> None:
    network = Skipping()
    fitted = ttapca.fit(network, "head", pictures(100, seed=1), 3)
    with pytest.raises(OptionError, match="with `input_shape=`"):
        export_onnx(network, fitted, tmp_path / "adapted.onnx")
    with pytest.raises(OptionError, match=r"must take images of shape \(1, 8, 8\)"):
        export_onnx(network, fitted, tmp_path / "adapted.onnx", input_shape=(1, 8, 8))
