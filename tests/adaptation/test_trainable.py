"""Copies of weights: tied ones, models that call themselves, other devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import (
    images,
    small_convnet,
)
from ttapca.adaptation.surfaces import NormAffine, Surface
from ttapca.methods.slr import InputTransform

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    ).double()
    model[2].weight = model[0].weight
    x = images(20, shape=(6,))
    adapter = ttapca.adapt(model, "tent", forgetting="online", lr=0.1)
    assert adapter.n_parameters == 18
    adapter(x)
    seen = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(x)
    assert seen[0] is seen[1]


def test_a_model_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(self.norm(x), again=False) if again else self.norm(x) * 3

    model = Twice().double()
    x = images(9, shape=(4,))
    adapter = ttapca.adapt(model, "tent", forgetting="online", lr=0.1, logits="after")
    moved = adapter(x)
    assert not torch.equal(moved, Twice().double()(x))
    assert torch.equal(model.norm.weight, torch.ones(4).double())


@pytest.mark.parametrize("surface", [NormAffine, InputTransform])
def test_a_surface_follows_the_model_to_another_device(surface: type[Surface]) -> None:
    model = small_convnet()
    surface().attach(model)
    model.to("meta")
    assert model(X.to("meta")).device.type == "meta"
