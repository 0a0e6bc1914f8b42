from __future__ import annotations

import pytest
import torch

import ttapca
from methods.plain_loops import assert_follows, both_ways, every_norm, plain_memo
from oracles import images, small_convnet

BATCHES = list(images(30, seed=8).split(3))
X = BATCHES[0]


@every_norm
@both_ways
@pytest.mark.parametrize("steps", [1, 2])
def test_equals_a_plain_loop(make, forgetting: str, steps: int) -> None:
    options = {"forgetting": forgetting, "steps": steps, "lr": 0.02, "views": 5}
    adapter = ttapca.adapt(make(), "memo", **options)
    assert_follows(adapter, plain_memo(make(), BATCHES, **options), BATCHES, atol=1e-9)
    assert adapter.updates == 30 * steps


def test_a_batch_is_its_images_one_by_one() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", forgetting="online", views=4)
    together = torch.cat([adapter(x) for x in BATCHES])
    adapter.reset()
    alone = torch.cat([adapter(x) for x in torch.cat(BATCHES).split(1)])
    assert torch.equal(together, alone)
    assert adapter(X[:0]).shape == (0, 5)


def test_logits_before_are_those_of_the_source() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", lr=0.1, logits="before", views=2)
    torch.testing.assert_close(adapter(X), small_convnet()(X).detach())


def test_statistics_mix_in_each_images_own() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", statistics=1 / 17, logits="before", views=2)
    mixed = ttapca.adapt(small_convnet(), "bn", alpha=1 / 17)
    expected = torch.cat([mixed(image) for image in X.split(1)])
    torch.testing.assert_close(adapter(X), expected)


def test_a_poisoned_image_harms_no_other() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", views=4)
    clean = adapter(X)
    poisoned = X.clone()
    poisoned[1, 0, 0, 0] = float("nan")
    output = adapter(poisoned)
    assert torch.equal(output[::2], clean[::2])
    assert adapter.skipped == 1
