"""The filters of the paper against a plain loop over a dense basis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters import BATCHES, DATA, adapted
from oracles import DensePCA, plain_ttapca_loop, small_convnet


@pytest.mark.parametrize("gain", ["relu", "exp"])
@pytest.mark.parametrize("forgetting", ["episodic", "online"])
@pytest.mark.parametrize("logits", ["before", "after"])
@pytest.mark.parametrize("steps", [1, 3])
def test_equals_a_plain_loop(gain: str, forgetting: str, logits: str, steps: int) -> None:
    model = small_convnet()
    with torch.no_grad():
        dense = DensePCA(model.conv1(DATA))
    spectrum = torch.from_numpy(dense.singular_values[:20] / dense.singular_values[0])

    def gains_of(gamma: Tensor) -> Tensor:
        if gain == "relu":
            return spectrum / (spectrum + torch.clamp(gamma, min=0))
        return 1 / (1 + torch.exp(gamma**2 - spectrum))

    expected = plain_ttapca_loop(
        model,
        dense,
        gains_of,
        0.05,
        20,
        BATCHES,
        episodic=forgetting == "episodic",
        steps=steps,
        lr=0.05,
        after=logits == "after",
    )
    given = {"forgetting": forgetting, "steps": steps, "logits": logits}
    adapter = adapted(f"ttapca-{gain}", initial=0.05, **given)
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-9)
    assert (adapter.updates, adapter.skipped) == (steps * len(BATCHES), 0)
    assert adapter.n_parameters == 20
