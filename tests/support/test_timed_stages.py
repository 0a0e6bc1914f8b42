"""The bar of a fit never goes back, never ends early, and names what is done."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ttapca
from oracles import images
from ttapca.fitting.fit_plan import FitPlan, Stage
from ttapca.support import timed_stages
from ttapca.support.timed_stages import TimedStages


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.states: list[tuple[int, int | None, str]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        assert task == "fitting"
        self.states.append((done, total, facts))


def test_batches_and_stages_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bar moves with the clock as well, which stands still here.
    monkeypatch.setattr(timed_stages, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    told = Told()
    stages = (Stage("reading", 60.0), Stage("decomposing", 30.0), Stage("calibrating", 10.0))
    with TimedStages(told, "fitting") as progress:
        progress.plan(FitPlan("exact", 40, 10**9, 10**6, passes=2, stages=stages))
        for _ in range(2):
            assert list(progress([1, 2, 3, 4])) == [1, 2, 3, 4]
        assert told.states[-1] == (60, 100, "reading batch 4, pass 2")
        progress.stage("decomposing")
        assert told.states[-1][2] == "decomposing"
        progress.stage("calibrating")
        assert told.states[-1][0] == 90
        progress.stage("something that nobody announced")
        assert told.states[-1][0] < 100
    assert told.states[-1][:2] == (100, 100)
    done = [state[0] for state in told.states]
    assert done == sorted(done)
    assert len(told.notes) == 1
    assert told.notes[0].startswith("fitting: exact, 40 samples: about 100 s")


def test_without_a_count_the_batches_are_named() -> None:
    def unknown() -> Iterator[int]:
        yield from range(3)

    told = Told()
    with TimedStages(told, "fitting") as progress:
        assert list(progress(unknown())) == [0, 1, 2]
        progress.stage("decomposing")
        assert (3, None, "reading batch 3") in told.states
        assert told.states[-1] == (3, None, "decomposing")


def test_a_whole_fit() -> None:
    told = Told()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2)).double()
    with torch.no_grad(), TimedStages(told, "fitting") as progress:
        ttapca.fit(model, "0", images(90, shape=(1, 8, 8)), 20, progress=progress)
    # Until the plan is there nobody knows the total; from then on it is always known.
    totals = [total for _, total, _ in told.states]
    assert totals[0] is None or totals[0] == 100
    assert totals[-1] == 100
    words = {facts for _, total, facts in told.states if total}
    assert {"decomposing", "calibrating", "mirroring images"} <= words
