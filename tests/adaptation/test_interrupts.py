"""Whatever is cut off, and where: the model is as it was, or the adapter goes on."""

from __future__ import annotations

import contextlib
import os
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
from adapters import BATCHES, DATA, LEARNING, NETWORKS, X, adapted, options_of, same
from oracles import assert_same_picture, picture_of, small_convnet
from ttapca.spectral.stream_batch import ImageRows
from ttapca.support.disk import LOCK_MARK


class Interrupt(BaseException):
    """Not an `Exception`, as Ctrl-C is not."""


class Bomb:
    """A hook that raises while it is armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.armed = False
        self.error = error

    def __call__(self, *call: Any) -> None:
        if self.armed:
            raise self.error


class BackwardBomb(Bomb):
    """A forward hook that raises later, when a gradient comes back to the output."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.armed and output.requires_grad:
            output.register_hook(super().__call__)


def bombs_on(model: nn.Module, error: type[BaseException]) -> Iterator[Bomb]:
    for module in model.modules():
        before, after, backward = Bomb(error), Bomb(error), BackwardBomb(error)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_forward_hook(backward)
        yield from (before, after, backward)


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_an_interrupt_in_any_module(method: str) -> None:
    """By hooks of the user's that were there before the adapter, and errors of later ones."""
    model = small_convnet()
    bombs = list(bombs_on(model, Interrupt))
    untouched = picture_of(model)
    adapter = adapted(method, model=model, layer="bn1", forgetting="episodic")
    # Not on `bn1` after the filter: torch calls hooks in the order in which they came.
    bombs += list(bombs_on(model, RuntimeError))
    attached, expected = picture_of(model), adapter(X)
    survived = 0
    for bomb in bombs:
        bomb.armed = True
        with contextlib.suppress(Interrupt, RuntimeError):
            adapter(X)
            survived += 1
        bomb.armed = False
        assert_same_picture(attached, picture_of(model))
        assert torch.equal(adapter(X), expected)
    backward = sum(isinstance(bomb, BackwardBomb) for bomb in bombs)
    assert survived <= backward - (method in LEARNING)
    adapter.detach()
    assert picture_of(model)["attributes"] == untouched["attributes"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched["state"][name])


# All files of ours.
SOURCES = (f"{Path(ttapca.__file__).parent}{os.sep}",)
# What stands in for a model's own while it computes.
PLACES = (
    "ttapca/support/wrapping.py",
    "ttapca/methods/slr.py",
    "ttapca/adaptation/surfaces/trainable.py",
    "ttapca/methods/weights.py",
    "ttapca/methods/rotta.py",
    "ttapca/methods/pea.py",
)


@pytest.mark.parametrize(
    ("method", "every"),
    [("tent", 1), ("slr+it", 31), ("cotta", 97), ("sar", 31), ("rotta", 211), ("pea", 97)],
)
def test_an_interrupt_at_any_instruction(method: str, every: int) -> None:
    """As a signal handler would raise it: between any two instructions of what stands in."""
    model = small_convnet()
    before = picture_of(model)
    adapter = adapted(method, model=model, forgetting="episodic")
    attached, expected = picture_of(model), adapter(X)
    moment, interrupted = 0, True
    while interrupted:
        interrupted = run_interrupted(lambda: adapter(X), moment, "opcode", PLACES)
        assert_same_picture(attached, picture_of(model))
        moment += every
    assert moment > 10 * every
    assert torch.equal(adapter(X), expected)
    adapter.detach()
    assert_same_picture(before, picture_of(model))


Place = tuple[str, int]  # a file and a line


def run_interrupted(
    call: Callable[[], Any],
    moment: int | None,
    kind: str = "line",
    places: tuple[str, ...] = SOURCES,
    passed: list[Place] | None = None,
) -> bool:
    """Raise at the moment of this number: a line, or an instruction, of files that end so.

    Args:
        call: What is interrupted.
        moment: Counted from 0; None for never.
        kind: What is counted, `line` or `opcode`.
        places: How the names of files end; of directories, what is in them.
        passed: Takes the lines that were passed.

    Returns:
        Whether there was such a moment.
    """
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        file = frame.f_code.co_filename
        if not (file.startswith(places) or file.endswith(places)):
            return None
        frame.f_trace_opcodes = kind == "opcode"
        if event == kind:
            if passed is not None:
                passed.append((file, frame.f_lineno))
            if seen == moment:
                raise Interrupt
            seen += 1
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


def warmed_up(method: str, **given: Any) -> ttapca.Adapter:
    """An adapter that has seen enough images to ask no more in which units they are."""
    adapter = adapted(method, **given)
    with torch.no_grad():
        adapter.model(torch.cat([DATA, DATA]))
    return adapter


def interrupts_of(
    call: Callable[[], Any], undo: Callable[[], Any] = lambda: None
) -> Iterator[Place]:
    """Interrupt a call at each line of ours, the first and the last time that it is passed.

    Args:
        call: What is interrupted.
        undo: Undoes a call that was not.

    Yields:
        The line, after each interrupt.
    """
    passed: list[Place] = []
    for seen in ([], passed):  # the first time fills what is computed once
        run_interrupted(call, None, passed=seen)
        undo()
    last = {line: moment for moment, line in enumerate(passed)}
    first = {line: moment for moment, line in reversed(list(enumerate(passed)))}
    assert len(first) > 20
    for moment in sorted({*first.values(), *last.values()}):
        assert run_interrupted(call, moment)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        yield passed[moment]


SWEPT = ("source", "bn", "tent", "pea", "ttapca-relu", "wiener")


@pytest.mark.parametrize(
    ("method", "norm"),
    [*((method, "BatchNorm") for method in SWEPT), ("tent", "GroupNorm"), ("wiener", "LayerNorm")],
)
def test_an_interrupt_at_any_line_of_adapt(method: str, norm: str) -> None:
    """Nobody has the adapter then, so that nothing of it may stay on the model."""
    model = NETWORKS[norm]().train()
    before = picture_of(model)
    expected = adapted(method, norm)(X)
    name, options = options_of(method, norm)

    def adapt() -> None:
        ttapca.adapt(model, name, **options)

    for _ in interrupts_of(adapt, undo=lambda: ttapca.detach(model)):
        assert_same_picture(before, picture_of(model))
    assert torch.equal(adapted(method, norm, model=model)(X), expected)


@pytest.mark.parametrize("method", SWEPT)
def test_an_interrupt_at_any_line_of_calls_resets_and_streams(method: str) -> None:
    """A batch counts as a whole or not at all, and so does a reset; for Adam's first step too."""
    model = small_convnet()
    adapter = warmed_up(method, model=model)
    attached, start = picture_of(model), adapter.hub.contents()
    adapter(BATCHES[1])
    old, streams = adapter.hub.contents(), adapter._streams
    adapter.stream("camera")(X)
    seen = streams.contents()["camera"]
    again = adapter.stream("default")(X)

    def live() -> None:
        streams.put({"default": old}, "default")
        adapter.stream("camera")(X)
        adapter.stream("camera").reset()
        adapter.reset()

    for line in interrupts_of(live):
        assert_same_picture(attached, picture_of(model))
        found = streams.contents()
        assert same(found["default"], old) or same(found["default"], start), line
        camera = found.get("camera", start)
        assert same(camera, seen) or same(camera, start), line
        streams.put({"default": old}, "default")
        assert torch.equal(adapter(X), again), line


@pytest.mark.parametrize("method", SWEPT)
def test_an_interrupt_at_any_line_while_adaptation_is_off(method: str) -> None:
    model = small_convnet()
    adapter = warmed_up(method, model=model, forgetting="episodic")
    attached, expected = picture_of(model), adapter(X)

    def switched_off() -> None:
        with adapter.disabled():
            model(X)
            with adapter.disabled():
                adapter(X)
            adapter(X[:0])

    for line in interrupts_of(switched_off):
        assert_same_picture(attached, picture_of(model))
        assert torch.equal(adapter(X), expected), line


# The file of a lock is then closed, and the lock released, when Python frees it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_at_any_line_of_load_and_save(tmp_path: Path) -> None:
    adapter, file = adapted("tent"), tmp_path / "camera"
    camera, streams = adapter.stream("camera"), adapter._streams
    camera(X)
    camera.save(file)
    saved = streams.contents()["camera"]
    camera(BATCHES[1])
    later, content = streams.contents(), file.read_bytes()

    def load_and_save() -> None:
        streams.put(later, "default")
        camera.load(file)
        camera.save(file)

    for line in interrupts_of(load_and_save):
        found = streams.contents()["camera"]
        assert same(found, later["camera"]) or same(found, saved), line
        assert file.read_bytes() == content
        # One interrupt may leave the file of the lock, which the next one who saves removes.
        assert {each.name for each in tmp_path.iterdir()} <= {"camera", f".camera{LOCK_MARK}"}
    camera.save(file)
    assert [each.name for each in tmp_path.iterdir()] == ["camera"]


def test_an_interrupt_at_any_line_of_a_pass_of_other_streams() -> None:
    model = small_convnet()
    adapter = warmed_up("wiener", model=model)
    attached, expected = picture_of(model), model(X)
    everyone = torch.ones(len(X), dtype=torch.bool)
    rows = ImageRows(torch.zeros(len(X), dtype=torch.long), everyone, everyone)
    for line in interrupts_of(lambda: adapter.predict_streams([adapter.new_state()], X, rows)):
        assert_same_picture(attached, picture_of(model))
        assert adapter.hub.batch is None, line
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("method", SWEPT)
def test_an_interrupt_at_any_line_of_detach(method: str) -> None:
    """It goes on to the end if it has begun, and can be called again in any case."""
    model = small_convnet()
    before = picture_of(model)
    name, options = options_of(method)
    adapters = [ttapca.adapt(model, name, **options)]
    attached = picture_of(model)

    def detach() -> None:
        adapters[-1].detach()

    def adapt_again() -> None:
        adapters.append(ttapca.adapt(model, name, **options))

    for _ in interrupts_of(detach, undo=adapt_again):
        found = picture_of(model)
        for part in ("attributes", "hooks"):
            assert found[part] in (before[part], attached[part])
        assert_same_picture(before, picture_of(ttapca.detach(model)))
        adapt_again()


def test_an_interrupt_of_undoing_leaves_what_can_be_undone_again() -> None:
    """Of two interrupts, the second one may come while the first is undone."""
    model = small_convnet()
    before = picture_of(model)
    name, options = options_of("wiener")
    moment, interrupted = -1, True
    while interrupted:
        moment += 1
        adapter = ttapca.adapt(model, name, **options)
        interrupted = run_interrupted(adapter._take_away, moment)
        assert_same_picture(before, picture_of(ttapca.detach(model)))
    assert moment > 100


def test_a_filter_without_an_adapter() -> None:
    model = small_convnet()
    before, plain = picture_of(model), model(X)
    fitted = ttapca.fit(small_convnet(), "conv1", torch.cat(BATCHES), 10)

    def attached() -> None:
        attachment = ttapca.attach(model, fitted)
        with attachment.disabled():
            assert torch.equal(model(X), plain)
        assert attachment.enabled
        attachment.detach()

    for _ in interrupts_of(attached):
        assert_same_picture(before, picture_of(ttapca.detach(model)))


def test_an_interrupt_within_a_step_of_the_optimiser() -> None:
    """Adam writes its moments one by one."""
    model = small_convnet()
    adapter = adapted("tent", model=model)
    start, expected = adapter.hub.contents(), adapter(X)
    after = adapter.hub.contents()
    adapter.reset()
    moment = 0
    while run_interrupted(lambda: adapter(X), moment, "line", ("torch/optim/adam.py",)):
        assert same(adapter.hub.contents(), start)
        moment += 1
    assert moment > 50
    assert same(adapter.hub.contents(), after)
    adapter.reset()
    assert torch.equal(adapter(X), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count"), [("tent", 200), ("cotta", 40), ("wiener", 40)])
def test_interrupts_from_outside_at_random_moments(method: str, count: int) -> None:
    script = Path(__file__).parents[1] / "interrupts.py"
    run = subprocess.run(
        [sys.executable, str(script), method, str(count), "0"],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.stdout == f"{count} interrupts survived\n", run.stderr
