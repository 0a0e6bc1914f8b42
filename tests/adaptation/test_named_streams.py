"""Many streams over one model: apart, saved, loaded, listed and dropped, whatever the method."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ttapca
from adapters import BATCHES, CASES, DATA, X, adapted, learns
from oracles import images
from ttapca import Adapter, networks
from ttapca.adaptation.guards import CollapseGuard
from ttapca.errors import OptionError, SavedStreamError
from ttapca.spectral.state_files import SavedStream

# Noise, single images, another offset: what a stream in small may be.
STREAM = [3 * X, X[:1] + 0.5, X[1:2] * 2, X + 0.3, X[2:3], 2 * X]
OTHER = [0.5 * batch + 1 for batch in reversed(STREAM)]
OURS = "tent over wiener"  # has something of every kind: values, weights, an optimiser
every_method = pytest.mark.parametrize(("method", "norm"), CASES)


def run(one: Any, batches: list[Tensor]) -> list[Tensor]:
    return [one(batch) for batch in batches]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@every_method
def test_two_streams_in_turn_are_two_adapters(method: str, norm: str) -> None:
    """Also where one of them meets broken batches, which are counted and change nothing."""
    alone, apart, shared = (adapted(method, norm) for _ in range(3))
    left, right = shared.stream("left"), shared.stream("right")
    for one, other, bad in zip(STREAM, OTHER, 3 * [math.nan, math.inf], strict=True):
        assert torch.equal(left(one), alone(one))
        assert torch.equal(right(other), apart(other))
        right(X.where(torch.arange(12).reshape(12, 1, 1, 1) != 5, bad))
    assert_same(run(shared, STREAM), run(adapted(method, norm), STREAM))  # which was never called
    assert (left.samples, left.batches) == (39, 6)
    assert shared.skipped == 6
    assert bool(shared.updates) == learns(method)


@every_method
def test_all_streams_go_on_where_an_adapter_was_saved(
    method: str, norm: str, tmp_path: Path
) -> None:
    """Also after a pickle, a deep copy and a file of one stream; as if never interrupted."""
    adapter = adapted(method, norm)
    camera = adapter.stream("camera")
    run(adapter, OTHER[:3])
    run(camera, STREAM[:3])
    torch.save(adapter.state_dict(), tmp_path / "all.pt")
    camera.save(tmp_path / "camera.stream")
    restored, loaded = adapted(method, norm), adapted(method, norm)
    restored.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True))
    assert (restored.updates, restored.skipped) == (adapter.updates, adapter.skipped)
    loaded.stream("another name").load(tmp_path / "camera.stream")
    twins = [restored, copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = run(camera, STREAM[3:]), run(adapter, OTHER[3:])
    for twin in twins:
        assert set(twin.streams) == {"default", "camera"}
        assert_same(run(twin.stream("camera"), STREAM[3:]), expected[0])
        assert_same(run(twin, OTHER[3:]), expected[1])
    assert_same(run(loaded.stream("another name"), STREAM[3:]), expected[0])
    assert_same(run(loaded, STREAM), run(adapted(method, norm), STREAM))


ANOTHER_PROCESS = """
import sys, torch
from oracles import images
from adapters import adapted
from adaptation.test_named_streams import STREAM, run
torch.set_num_threads(1)
camera = adapted(sys.argv[1]).stream("camera")
camera.load(sys.argv[2])
torch.save(run(camera, STREAM[3:]), sys.argv[3])
"""


def test_a_stream_goes_on_in_another_process(tmp_path: Path) -> None:
    camera = adapted(OURS).stream("camera")
    run(camera, STREAM[:3])
    camera.save(tmp_path / "stream")
    command = [sys.executable, "-W", "ignore", "-c", ANOTHER_PROCESS, OURS]
    subprocess.run(
        [*command, str(tmp_path / "stream"), str(tmp_path / "logits")],
        cwd=Path(__file__).parents[1],
        timeout=1200,
        check=True,
    )
    assert_same(run(camera, STREAM[3:]), torch.load(tmp_path / "logits", weights_only=True))


def test_streams_are_listed_looked_at_reset_and_dropped() -> None:
    adapter = adapted("wiener")
    first, second = adapter.stream("first"), adapter.stream("second")
    assert adapter.streams == ("default",)  # to name a stream makes none
    assert (second.samples, second.shift) == (0, 0.0)
    for _ in range(5):
        first(3 * X)
    expected = second(X)
    assert adapter.streams == ("default", "first", "second")
    assert first.shift > second.shift
    assert repr(first) == f"NamedStream('first', 60 samples in 5 batches, shift {first.shift:.2f})"
    with torch.no_grad():
        during = adapter.model(X)
        assert (first.samples, first.batches) == (60, 5)
        assert torch.equal(adapter.model(X), during)  # to look at another changes nothing
    adapter.reset()
    assert (first.samples, second.samples) == (60, 12)
    second.reset()
    assert (first.samples, second.samples) == (60, 0)
    assert torch.equal(second(X), expected)
    first.drop()
    first.drop()
    assert adapter.streams == ("default", "second")
    assert torch.equal(first(X), expected)  # a new one of that name
    adapter(3 * X)
    adapter.stream("default").drop()
    assert "default" in adapter.streams
    assert torch.equal(adapter(X), expected)
    for name in ("", None, 7):
        with pytest.raises(OptionError, match="name of a stream must be text, not empty; found"):
            adapter.stream(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("forgetting", ["episodic", "online", "continual"])
def test_forgetting_is_that_of_each_stream(forgetting: str) -> None:
    adapter = adapted("ttapca-relu", forgetting=forgetting)
    left, right = adapter.stream("left"), adapter.stream("right")
    first = left(X)
    run(right, BATCHES)
    assert torch.equal(left(X), first) == (forgetting == "episodic")
    before = right.samples
    left.start_condition()
    assert (left.samples == 0) == (forgetting != "continual")
    assert right.samples == before == (12 if forgetting == "episodic" else 60)
    left.reset()
    assert torch.equal(left(X), first)


@pytest.mark.parametrize("action", ["rollback", "reset"])
def test_a_guard_watches_each_stream_by_itself(action: Any, tmp_path: Path) -> None:
    def guarded() -> Adapter:
        guard = CollapseGuard(action, window=2)
        return adapted("tent", guard=guard, lr=0.15, logits="after")

    alone, shared = guarded(), guarded()
    left, right = shared.stream("left"), shared.stream("right")
    for batch in 8 * BATCHES:
        assert torch.equal(left(batch), alone(batch))
        right(batch[:3])
    assert alone.events, "the learning rate must lead to a collapse"
    left.save(tmp_path / "left")
    right.load(tmp_path / "left")  # whose window has another length
    assert_same(run(right, BATCHES), run(alone, BATCHES))


def test_a_thread_waits_while_another_has_switched_off() -> None:
    """But copies and pickles of the adapter do not: each has a lock for itself."""
    adapter = adapted("tent")
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    plain, expected = adapted("source")(X), adapted("tent")(X)
    with ThreadPoolExecutor(2) as pool:
        with adapter.disabled():
            waiting = pool.submit(adapter, X)
            assert torch.equal(adapter(X), plain)
            for twin in twins:
                assert torch.equal(pool.submit(twin, X).result(timeout=300), expected)
            assert not waiting.done()
        assert torch.equal(waiting.result(timeout=300), expected)


def test_threads_take_turns_each_with_its_stream() -> None:
    adapter = adapted(OURS)
    expected = {number: run(adapted(OURS), OTHER[number:]) for number in range(4)}
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda n: run(adapter.stream(f"thread {n}"), OTHER[n:]), expected)
        for one, other in zip(found, expected.values(), strict=True):
            assert_same(one, other)


# Of a state, what has the precision of the model; the rest is few numbers, always in float64.
OF_THE_MODEL = ("energies", "mean", "rest_mean", "moments")


def precisions(adapter: Adapter, path: Path) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """What is kept that follows the model, and the rest of the states of streams."""
    kept = [
        *adapter.surfaces.parameters(),
        *adapter.surfaces.buffers(),
        *adapter.predictor.tensors(),
    ]
    rest: list[Tensor] = []
    for name in adapter.streams:
        adapter.stream(name).save(path)
        for own, tensor in load_file(path).items():
            bookkeeping = own.startswith("state.") and not own.endswith(OF_THE_MODEL)
            (rest if bookkeeping else kept).append(tensor)
    found, others = ({each.dtype for each in some} for some in (kept, rest))
    return {each for each in found if each.is_floating_point}, others


@every_method
def test_casting_takes_all_streams_along(method: str, norm: str, tmp_path: Path) -> None:
    adapter, reference = adapted(method, norm), adapted(method, norm)
    for each in (adapter, reference):
        run(each.stream("camera"), STREAM[:2])
        run(each, OTHER[:2])
    adapter.float()
    of_the_model, rest = precisions(adapter, tmp_path / "stream")
    assert of_the_model <= {torch.float32}
    assert rest <= {torch.float64}
    for name, batch in (("default", OTHER[3]), ("camera", STREAM[3]), ("new", X)):
        found, expected = adapter.stream(name)(batch.float()), reference.stream(name)(batch)
        assert found.dtype == torch.float32
        # A pseudo-label between two classes may become the other one by rounding; what learns its
        # input as well is 0.004 away on some processors.
        close = {"shot with pseudo-labels": math.inf, "slr+it": 5e-2}.get(method, 1e-2)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=close)


def test_streams_in_inference_mode() -> None:
    adapter, reference = adapted(OURS), adapted(OURS)
    for one, other in zip(STREAM, OTHER, strict=True):
        with torch.inference_mode():
            found = adapter.stream("left")(one), adapter.stream("right")(other)
        assert_same(found, [reference.stream("left")(one), reference.stream("right")(other)])
    adapter.stream("left").reset()
    assert torch.equal(adapter.stream("left")(X), adapted(OURS)(X))


def test_calls_past_the_adapter_count_for_no_stream() -> None:
    """Not before its first batch either, as EATA's look at the source is."""
    adapter, expected = adapted("wiener"), adapted("wiener")
    for batch in STREAM:
        with torch.no_grad():
            adapter.model(5 * X)
        assert torch.equal(adapter(batch), expected(batch))
    eata = adapted("eata over wiener", source=DATA[:20])
    first = run(eata, STREAM)
    eata.reset()
    assert_same(run(eata, STREAM), first)


def test_an_interrupted_switch_leaves_all_streams_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, expected = adapted(OURS), adapted(OURS)
    for each in (adapter, expected):
        run(each, OTHER[:3])
        run(each.stream("camera"), STREAM[:3])
    put = adapter.predictor.descent.put

    def interrupt(contents: Any) -> None:
        raise KeyboardInterrupt

    for name in ("default", "camera", "default"):
        monkeypatch.setattr(adapter.predictor.descent, "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            adapter.stream(name if name != adapter._streams.current else "new")(X)
        monkeypatch.setattr(adapter.predictor.descent, "put", put)
    restored = adapted(OURS)
    restored.load_state_dict(adapter.state_dict())
    for each in (adapter, restored):
        assert set(each.streams) == {"default", "camera"}
    after = run(expected, OTHER[3:]), run(expected.stream("camera"), STREAM[3:])
    for each in (adapter, restored):
        assert_same(run(each, OTHER[3:]), after[0])
        assert_same(run(each.stream("camera"), STREAM[3:]), after[1])


def test_a_stream_is_small(tmp_path: Path) -> None:
    """Of the closed form at all 3,072 components of a network of the package: 66 kB, not 300."""
    network, data = networks.load("cifar10-resnet20"), images(40, shape=(3, 32, 32)).float()
    fitted = ttapca.fit(network, "conv1", data, route="dct")
    camera = ttapca.adapt(network, "wiener", filter=fitted, forgetting="online").stream("camera")
    camera(5 * data[:8])
    assert camera.shift > 0  # without a shift, the statistics of the layers are not kept
    camera.save(tmp_path / "camera")
    assert (tmp_path / "camera").stat().st_size < 67_000


# Files that are no streams of this adapter.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    camera = adapted(OURS).stream("camera")
    run(camera, STREAM[:3])
    camera.save(tmp_path / "stream")
    return tmp_path / "stream"


def described(path: Path, part: str | None = None, content: Any = None, **about: Any) -> None:
    """Write the same tensors with another description, or with other contents of one part."""
    with safe_open(path, framework="pt") as file:
        known = json.loads(file.metadata()["ttapca"])
    if part is not None:
        known["other"]["dict"]["parts"]["dict"][part] = content
    save_file(load_file(path), path, {"ttapca": json.dumps(known | about)})


def blanked(path: Path, part: str) -> None:
    """Write zeros in place of a part that is one tensor."""
    with safe_open(path, framework="pt") as file:
        known = file.metadata()
    parts = json.loads(known["ttapca"])["other"]["dict"]["parts"]["dict"]
    tensors = load_file(path)
    tensors[f"other.{parts[part]['tensor']}"].zero_()
    save_file(tensors, path, known)


ANOTHER = "is a stream of another network, filter or method. Load it with those that it was saved"
ONE_MORE = {"dict": {"99": {"dict": {}}}}
DAMAGE: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: path.unlink(), "cannot be read"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is no saved stream"),
    "text": (lambda path: path.write_text("camera"), "is no saved stream"),
    "weights": (lambda path: save_file({"a": X}, path), "format `ttapca stream 3`; found None"),
    "method": (lambda path: adapted("wiener").stream("camera").save(path), ANOTHER),
    "network": (lambda path: adapted(OURS, "GroupNorm").stream("camera").save(path), ANOTHER),
    "guard": (
        lambda path: adapted(OURS, guard="reset").stream("camera").save(path),
        "its parts have other names",
    ),
    "older": (lambda path: described(path, format="ttapca stream 1"), "saved by an older ttapca"),
    "no JSON": (lambda path: save_file({"a": X}, path, {"ttapca": "["}), "is not JSON as we read"),
    "no stream": (lambda path: described(path, other=3), "is no saved stream: it holds 3"),
    "no values": (
        lambda path: described(path, other={"dict": {"parts": {"dict": {}}}}),
        "its values have other names",
    ),
    "no state": (lambda path: described(path, numbers={}), "is no saved stream: `latest` is None"),
    "a word": (lambda path: described(path, "optimiser", "x"), "it holds 'x'"),
    "no tensor": (lambda path: described(path, "draws", {"tensor": 99}), "holds {'tensor': 99}"),
    "a shape": (lambda path: described(path, "draws", {"tensor": 0}), "`draws` has another shape"),
    "a number": (lambda path: described(path, "optimiser", 3), "`optimiser` has another shape"),
    "one more": (lambda path: described(path, "optimiser", ONE_MORE), "IndexError"),
    "no generator": (lambda path: blanked(path, "draws"), "is no saved stream: RuntimeError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_files_that_are_no_streams_of_this_adapter(kind: str, saved: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(saved)
    adapter = adapted(OURS)
    camera = adapter.stream("camera")
    run(camera, STREAM[:3])
    with pytest.raises(SavedStreamError, match=message) as found:
        camera.load(saved)
    assert str(saved) in str(found.value)
    expected = adapted(OURS)
    run(expected, STREAM[:3])
    assert_same(run(camera, STREAM[3:]), run(expected, STREAM[3:]))  # as if nobody had tried


def test_a_file_without_parts_takes_none_of_another_stream(saved: Path) -> None:
    """It is refused, or the parts begin anew; no two streams share what steps move in place."""
    described(saved, other={"dict": {}})
    adapter, expected = adapted(OURS), adapted(OURS)
    for each in (adapter, expected):
        run(each, OTHER[:3])
    camera = adapter.stream("camera")
    with contextlib.suppress(SavedStreamError):
        camera.load(saved)
    run(camera, STREAM)
    assert_same(run(adapter, OTHER[3:]), run(expected, OTHER[3:]))


@pytest.mark.parametrize("images", [None, -5, math.nan, 1e300, True, "7", [3]], ids=str)
def test_a_file_of_a_service_whose_counts_cannot_be(images: Any, tmp_path: Path) -> None:
    adapter = adapted("wiener")
    adapter(X)
    contents = SavedStream(adapter.kind, adapter.new_state(), facts={"images": images})
    (tmp_path / "stream").write_bytes(contents.to_bytes())
    camera = adapter.stream("camera")
    with pytest.raises(SavedStreamError, match="is no saved stream"):
        camera.load(tmp_path / "stream")
    assert (camera.samples, camera.health.images) == (0, 0)


@pytest.mark.parametrize("method", ["t3a", "wiener"])
def test_a_stream_is_loaded_whatever_others_have_seen(method: str, tmp_path: Path) -> None:
    """What they keep of samples has as many rows as there were."""
    adapter = adapted(method)
    camera, other = adapter.stream("camera"), adapter.stream("other")
    camera(STREAM[0])
    camera.save(tmp_path / "stream")
    expected = run(camera, STREAM[1:3])
    run(other, STREAM[:2])
    camera.load(tmp_path / "stream")
    assert_same(run(camera, STREAM[1:3]), expected)


def test_moments_of_other_parameters_are_refused_before_the_first_step_as_well(saved: Path) -> None:
    of_the_first = {"dict": {"exp_avg": {"tensor": 0}}}
    described(saved, "optimiser", {"dict": {"2": of_the_first}})
    fresh = adapted(OURS).stream("camera")
    with pytest.raises(SavedStreamError, match="`exp_avg` has another shape than parameter 2"):
        fresh.load(saved)
    assert_same(run(fresh, STREAM[:3]), run(adapted(OURS), STREAM[:3]))


def test_the_state_of_another_kind_of_adapter() -> None:
    with pytest.raises(SavedStreamError, match="of the same kind; found that of another"):
        adapted("eata").load_state_dict(adapted("tent").state_dict())
