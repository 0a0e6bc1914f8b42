"""Training on digits: augmentation, and steps by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttapca.datasets import Images, read_digits
from ttapca.errors import NotEnoughDataError, OptionError, TrainingError
from ttapca.networks import Training, TrainingOptions, build
from ttapca.networks.training import augment

OPTIONS = TrainingOptions(epochs=3, batch_size=64, peak=0.1, padding=1, flip=False, average=0.9)
DIGITS, TEST = read_digits("train"), read_digits("test")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    return build("small-cnn", input_shape=(1, 8, 8))


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def numbered(batch: int, channels: int, height: int, width: int) -> Tensor:
    """Every pixel another number, and none is black."""
    count = batch * channels * height * width
    return torch.arange(1, count + 1).reshape(batch, channels, height, width)


@given(st.integers(0, 3), st.booleans(), st.integers(0, 1000))
def test_each_image_is_a_crop_of_the_padded_one(padding: int, flip: bool, seed: int) -> None:
    images = numbered(4, 2, 5, 6)
    found = augment(images, TrainingOptions(padding=padding, flip=flip), generator(seed))
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
    found = augment(images, TrainingOptions(padding=1), generator())
    assert len({tuple(image.flatten().tolist()) for image in found}) == 9 * 2


@given(st.integers(1, 6), st.integers(0, 1000))
def test_one_square_is_cut_out(side: int, seed: int) -> None:
    images = torch.randint(1, 256, (3, 2, 7, 8), dtype=torch.uint8, generator=generator(seed))
    before = images.clone()
    options = TrainingOptions(padding=0, flip=False, cutout=side)
    found = augment(images, options, generator(seed))
    assert torch.equal(images, before)
    for image, result in zip(images, found, strict=True):
        mean = image.double().mean((1, 2), keepdim=True).round().to(torch.uint8)
        rows, columns = torch.where((result != image).any(0))
        if len(rows):
            assert int(rows.max() - rows.min()) < side
            assert int(columns.max() - columns.min()) < side
        same = result == image
        assert torch.equal(result[~same], mean.expand_as(image)[~same])


@pytest.mark.parametrize(("schedule", "top"), [("cosine", 20), ("one-cycle", 30)])
def test_learning_rates_rise_then_fall(schedule: Any, top: int) -> None:
    options = TrainingOptions(epochs=100, schedule=schedule, peak=0.5, warmup=20)
    rates = [options.learning_rate(step, 1) for step in range(100)]
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == rates[top] == 0.5
    assert 0 < rates[-1] < 0.001
    assert TrainingOptions(epochs=1, schedule=schedule).learning_rate(0, 1) > 0


def one_step(
    pixels: np.ndarray[Any, Any], labels: list[int], **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return weight and bias of a linear network before and after one step, in float64."""
    images = Images(pixels, np.array(labels), ("a", "b", "c"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    plain = {"padding": 0, "flip": False, "channels_last": False, "schedule": "cosine"}
    whole = TrainingOptions(epochs=1, batch_size=4, warmup=0, **plain, **options)
    before = [value.detach().double() for value in model[1].parameters()]
    Training(model, images, images, whole).run_epoch()
    return before, [value.detach().double() for value in model[1].parameters()]


def test_one_step_by_hand() -> None:
    """Nesterov's momentum, weight decay on weights only, label smoothing: written out."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 2, 2, 1), dtype=np.uint8)
    (weight, bias), found = one_step(
        pixels, [0, 1, 2, 0], peak=0.5, weight_decay=0.1, label_smoothing=0.2
    )
    x = torch.from_numpy(pixels.reshape(4, 4)).double() / 255
    target = torch.full((4, 3), 0.2 / 3, dtype=torch.float64)
    target[torch.arange(4), torch.tensor([0, 1, 2, 0])] += 0.8
    slope = ((x @ weight.T + bias).softmax(1) - target) / 4  # of the loss, by the logits
    for value, gradient in ((weight, slope.T @ x + 0.1 * weight), (bias, slope.sum(0))):
        value -= 0.5 * (gradient + 0.9 * gradient)  # the first step of Nesterov's momentum
    torch.testing.assert_close(found, [weight, bias], rtol=1e-5, atol=1e-6)


def test_one_step_of_adamw_by_hand() -> None:
    """Its first step is the sign of the gradient; the decay does not pass through it."""
    pixels = np.random.default_rng(0).integers(1, 256, (4, 2, 2, 1), dtype=np.uint8)
    (weight, bias), found = one_step(  # of one class, so no gradient is near 0
        pixels, [0, 0, 0, 0], optimizer="adamw", peak=0.01, weight_decay=0.1
    )
    sign = torch.tensor([-1.0, 1.0, 1.0])
    expected = [weight - 0.01 * (sign[:, None] + 0.1 * weight), bias - 0.01 * sign]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_step_in_bfloat16_is_close_to_one_in_float32_and_not_equal() -> None:
    options = TrainingOptions(epochs=1, batch_size=64, peak=0.01, padding=0, flip=False)
    few = DIGITS.subset(range(64))
    after = []
    for bfloat16 in (False, True):
        training = Training(network(), few, few, dataclasses.replace(options, bfloat16=bfloat16))
        training.run_epoch()
        after.append(training.tensors())
    exact, rounded = after
    weights = [name for name in exact if name.endswith("weight") and name.startswith("network/")]
    assert all(rounded[name].dtype == torch.float32 for name in weights)
    # bfloat16 has eight binary digits; a step moves these weights by less than 0.1.
    assert all(torch.allclose(exact[name], rounded[name], atol=0.02) for name in weights)
    assert not equal(exact, rounded)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_restored_training_goes_on_bit_for_bit(optimizer: Any) -> None:
    options = dataclasses.replace(OPTIONS, optimizer=optimizer, peak=0.01)
    whole = Training(network(), DIGITS, TEST, options)
    whole.run_epoch()
    kept = {name: value.clone() for name, value in whole.tensors().items()}
    resumed = Training(network(), DIGITS, TEST, options)
    resumed.restore(kept, whole.history)
    for each in (whole, resumed):
        each.run_epoch()
    assert equal(whole.tensors(), resumed.tensors())


def test_the_average_of_weights_by_hand() -> None:
    """The run delivers the average of the weights after each step; the start fades fast."""
    options = dataclasses.replace(OPTIONS, batch_size=len(DIGITS), epochs=5, average=0.3)
    training = Training(network(), DIGITS, TEST, options)
    expected: dict[str, Tensor] = {}
    for updates in range(options.epochs):  # each is one step
        training.run_epoch()
        decay = min(0.3, (1 + updates) / (10 + updates)) if updates else 0
        for name, value in training.network.state_dict().items():
            new = value.clone().double()
            counter = not value.is_floating_point()
            expected[name] = (
                new if counter or not updates else decay * expected[name] + (1 - decay) * new
            )
    for name, value in training.delivered().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


class Dropping(nn.Module):
    """A network of a user, with dropout, which draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.drop = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(self.drop(images))
        return logits


def test_dropout_is_repeatable_and_the_callers_random_state_untouched() -> None:
    outcomes = []
    for _ in range(2):
        torch.rand(3)  # a caller may have drawn anything
        before = torch.get_rng_state()
        training = Training(Dropping(), DIGITS, TEST, OPTIONS)
        training.run_epoch()
        outcomes.append(training.delivered())
        assert torch.equal(torch.get_rng_state(), before)
    assert equal(*outcomes)


def test_how_many_images_make_an_epoch() -> None:
    assert Training(network(), DIGITS[:130], TEST, OPTIONS).steps_per_epoch == 2  # the rest waits
    with pytest.raises(NotEnoughDataError, match=r"one batch of 64 images; found 10"):
        Training(network(), DIGITS[:10], TEST, OPTIONS)


def test_a_diverging_run_says_so() -> None:
    wild = dataclasses.replace(OPTIONS, peak=1e30, average=0.0)
    with pytest.raises(TrainingError, match=r"The loss .*diverged.*lower peak"):
        Training(network(), DIGITS, TEST, wild).run_epoch()
    made = network()
    with torch.no_grad():
        made.conv1.weight.fill_(1e20)  # statistics overflow under a finite loss
    with pytest.raises(TrainingError, match="A weight or a statistic is not finite any more"):
        Training(made, DIGITS, TEST, dataclasses.replace(OPTIONS, average=0.0)).run_epoch()


def test_options_out_of_range() -> None:
    negative = ("weight_decay", "padding", "cutout", "rotation", "warmup")
    zero, one = ("epochs", "batch_size", "peak"), ("momentum", "label_smoothing", "average")
    wrong = {**dict.fromkeys(negative, -1), **dict.fromkeys(zero, 0), **dict.fromkeys(one, 1)}
    for name, value in {**wrong, "schedule": "cosin"}.items():
        with pytest.raises(OptionError, match=f"`{name}` must be .*found {value!r}"):
            TrainingOptions(**{name: value})
