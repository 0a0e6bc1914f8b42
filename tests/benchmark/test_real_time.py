from __future__ import annotations

import pytest
import torch

import ttapca
from oracles import images, small_convnet
from ttapca.benchmark.measurement import RealTime

BATCH = images(12)


@pytest.mark.parametrize(
    ("cost", "expected"), [(0.5, 100), (1.0, 100), (1.25, 80), (2.0, 50), (10.0, 10)]
)
def test_a_method_sees_one_batch_in_k(
    cost: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = ttapca.adapt(small_convnet(), "tent", lr=0.1, forgetting="online")
    call, now = ttapca.Adapter.__call__, 0.0

    def timed(self: ttapca.Adapter, x: torch.Tensor) -> torch.Tensor:
        nonlocal now  # the network takes one second
        now += cost if any(surface.enabled for surface in self.surfaces) else 1.0
        return call(self, x)

    monkeypatch.setattr(ttapca.Adapter, "__call__", timed)
    stream = RealTime(adapter, clock=lambda: now)
    plain, late = small_convnet()(BATCH).detach(), 0
    for _ in range(200):
        before = adapter.updates
        logits = stream(BATCH)
        if adapter.updates == before:
            late += 1
            assert torch.equal(logits, plain)
    assert stream.share == pytest.approx(expected, abs=1.5)
    assert stream.adapted == 200 - late == adapter.updates
