"""The second task of test-time training: turned images, and the head that counts the turns."""

from __future__ import annotations

import pytest
import torch

from ttapca.errors import LayerNotFoundError, LayerOutputError, ShapeError
from ttapca.networks import RotationHead, RotationNetwork, add_rotation_head, build, turn
from ttapca.networks.rotation import frozen_statistics


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_turns() -> None:
    images = torch.arange(40 * 2 * 9).reshape(40, 2, 3, 3)
    turned, quarters = turn(images, generator())
    assert set(quarters.tolist()) == {0, 1, 2, 3}
    for image, result, number in zip(images, turned, quarters.tolist(), strict=True):
        for _ in range(number):  # by hand: a quarter turn is a transpose and a mirror
            image = image.transpose(1, 2).flip(1)
        assert torch.equal(result, image)
    with pytest.raises(ShapeError, match="must be square; found 8 x 6 pixels"):
        turn(torch.zeros(4, 1, 8, 6), generator())


def test_turned_images_leave_no_trace_in_the_statistics() -> None:
    model = build("wrn-10-1").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with frozen_statistics(model):
        model(torch.rand(4, 3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.rand(4, 3, 32, 32))
    after = model.state_dict()
    assert not torch.equal(after["bn1.running_mean"], before["bn1.running_mean"])
    assert int(after["bn1.num_batches_tracked"]) == 1


def test_the_rotation_head_shares_the_network_up_to_the_split() -> None:
    model = build("resnet20").eval()
    twofold = add_rotation_head(model, "layer2", generator())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(twofold(images), model(images))
    twofold.rotation_logits(images).sum().backward()
    assert model.layer2[0].conv1.weight.grad is not None
    assert model.layer3[0].conv1.weight.grad is None
    with pytest.raises(LayerNotFoundError, match=r"Did you mean `layer"):
        RotationNetwork(model, "layr2", RotationHead(32))
    with pytest.raises(LayerOutputError, match=r"`fc` does not. Choose another layer"):
        add_rotation_head(model, "fc", generator())
