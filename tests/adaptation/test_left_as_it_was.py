"""The model is as it was, whatever ends a forward pass; broken batches and threads do no harm."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import (
    assert_same_picture,
    images,
    options_of,
    picture_of,
    required_options,
    small_convnet,
)
from small_networks import group_norm_convnet
from ttapca.adaptation.surfaces import BatchNormStatistics, InputTransform, NormAffine, Surface

DATA = images(150)
X = images(12, seed=8)
GRADIENT_METHODS = [
    name
    for name in ttapca.METHODS
    if name not in ("source", "bn", "lame", "wiener", "match", "two-sided")
]


class Interrupt(BaseException):
    """Not an `Exception`, as Ctrl-C is not."""


class Bomb:
    """A hook that raises while it is armed."""

    def __init__(self, error: type[BaseException] = Interrupt) -> None:
        self.armed = False
        self.error = error

    def __call__(self, *call: Any) -> None:
        if self.armed:
            raise self.error


class BackwardBomb(Bomb):
    """A forward hook that raises later, when a gradient comes back to the output."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.armed and output.requires_grad:
            output.register_hook(self.explode)

    def explode(self, gradient: Tensor) -> None:
        raise self.error


def bombs_on(model: nn.Module) -> Iterator[Bomb]:
    for module in model.modules():
        before, after, backward = Bomb(), Bomb(), BackwardBomb()
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_forward_hook(backward)
        yield from (before, after, backward)


def adapted(model: nn.Module, method: str, **given: Any) -> ttapca.Adapter:
    if ttapca.METHODS[method].method.needs_filter:
        # Fitted on a network without hooks; the same weights.
        given["filter"] = ttapca.fit(small_convnet(), "bn1", DATA, 20)
    if method == "eata":  # by default it finds no reliable sample here
        given |= {"e_margin": 10.0, "d_margin": 10.0}
    return ttapca.adapt(model, method, **options_of(method), **given)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_an_interrupt_in_any_module(method: str) -> None:
    """By hooks of the user's that were there before the adapter, and that came after it."""
    model = small_convnet()
    bombs = list(bombs_on(model))
    untouched = picture_of(model)
    adapter = adapted(model, method)
    # Not on `bn1` after the filter: torch calls hooks in the order in which they came.
    bombs += list(bombs_on(model))
    attached, expected = picture_of(model), adapter(X)
    exploded = 0
    for bomb in bombs:
        bomb.armed = True
        try:
            adapter(X)
        except Interrupt:
            exploded += 1
        bomb.armed = False
        assert_same_picture(attached, picture_of(model))
        assert torch.equal(adapter(X), expected)
    forward_bombs = sum(not isinstance(bomb, BackwardBomb) for bomb in bombs)
    assert exploded >= forward_bombs
    if method in GRADIENT_METHODS:
        assert exploded > forward_bombs
    adapter.detach()
    assert picture_of(model)["attributes"] == untouched["attributes"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched["state"][name])


@pytest.mark.parametrize("make", [NormAffine, InputTransform, BatchNormStatistics])
def test_an_error_of_a_users_hook_leaves_a_surface_in_order(make: Callable[[], Surface]) -> None:
    """`RuntimeError` in a pre-hook of the model itself, registered before and after the surface."""
    model = small_convnet()
    early, late = Bomb(RuntimeError), Bomb(RuntimeError)
    model.register_forward_pre_hook(early)
    surface = make()
    surface.attach(model)
    model.register_forward_pre_hook(late)
    with torch.no_grad():
        for parameter in surface.parameters():
            parameter.add_(0.1)
        expected = model(X)
        for bomb in (early, late):
            bomb.armed = True
            with pytest.raises(RuntimeError):
                model(X)
            bomb.armed = False
            assert torch.equal(model(X), expected)
    surface.detach()
    assert torch.equal(model(X), small_convnet()(X))


@pytest.mark.parametrize("method", ["tent", "slr+it", "cotta", "sar"])
def test_an_interrupt_at_any_instruction(method: str) -> None:
    """As a signal handler would raise it: between any two instructions of what stands in."""
    model = small_convnet()
    before = picture_of(model)
    adapter = adapted(model, method)
    attached, expected = picture_of(model), adapter(X)
    places = (
        "ttapca/support/wrapping.py",
        "ttapca/adaptation/surfaces/weights.py",
        "ttapca/adaptation/surfaces/inputs.py",
    )
    places = (*places, "ttapca/methods/temporary_values.py")
    every = {"tent": 1, "cotta": 97}.get(method, 31)  # all of them, where a call takes few
    moment, interrupted = 0, True
    while interrupted:
        interrupted = run_interrupted(lambda: adapter(X), places, moment)
        assert_same_picture(attached, picture_of(model))
        moment += every
    assert moment > 10 * every
    assert torch.equal(adapter(X), expected)
    adapter.detach()
    assert_same_picture(before, picture_of(model))


def run_interrupted(call: Callable[[], Any], places: tuple[str, ...], moment: int) -> bool:
    """Raise in the instruction of this number within some files; False if there are fewer."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if not Path(frame.f_code.co_filename).as_posix().endswith(places):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == moment + 1:
                raise Interrupt
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(tracer)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count"), [("tent", 200), ("cotta", 40), ("wiener", 40)])
def test_interrupts_from_outside_at_random_moments(method: str, count: int) -> None:
    script = Path(__file__).parents[1] / "interrupts.py"
    run = subprocess.run(
        [sys.executable, str(script), method, str(count), "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout == f"{count} interrupts survived\n", run.stderr


def test_surfaces_are_taken_away_in_any_order() -> None:
    """Two wrap the `forward` of one module, and a stranger's is below them."""
    layer = nn.BatchNorm1d(4).double().eval()
    own = layer.forward
    layer.forward = lambda x: own(x) + 1
    x = images(9, shape=(4,))
    expected = layer(x)
    for order in ((0, 1), (1, 0)):
        surfaces: list[Surface] = [NormAffine(), InputTransform(channels=4)]
        for surface in surfaces:
            surface.attach(layer)
        for number in order:
            surfaces[number].detach()
            surfaces[number].detach()
        assert torch.equal(layer(x), expected)
    assert vars(layer)["forward"](x).shape == x.shape


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_a_lost_adapter_is_no_trap(method: str) -> None:
    model = small_convnet().train()
    before = picture_of(model)
    adapted(model, method)(X)
    gc.collect()
    assert ttapca.detach(model) is model
    assert_same_picture(before, picture_of(model))
    assert_same_picture(before, picture_of(ttapca.detach(model)))  # and there is nothing left to do


def test_everything_comes_off_that_was_put_on_without_an_adapter() -> None:
    model = nn.Sequential(small_convnet(), nn.Identity()).eval()
    before = picture_of(model)
    ttapca.adapt(model[0], "bn")  # of a part of the model
    twin = nn.Sequential(small_convnet(), nn.Identity()).eval()  # to fit on: not adapted
    ttapca.attach(model, ttapca.fit(twin, "0.conv2", DATA, 10))
    NormAffine().attach(model)
    ttapca.detach(model)
    assert_same_picture(before, picture_of(model))


def test_an_adapter_is_a_context_manager() -> None:
    model = small_convnet().train()
    before = picture_of(model)
    with adapted(model, "tent") as adapter:
        assert adapter(X).shape == (12, 5)
    assert_same_picture(before, picture_of(model))
    with pytest.raises(RuntimeError, match="channels"), adapted(model, "tent") as adapter:
        adapter(torch.zeros(4, 5, 6, 6).double())
    assert_same_picture(before, picture_of(model))


def test_a_copy_of_an_adapted_model_can_be_freed_by_itself() -> None:
    model = small_convnet()
    adapter = adapted(model, "wiener", forgetting="online")
    expected = adapter(3 * X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ttapca.detach(twin)
        assert torch.equal(twin(X), small_convnet()(X))
        assert "forward" not in vars(twin)
    adapter.reset()
    assert torch.equal(adapter(3 * X), expected)


def test_a_model_that_is_a_normalisation_layer() -> None:
    layer = nn.BatchNorm1d(5).double().eval()
    before = picture_of(layer)
    adapter = ttapca.adapt(layer, "tent", forgetting="online", lr=0.1, logits="after")
    x = images(20, shape=(5,))
    assert not torch.equal(adapter(x), ttapca.adapt(nn.BatchNorm1d(5).double(), "bn")(x))
    adapter.detach()
    assert_same_picture(before, picture_of(layer))


@pytest.mark.parametrize("method", ["bn", "tent", "slr+it", "cotta", "wiener", "ttapca-relu"])
def test_threads_take_turns(method: str) -> None:
    adapter = adapted(small_convnet(), method, forgetting="episodic")
    batches = [images(12, seed=seed) for seed in range(16)]
    expected = [adapter(batch) for batch in batches]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(adapter, batches))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_thread_waits_while_another_has_switched_off() -> None:
    model = small_convnet()
    adapter = adapted(model, "bn")
    expected, plain = adapter(X), small_convnet()(X)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with adapter.disabled():
            waiting = pool.submit(adapter, X)
            assert torch.equal(model(X), plain)
            assert torch.equal(adapter(X), plain)
            assert not waiting.done()
        assert torch.equal(waiting.result(timeout=60), expected)


def test_copies_have_a_turn_of_their_own() -> None:
    adapter = adapted(small_convnet(), "tent")
    twins = [copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))]
    expected = adapter(X)
    with adapter.disabled(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        for twin in twins:
            assert torch.equal(pool.submit(twin, X).result(timeout=60), expected)


def group_norm_net() -> nn.Module:
    net = group_norm_convnet()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
    return net.eval()


CHANNELS_LAST = """
import sys
import torch
import ttapca
from ttapca.datasets import Images, read_digits
from ttapca.networks import Training, TrainingOptions
from test_left_as_it_was import CHANNELS, group_norm_net, adapted_group_norm
torch.set_num_threads(1)
for method in sys.argv[1:]:
    for layout in ("input", "network", "both"):
        model, x = group_norm_net(), CHANNELS
        plain = adapted_group_norm(model, method)(x)
        model = group_norm_net()
        if layout != "network":
            x = x.to(memory_format=torch.channels_last)
        if layout != "input":
            model = model.to(memory_format=torch.channels_last)
        found = adapted_group_norm(model, method)(x)
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
for parameter in (model := group_norm_net()).parameters():
    parameter.requires_grad_()
digits = read_digits("train")
pixels, labels = digits.images[:64, :6, :6].repeat(3, 3), digits.labels[:64] % 5
colour = Images(pixels, labels, digits.class_names[:5])
Training(model, colour, colour, TrainingOptions(epochs=1, padding=1, batch_size=32)).run_epoch()
sys.stdout.write("survived")
"""
CHANNELS = images(12, seed=8).float()


def adapted_group_norm(model: nn.Module, method: str) -> ttapca.Adapter:
    given = required_options(method, model, (3, 6, 6))
    if ttapca.METHODS[method].method.needs_filter:
        given["filter"] = ttapca.fit(model, "conv1", DATA.float(), 20)
    if method == "eata":
        given["source"] = DATA.float().to(memory_format=torch.channels_last)
    return ttapca.adapt(model, method, **given)


def test_gradients_through_group_norm_with_channels_last() -> None:
    """Torch's backward pass ends the process there, so a process of its own is at stake."""
    run = subprocess.run(
        [sys.executable, "-c", CHANNELS_LAST, *GRADIENT_METHODS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=300,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "survived"), run.stderr


@pytest.mark.parametrize("norm", ["BatchNorm", "GroupNorm"])
@pytest.mark.parametrize("method", [*ttapca.METHODS, "tent over wiener"])
def test_a_restored_stream_goes_on_bit_for_bit(method: str, norm: str, tmp_path: Path) -> None:
    """Saved, loaded into a fresh adapter, and compared with one that was never interrupted."""
    if (method, norm) == ("bn", "GroupNorm"):
        pytest.skip("`bn` refuses a network without BatchNorm")
    make = small_convnet if norm == "BatchNorm" else lambda: group_norm_net().double()
    fitted = ttapca.fit(make(), "conv1", DATA, 20)

    def fresh() -> ttapca.Adapter:
        if method == "tent over wiener":
            given: dict[str, Any] = {"filter": fitted, "gain": "wiener", "statistics": "mixed"}
            return ttapca.adapt(make(), "tent", forgetting="online", guard="rollback", **given)
        given = {"filter": fitted} if ttapca.METHODS[method].method.needs_filter else {}
        return ttapca.adapt(make(), method, forgetting="online", **given, **options_of(method))

    stream = [3 * X, X[:1] + 0.5, X[1:2] * 2, X + 0.3, X[2:3], 2 * X]
    uninterrupted = fresh()
    for batch in stream[:3]:
        uninterrupted(batch)
    torch.save(uninterrupted.state_dict(), tmp_path / "stream.pt")
    restored = fresh()
    restored.load_state_dict(torch.load(tmp_path / "stream.pt", weights_only=True))
    assert (restored.updates, restored.skipped) == (uninterrupted.updates, uninterrupted.skipped)
    for batch in stream[3:]:
        assert torch.equal(restored(batch), uninterrupted(batch))


def state_of(adapter: ttapca.Adapter) -> list[Tensor]:
    """All that a stream may change."""
    surfaces = [value.clone() for s in adapter.surfaces for value in s.snapshot()]
    generator = getattr(adapter.mover, "generator", None)
    draws = [] if generator is None else [generator.get_state()]
    return [*surfaces, *(value.clone() for value in adapter.mover.tensors()), *draws]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", ["BatchNorm", "GroupNorm"])
@pytest.mark.parametrize("method", ttapca.METHODS)
def test_a_broken_batch_is_counted_and_changes_nothing(method: str, norm: str, bad: float) -> None:
    if (method, norm) == ("bn", "GroupNorm"):
        pytest.skip("`bn` refuses a network without BatchNorm")
    model = small_convnet() if norm == "BatchNorm" else group_norm_net().double()
    given = options_of(method)
    if ttapca.METHODS[method].method.needs_filter:
        given["filter"] = ttapca.fit(model, "conv1", DATA, 20)
    adapter = ttapca.adapt(model, method, forgetting="online", **given)
    twin = copy.deepcopy(adapter)
    for each in (adapter, twin):
        each(3 * X)
    broken = X.clone()
    broken[5, 1, 2, 3] = bad
    before = state_of(adapter)
    adapter(broken)
    assert adapter.skipped == 1
    for value, kept in zip(state_of(adapter), before, strict=True):
        assert torch.equal(value, kept)
    assert torch.equal(adapter(2 * X), twin(2 * X))
    assert (adapter.skipped, twin.skipped) == (1, 0)


def test_a_batch_that_breaks_late_is_forgotten_early() -> None:
    """The filter and the first layers have seen nothing wrong; the logits overflow."""

    class Factor(nn.Module):
        value = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.value

    model = small_convnet()
    model.add_module("last", Factor())
    fitted = ttapca.fit(model, "conv1", DATA, 20)
    adapter = ttapca.adapt(model, "wiener", filter=fitted, forgetting="online")
    adapter(3 * X)
    before = state_of(adapter)
    model.last.value = float("inf")
    adapter(X)
    assert adapter.skipped == 1
    for value, kept in zip(state_of(adapter), before, strict=True):
        assert torch.equal(value, kept)
