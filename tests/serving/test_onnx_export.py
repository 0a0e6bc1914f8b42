"""An exported network answers in ONNX Runtime as the library does, and streams go on in either."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load
from torch import Tensor, nn

import scripted_classes
import ttapca
from adapters import NETWORKS
from oracles import images as samples
from oracles import left_untouched
from serving.conftest import smooth_images as pictures
from ttapca.cli import main
from ttapca.cli.app import run
from ttapca.datasets import TensorBatches, read_digits
from ttapca.errors import (
    ExportError,
    LayerOutputError,
    OptionError,
    SavedStreamError,
    ShapeError,
)
from ttapca.serving import export_onnx, with_tensors
from ttapca.serving.onnx_export import StatefulNetwork

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-4
PAGE = Path(__file__).parents[2] / "docs" / "production.md"
State = dict[str, NDArray[np.float32]]


def blocks(language: str) -> list[str]:
    """Return the blocks of the page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)


def program(containing: str) -> Any:
    """Return the program of the page in which something stands."""
    block = next(block for block in blocks("py") if containing in block)
    return compile(block, str(PAGE), "exec")


class Session:
    """An exported network in ONNX Runtime, and the state of its streams."""

    def __init__(self, path: Path, streams: int = 1) -> None:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = runtime.InferenceSession(path, options, ["CPUExecutionProvider"])
        inputs = self._session.get_inputs()[1:]
        self.state: State = {
            each.name: np.zeros((streams, *each.shape[1:]), np.float32) for each in inputs
        }

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and shifts for images of shape (streams, images, *shape)."""
        logits, shift, *state = self._session.run(None, {"images": images.numpy(), **self.state})
        self.state = dict(zip(self.state, state, strict=True))
        return torch.from_numpy(logits), torch.from_numpy(shift)

    def of_single_images(self, images: Tensor) -> Tensor:
        """Return the logits of images of one stream, which come one after the other."""
        return torch.cat([self(image[None, None])[0][0] for image in images])

    def load(self, data: bytes) -> None:
        """Go on where the stream of a file was."""
        saved = load(data)
        self.state = {
            name: saved[name].astype(np.float32).reshape(each.shape)
            for name, each in self.state.items()
        }

    def dump(self, like: bytes) -> bytes:
        """Return a file of the stream, made of that of another one."""
        saved = load(like)
        return with_tensors(
            like, {name: each.reshape(saved[name].shape) for name, each in self.state.items()}
        )


class InPyTorch:
    """A network with a filter, whose streams have single images and one condition each."""

    def __init__(self, network: nn.Module, fitted: ttapca.FittedFilter, folder: Path) -> None:
        self.network, self._fitted, self._file = network, fitted, folder / "stream"

    def answers(
        self, images: Tensor, begin: bytes | None = None
    ) -> tuple[Tensor, bytes, ttapca.Health]:
        """Return what an adapter answers, and the file and health of the stream by then."""
        options = {"filter": self._fitted, "forgetting": "online", "states": 1}
        with torch.no_grad(), ttapca.adapt(self.network, "wiener", **options) as adapter:
            stream = adapter.stream("any")
            if begin is not None:
                self._file.write_bytes(begin)
                stream.load(self._file)
            logits = [stream(image[None]) for image in images]
            stream.save(self._file)
            return torch.cat([*logits, torch.empty(0)]), self._file.read_bytes(), stream.health


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=TOLERANCE)


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
def in_pytorch(
    digits_network: nn.Module, filter_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> InPyTorch:
    network = copy.deepcopy(digits_network)
    return InPyTorch(network, ttapca.load(filter_folder), tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def digits() -> Tensor:
    """Test images, classes one after the other."""
    of = [(images, labels) for images, labels, *_ in TensorBatches(read_digits("test"), 250)]
    labels = torch.cat([torch.as_tensor(each) for _, each in of])
    return torch.cat([images for images, _ in of])[labels.argsort(stable=True)]


@pytest.fixture(scope="module")
def streams(digits: Tensor) -> dict[str, Tensor]:
    """Streams of single images by name, of 80 images each.

    A stream feeds back what its classes seem to be, so that rounding grows with the noise.
    """
    generator = torch.Generator().manual_seed(0)
    noisy = (digits + 0.2 * torch.randn(digits.shape, generator=generator)).clamp(0, 1)
    speckled = digits.where(torch.rand(digits.shape, generator=generator) > 0.04, 1.0)
    conditions = {"clean": digits, "noisy": noisy, "speckled": speckled, "dark": 0.5 * digits}
    shuffled = torch.randperm(len(digits), generator=generator)[:80]
    found = {}
    for name, images in conditions.items():
        found |= {f"{name}-shuffled": images[shuffled], f"{name}-sorted": images[:80]}
    found["noise-that-ends"] = torch.cat([noisy[:40], digits[40:80]])
    return found


STREAMS = [
    *(
        f"{condition}-{order}"
        for condition in ("clean", "noisy", "speckled", "dark")
        for order in ("shuffled", "sorted")
    ),
    "noise-that-ends",
]
Answered = dict[str, tuple[Tensor, bytes, ttapca.Health]]


@pytest.fixture(scope="module")
def by_library(in_pytorch: InPyTorch, streams: dict[str, Tensor]) -> Answered:
    """What the library answers to each stream."""
    return {name: in_pytorch.answers(images) for name, images in streams.items()}


@pytest.fixture(scope="module")
def new(in_pytorch: InPyTorch) -> bytes:
    """The file of a stream that has shown nothing."""
    return in_pytorch.answers(torch.empty(0))[1]


def test_the_streams_are_what_their_names_say(
    streams: dict[str, Tensor], by_library: Answered, digits_network: nn.Module
) -> None:
    """Else the tests below would not look at what they are for."""
    assert list(streams) == STREAMS
    for name, (logits, _, health) in by_library.items():
        assert health.shift is not None
        assert health.ordered is not None
        assert health.outliers is not None
        if name != "noise-that-ends":
            assert (health.shift > 0.2) == ("clean" not in name), name
            assert (health.ordered > 0.5) == ("sorted" in name), name
            assert (health.outliers > 0.01) == ("speckled" in name), name
        with torch.no_grad():
            assert float((logits - digits_network(streams[name])).abs().max()) > 0.1, name


@pytest.mark.parametrize("name", STREAMS)
def test_runtime_and_library_answer_alike(
    name: str, path: Path, streams: dict[str, Tensor], by_library: Answered
) -> None:
    """A pool with one state answers as the library does: `test_same_answers.py`."""
    session, (expected, file, health) = Session(path), by_library[name]
    assert_same(session.of_single_images(streams[name]), expected)
    known = load(file)
    assert {each for each in known if each.startswith(("state.layers", "state.chain"))}
    for part, value in session.state.items():
        found = torch.from_numpy(value.reshape(known[part].shape)).double()
        due = torch.from_numpy(known[part]).double()
        torch.testing.assert_close(found, due, rtol=TOLERANCE, atol=TOLERANCE, msg=part)
    shift = session.state["state.spectra.0.shift"].item()
    assert shift == pytest.approx(health.shift, abs=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["clean-sorted", "noisy-sorted", "speckled-shuffled", "noise-that-ends"]
)
def test_each_goes_on_where_the_other_has_stopped(
    name: str,
    path: Path,
    in_pytorch: InPyTorch,
    streams: dict[str, Tensor],
    by_library: Answered,
    new: bytes,
) -> None:
    answers = in_pytorch.answers
    expected, images = by_library[name][0], streams[name]
    session = Session(path)
    first = session.of_single_images(images[:30])
    second, file, *_ = answers(images[30:55], session.dump(new))
    session.load(file)
    assert_same(torch.cat([first, second, session.of_single_images(images[55:])]), expected)
    third = answers(images[:30])
    session.load(third[1])
    second = session.of_single_images(images[30:55])
    fourth = answers(images[55:], session.dump(third[1]))
    assert_same(torch.cat([third[0], second, fourth[0]]), expected)


def test_very_pale_digits_differ_by_what_float32_rounds(
    path: Path, in_pytorch: InPyTorch, digits: Tensor, filter_folder: Path
) -> None:
    """Grey borders are hundreds of deviations away from black ones: little is left in float32."""
    pale, folder = 0.3 * digits[:80] + 0.4, path.parent
    found = Session(path).of_single_images(pale)
    in_single, _, health = in_pytorch.answers(pale)
    double = copy.deepcopy(in_pytorch.network).double()
    exact, *_ = InPyTorch(double, ttapca.load(filter_folder), folder).answers(pale.double())
    assert health.shift is not None
    assert health.shift > 0.9
    for logits in (found, in_single):
        torch.testing.assert_close(logits.double(), exact.double(), rtol=0, atol=3 * TOLERANCE)


def test_streams_of_one_batch_do_not_know_each_other(
    path: Path, streams: dict[str, Tensor], by_library: Answered
) -> None:
    names = ["clean-sorted", "noisy-shuffled", "speckled-sorted"]
    together, shifts = Session(path, streams=3), torch.zeros(3, 1)
    for number in range(80):
        images = torch.stack([streams[name][number] for name in names])
        logits, shifts = together(images[:, None])
        expected = torch.stack([by_library[name][0][number] for name in names])
        assert_same(logits[:, 0], expected)
    assert shifts[:, 0].tolist() == pytest.approx(
        [by_library[name][2].shift for name in names], abs=TOLERANCE
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_image_leaves_its_stream_and_others_as_they_were(
    path: Path, streams: dict[str, Tensor], by_library: Answered, value: float
) -> None:
    names = ["noisy-sorted", "clean-shuffled"]
    session = Session(path, streams=2)
    broken = torch.full((2, 1, 1, 8, 8), value)
    assert session(broken)[1].tolist() == [[0], [0]]  # nothing was seen of them
    assert not any(each.any() for each in session.state.values())
    taken, due = [0, 0], [by_library[name][0] for name in names]
    for number in range(40):
        images = torch.stack(
            [streams[name][place] for name, place in zip(names, taken, strict=True)]
        )[:, None]
        hit = number % 3 == 1  # then the first stream has a broken image
        if hit:
            images[0, 0, 0, 4, 4] = value
        before = session.state
        logits, shift = session(images)
        for place, own in enumerate(due):
            if hit and place == 0:
                for part, now in session.state.items():
                    assert np.array_equal(now[0], before[part][0])
                assert shift[0].item() == before["state.spectra.0.shift"][0].item()
                continue
            assert_same(logits[place, 0], own[taken[place]])
            taken[place] += 1
    assert shift[0] > 0.2
    assert taken == [27, 40]


def test_what_the_command_says_and_the_file_states(said: tuple[Path, str]) -> None:
    path, words = said
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    facts = {each.key: each.value for each in model.metadata_props}
    state = json.loads(facts["ttapca_state"])
    assert facts["ttapca_layer"] == "conv1"
    assert {each["initial"] for each in state.values()} == {0.0}
    parts = {name: each["shape"] for name, each in state.items()}
    some = {"samples": [1], "independent": [1], "energies": [60], "shift": [1], "mean": [60]}
    some |= {"rest_energy": [1], "rest_mean": [64]}  # four pixels of the digits never vary
    expected = {f"state.spectra.0.{name}": size for name, size in some.items()}
    expected |= {"state.spectra.0.unusual": [1], "state.layers.moments": [2, 112]}
    expected |= {"state.layers.independent": [3], "state.layers.samples": [3]}
    expected |= {"state.chain.joint": [50, 10], "state.chain.recent": [2, 10]}
    expected |= {"state.chain.place": [1], "state.chain.features": [32]}
    expected |= {"state.chain.past_features": [65]}
    assert parts == {name: ["streams", *shape] for name, shape in expected.items()}
    shapes = {
        each.name: [place.dim_param or place.dim_value for place in each.type.tensor_type.shape.dim]
        for each in (*model.graph.input, *model.graph.output)
    }
    assert shapes == {
        "images": ["streams", 1, 1, 8, 8],
        **parts,
        "logits": ["streams", 1, 10],
        "shift": ["streams", 1],
        **{state[name]["next"]: shape for name, shape in parts.items()},
    }
    assert {each["next"] for each in state.values()} == {
        name.replace("state.", "next.") for name in state
    }
    kinds = {each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)}
    assert kinds == {onnx.TensorProto.FLOAT}
    said_on_page = next(each for each in blocks("text") if each.startswith("adapted.onnx"))
    assert words == said_on_page.replace("adapted.onnx", str(path), 1)


def test_the_parts_are_those_of_a_file_but_what_only_the_library_needs(
    path: Path, by_library: Answered
) -> None:
    saved = load(by_library["noisy-sorted"][1])
    assert saved.keys() - Session(path).state.keys() == {
        "state.errors",
        "state.outliers",
        "state.spectra.0.leeway",
    }


def test_the_documented_programs_run(
    path: Path,
    in_pytorch: InPyTorch,
    streams: dict[str, Tensor],
    by_library: Answered,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(path.parent)
    for stream, word in (("clean-shuffled", "as in training"), ("noisy-shuffled", "shifted")):
        images = streams[stream]
        space: dict[str, Any] = {"camera": images[:30].numpy()}
        exec(program("InferenceSession"), space)
        said = capsys.readouterr().out.splitlines()
        due = by_library[stream][0][:30].argmax(1)
        assert [line.split()[0] for line in said] == [f"[{each}]" for each in due]
        assert said[-1].split(maxsplit=1)[1] == word
    # On from the file of another stream ...
    file = Path("camera-7.stream")
    file.write_bytes(in_pytorch.answers(images[:40])[1])
    exec(program("load_file"), space)
    session = Session(path)
    session.state = space["state"]
    second = session.of_single_images(images[40:60])
    # ... and back into it.
    space["state"] = session.state
    exec(program("with_tensors"), space)
    third, *_ = in_pytorch.answers(images[60:], file.read_bytes())
    assert_same(torch.cat([second, third]), by_library["noisy-shuffled"][0][40:])


def test_a_part_that_no_file_of_a_stream_has(new: bytes) -> None:
    with pytest.raises(SavedStreamError, match=r"has no such part for `state\.nothing`"):
        with_tensors(new, {"state.nothing": np.zeros(1)})
    with pytest.raises(SavedStreamError, match="ends too early"):
        with_tensors(b"anything", {})


def test_the_state_of_several_streams_is_that_of_none(path: Path, new: bytes) -> None:
    several = Session(path, streams=3).state
    with pytest.raises(SavedStreamError, match="the names and sizes that they have in the file"):
        with_tensors(new, {"state.spectra.0.energies": several["state.spectra.0.energies"]})


def test_the_documented_program_writes_a_configuration_of_triton_that_fits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "adapted" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(path.read_bytes())
    exec(program("config.pbtxt"), {})
    config = (tmp_path / "adapted" / "config.pbtxt").read_text()
    assert config.count("{") == config.count("}")
    assert config.count("[") == config.count("]")
    tensor = r'name: "([\w.]+)" (?:\w+: "[\w.]+" )?data_type: TYPE_FP32 dims: (\[[\d, ]+\])'
    stated: dict[str, set[str]] = {}
    for name, dims in re.findall(tensor, config):
        stated.setdefault(name, set()).add(dims)
    model = onnx.load(path)
    sizes = {
        each.name: [place.dim_value for place in each.type.tensor_type.shape.dim[1:]]
        for each in (*model.graph.input, *model.graph.output)
    }
    # Triton fills no state without dimensions with zeros, and pairs inputs and outputs by rank.
    assert all(sizes.values())
    inputs = [each.name for each in model.graph.input]
    assert stated == {name: {str(sizes[name])} for name in (*inputs, "logits", "shift")}
    pairs = re.findall(r'input_name: "([\w.]+)" output_name: "([\w.]+)" (.*)', config)
    facts = {each.key: each.value for each in model.metadata_props}
    state = json.loads(facts["ttapca_state"])
    assert {name: after for name, after, _ in pairs} == {
        name: each["next"] for name, each in state.items()
    }
    befores, afters = sorted(state), sorted(each["next"] for each in state.values())
    assert [state[name]["next"] for name in befores] == afters
    assert {name: form for name, _, form in pairs} == {
        name: f"data_type: TYPE_FP32 dims: {sizes[name]}" for name in state
    }
    assert config.count("zero_data: true") == len(state)
    shown = next(block for block in blocks("text") if "sequence_batching" in block)
    assert config.startswith(shown.removesuffix("    ...\n"))


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


# Several images in a call, streams that are fixed, a filter that is truncated ---------------------


def test_three_images_of_a_stream_in_each_call(tmp_path: Path) -> None:
    """It is what the library does that never repeats a pass."""
    network = scripted_classes.network().float()
    fitted = ttapca.fit(network, "conv1", scripted_classes.source().float(), 40)
    path = tmp_path / "adapted.onnx"
    path.write_text("what was there before")
    network.pool.train()  # flags stay, too
    with left_untouched(network, scripted_classes.source()[:4].float()):
        state = export_onnx(network, fitted, path, input_shape=(8, 4, 4), streams=1, images=3)
    assert list(tmp_path.iterdir()) == [path]
    session = Session(path)
    assert {name: each.shape[1:] for name, each in session.state.items()} == state
    assert state["state.spectra.0.rest_mean"] == (128,)
    assert state["state.spectra.0.rest_energy"] == (1,)
    labels = [scripted_classes.labels_in_runs(60, 12), scripted_classes.shuffled_labels(60, 3)]
    for order, noise in zip(labels, (1.0, 2.0), strict=True):
        generator = torch.Generator().manual_seed(0)
        images = scripted_classes.pictures(order, 4).float()
        images[30:] += noise * torch.randn(images[30:].shape, generator=generator)
        session = Session(path)
        with ttapca.adapt(
            network, "wiener", filter=fitted, forgetting="online", states=1
        ) as adapter:
            adapter.predictor.single = True
            for batch in images.split(3):
                with torch.no_grad():
                    expected = adapter(batch)
                logits, shift = session(batch[None])
                assert_same(logits[0], expected)
                assert float(shift) == pytest.approx(adapter.health.shift, abs=TOLERANCE)
            assert shift > 0.5
            assert (adapter.health.ordered > 0.5) == (noise == 1.0)


# Before they are exported, networks of all kinds -------------------------------------------------


@pytest.fixture
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(216, 5)).eval()


def degraded(images: Tensor) -> Tensor:
    """Images of which the first third are clean; then come noise, and less contrast."""
    generator = torch.Generator().manual_seed(0)
    noisy = images + 0.5 * images.std() * torch.randn(images.shape, generator=generator)
    third = len(images) // 3
    return torch.cat([images[:third], noisy[third : 2 * third], 0.3 * images[2 * third :] + 0.4])


def assert_what_the_library_does(
    network: nn.Module, fitted: ttapca.FittedFilter, images: Tensor
) -> None:
    """Compare two streams of single images, which have what the tables of one batch show."""
    both = torch.stack([degraded(images), degraded(images.flip(2) + 0.1)], 1)
    stateful = StatefulNetwork(network, fitted)
    state = [torch.zeros(2, *shape) for shape in stateful.state.values()]
    found = []
    with torch.no_grad():
        for pair in both:
            logits, shift, *state = stateful(pair[:, None], *state)
            found.append(logits[:, 0])
    stateful.adapter.detach()
    with ttapca.adapt(network, "wiener", filter=fitted, forgetting="online", states=1) as adapter:
        for place in range(2):
            stream = adapter.stream(f"camera-{place}")
            with torch.no_grad():
                expected = torch.cat([stream(pair[place : place + 1]) for pair in both])
            assert_same(torch.stack(found)[:, place], expected)
            assert float(shift[place]) == pytest.approx(stream.shift, abs=TOLERANCE)
            assert stream.shift > 0.5


@pytest.mark.parametrize(
    ("route", "components"),
    [("folded", None), ("folded", 30), ("exact", None), ("exact", 40), ("dct", None), ("dct", 60)],
)
def test_filters_of_all_routes(network: nn.Module, route: Any, components: int | None) -> None:
    fitted = ttapca.fit(network, "0", pictures(600, seed=1), components, route=route)
    # Numbers that never vary in the source have no component, and may vary in the stream.
    assert (fitted.rest_ is None) == (fitted.n_components_ == 192)
    assert_what_the_library_does(network, fitted, pictures(75, seed=3))


@pytest.mark.parametrize("kind", NETWORKS)
def test_normalisation_layers_of_all_kinds(kind: str) -> None:
    network = NETWORKS[kind]().float()
    fitted = ttapca.fit(network, "conv1", samples(150).float(), 20)
    assert_what_the_library_does(network, fitted, samples(45, seed=8).float())


def test_a_filter_in_half_precision_takes_any_number_of_streams(
    network: nn.Module, tmp_path: Path
) -> None:
    """Outside of exports, a single image is multiplied by other matrices than a batch is."""
    ttapca.fit(network, "0", pictures(200, seed=1), 20).save(tmp_path / "filter", dtype="float16")
    stateful = StatefulNetwork(network, ttapca.load(tmp_path / "filter"))
    free = {0: torch.export.Dim("streams")}

    def given(streams: int) -> tuple[Tensor, ...]:
        state = [torch.zeros(streams, *shape) for shape in stateful.state.values()]
        return (3 * pictures(streams, seed=streams)[:, None], *state)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own insides
        expected = {streams: stateful(*given(streams)) for streams in (2, 5)}
        shapes = (free, (free,) * len(stateful.state))
        program = torch.export.export(stateful, given(3), dynamic_shapes=shapes).module()
        for streams, found in expected.items():
            torch.testing.assert_close(program(*given(streams)), found)


# What cannot be exported -------------------------------------------------------------------------


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
