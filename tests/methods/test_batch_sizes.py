from __future__ import annotations

import pytest
import torch
from torch import nn

import ttapca
from oracles import group_norm_net, images, layer_norm_net, options_of, rotation_head, small_convnet
from ttapca.errors import ShapeError

X = images(200, seed=8)


def flat_batch_norm_net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(108, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)
    ).double()


SPLITS = {
    small_convnet: ("bn1", 288),
    flat_batch_norm_net: ("2", 9),
    group_norm_net: ("1", 128),
    layer_norm_net: ("2", 9),
}


def adapted(method: str, make) -> ttapca.Adapter:
    options = options_of(method)
    if method == "ttt":
        split, features = SPLITS[make]
        options = {"head": rotation_head(features), "split": split}
    return ttapca.adapt(make(), method, episodic=False, lr=0.01, **options)


@pytest.mark.parametrize("method", ["lame", "sar", "memo", "cotta", "ttt"])
@pytest.mark.parametrize("make", SPLITS)
@pytest.mark.parametrize("size", [1, 2, 200])
def test_every_size_is_served_or_refused_without_a_trace(method: str, make, size: int) -> None:
    adapter = adapted(method, make)
    if size == 1 and make is flat_batch_norm_net and method in ("sar", "cotta"):
        # One value for each channel has no spread: there are no batch statistics.
        with pytest.raises(ShapeError, match="more than one value for each channel"):
            adapter(X[:1])
    else:
        assert torch.isfinite(adapter(X[:size])).all()
        adapter.reset()
    assert torch.equal(adapter(X[:12]), adapted(method, make)(X[:12]))
