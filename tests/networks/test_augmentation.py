"""Crops, flips, cut-outs and turns of whole batches, each against one image at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttapca.errors import LayerNotFoundError, LayerOutputError, OptionError
from ttapca.networks import Augmentation, RotationNetwork, add_rotation_head, build, turn
from ttapca.networks.augmentation import crop_and_flip, cut_out
from ttapca.networks.averaging import AveragedWeights
from ttapca.networks.rotation import RotationHead, frozen_statistics
from ttapca.networks.schedules import learning_rate


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(batch: int, channels: int, height: int, width: int) -> Tensor:
    """Every pixel another number, and none is black."""
    count = batch * channels * height * width
    return torch.arange(1, count + 1).reshape(batch, channels, height, width)


@given(st.integers(0, 3), st.booleans(), st.integers(0, 1000))
def test_each_image_is_a_crop_of_the_padded_one(padding: int, flip: bool, seed: int) -> None:
    images = numbered(4, 2, 5, 6)
    found = crop_and_flip(images, padding, flip, generator(seed))
    assert found.shape == images.shape
    for image, result in zip(images, found, strict=True):
        padded = torch.zeros(2, 5 + 2 * padding, 6 + 2 * padding, dtype=image.dtype)
        padded[:, padding : padding + 5, padding : padding + 6] = image
        choices = [
            padded[:, row : row + 5, column : column + 6]
            for row in range(2 * padding + 1)
            for column in range(2 * padding + 1)
        ]
        mirrored = [choice.flip(2) for choice in choices] if flip else []
        assert any(torch.equal(result, choice) for choice in choices + mirrored)


def test_all_shifts_and_both_sides_occur() -> None:
    images = numbered(1, 1, 3, 3).expand(400, 1, 3, 3)
    found = crop_and_flip(images, 1, True, generator())
    assert len({tuple(image.flatten().tolist()) for image in found}) == 9 * 2


@given(st.integers(1, 6), st.integers(0, 1000))
def test_one_square_is_cut_out(side: int, seed: int) -> None:
    images = torch.randint(1, 256, (3, 2, 7, 8), dtype=torch.uint8, generator=generator(seed))
    before = images.clone()
    found = cut_out(images, side, generator(seed))
    assert torch.equal(images, before)
    for image, result in zip(images, found, strict=True):
        mean = image.double().mean((1, 2), keepdim=True).round().to(torch.uint8)
        rows, columns = torch.where((result != image).any(0))
        if len(rows):
            assert int(rows.max() - rows.min()) < side
            assert int(columns.max() - columns.min()) < side
        same = result == image
        assert torch.equal(result[~same], mean.expand_as(image)[~same])


def test_augmentation_is_repeatable_and_can_be_nothing() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    augment = Augmentation(padding=2, flip=True, cutout=3)
    assert torch.equal(augment(images, generator(1)), augment(images, generator(1)))
    assert not torch.equal(augment(images, generator(1)), augment(images, generator(2)))
    assert torch.equal(Augmentation(0, False, 0)(images, generator()), images)
    with pytest.raises(OptionError, match=r"`cutout` is at least 0; found -1"):
        Augmentation(cutout=-1)


def test_turns() -> None:
    images = numbered(40, 2, 3, 3)
    turned, quarters = turn(images, generator())
    assert set(quarters.tolist()) == {0, 1, 2, 3}
    for image, result, number in zip(images, turned, quarters.tolist(), strict=True):
        for _ in range(number):  # by hand: a quarter turn is a transpose and a mirror
            image = image.transpose(1, 2).flip(1)
        assert torch.equal(result, image)


def test_turned_images_leave_no_trace_in_the_statistics() -> None:
    network = build("wrn-10-1").train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    names = list(before)
    with frozen_statistics(network):
        network(torch.rand(4, 3, 32, 32))
    after = network.state_dict()
    assert list(after) == names
    assert all(torch.equal(after[name], before[name]) for name in names)
    network(torch.rand(4, 3, 32, 32))
    assert not torch.equal(after["bn1.running_mean"], before["bn1.running_mean"])
    assert int(after["bn1.num_batches_tracked"]) == 1


def test_the_head_shares_the_network_up_to_the_split() -> None:
    network = build("resnet20").eval()
    twofold = add_rotation_head(network, "layer2", generator())
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(twofold(images), network(images))
    twofold.rotation_logits(images).sum().backward()
    assert network.layer2[0].conv1.weight.grad is not None
    assert network.layer3[0].conv1.weight.grad is None


def test_split_points_that_do_not_work() -> None:
    with pytest.raises(LayerNotFoundError, match=r"Did you mean `layer"):
        RotationNetwork(build("resnet20"), "layr2", RotationHead(32))
    with pytest.raises(LayerOutputError, match=r"`fc` does not. Choose another split"):
        add_rotation_head(build("resnet20"), "fc", generator())


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_learning_rates_rise_then_fall(schedule: str, steps: int) -> None:
    rates = [
        learning_rate(schedule, step, steps, peak=0.5, warmup_steps=20)  # type: ignore[arg-type]
        for step in range(steps)
    ]
    highest = rates.index(max(rates))
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert min(rates) > 0
    assert max(rates) <= 0.5
    if steps == 100:
        assert max(rates) == 0.5
        assert highest == (20 if schedule == "cosine" else 30)
        assert rates[-1] < 0.001


def test_no_such_schedule() -> None:
    with pytest.raises(OptionError, match=r"cosine or one-cycle; found `cosin`. Did you mean"):
        learning_rate("cosin", 0, 1, peak=1.0)  # type: ignore[arg-type]


def test_the_average_of_weights() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    averaged = AveragedWeights(network, 0.5)
    expected = {name: value.clone().double() for name, value in network.state_dict().items()}
    for number in range(6):
        with torch.no_grad():
            for value in network.state_dict().values():
                value += number + 1
        averaged.update(number)
        decay = min(0.5, (1 + number) / (10 + number))
        for name, value in network.state_dict().items():
            if value.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * value.double()
            else:
                expected[name] = value.clone()
    for name, value in averaged.tensors.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-6, atol=1e-6)
    live = network[0].weight.clone()
    with averaged.applied():
        assert torch.equal(network[0].weight, averaged.tensors["0.weight"])
    assert torch.equal(network[0].weight, live)
