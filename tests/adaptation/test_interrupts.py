"""Whatever ends a forward pass, the model is as it was and the adapter goes on."""

from __future__ import annotations

import contextlib
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
from adapters import LEARNING, X, adapted
from oracles import assert_same_picture, picture_of, small_convnet


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


# What stands in for a model's own while it computes.
PLACES = (
    "ttapca/support/wrapping.py",
    "ttapca/adaptation/surfaces/base.py",
    "ttapca/adaptation/surfaces/trainable.py",
    "ttapca/methods/temporary_values.py",
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
        interrupted = run_interrupted(lambda: adapter(X), moment)
        assert_same_picture(attached, picture_of(model))
        moment += every
    assert moment > 10 * every
    assert torch.equal(adapter(X), expected)
    adapter.detach()
    assert_same_picture(before, picture_of(model))


def run_interrupted(call: Callable[[], Any], moment: int) -> bool:
    """Raise in the instruction of this number within `PLACES`; False if there are fewer."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if not Path(frame.f_code.co_filename).as_posix().endswith(PLACES):
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
        timeout=1200,
        check=False,
    )
    assert run.stdout == f"{count} interrupts survived\n", run.stderr
