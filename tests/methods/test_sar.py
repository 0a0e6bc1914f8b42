from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, assert_follows, both_ways, every_norm, plain_sar
from oracles import left_untouched, small_convnet
from ttapca.errors import AttachError


@every_norm
@both_ways
@pytest.mark.parametrize(("margin", "below"), [(0.4, 0.2), (0.9, 0.0), (0.9, 0.6), (0.9, 1.41)])
def test_equals_a_plain_loop(make, forgetting: str, margin: float, below: float) -> None:
    options = {"entropy_margin": margin, "recover_below": below, "forgetting": forgetting}
    expected = plain_sar(make(), BATCHES, **options)
    adapter = ttapca.adapt(make(), "sar", lr=0.05, **options)
    assert_follows(adapter, expected.outputs)
    assert adapter.predictor.recoveries == expected.recoveries
    assert adapter.skipped == 0
    if (make, forgetting, below) == (small_convnet, "online", 1.41):
        # So that momentum is seen to go on after a recovery.
        assert 0 < expected.recoveries < len(BATCHES)


def test_recovery_returns_to_the_source() -> None:
    # A threshold above all entropies: every step is undone.
    options = {"lr": 0.1, "entropy_margin": 1.0, "recover_below": 10.0, "forgetting": "online"}
    adapter = ttapca.adapt(small_convnet(), "sar", **options)
    bn = ttapca.adapt(small_convnet(), "bn")
    for x in BATCHES:
        assert torch.equal(adapter(x), bn(x))
    assert adapter.predictor.recoveries == adapter.updates == len(BATCHES)


def test_layers_left_out() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer4, self.norm = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(self.layer4(self.layer1(x))))

    assert ttapca.adapt(Deep(), "sar").n_parameters == 12
    assert ttapca.adapt(Deep(), "sar", leave_out=[]).n_parameters == 36
    model, x = Deep(), torch.zeros(2, 6)
    with left_untouched(model, x), pytest.raises(AttachError, match="not left out; the model has"):
        ttapca.adapt(model, "sar", leave_out=["*"])
