"""Training on digits: steps by hand, runs that are killed, and messages that say what is wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttapca.datasets import Images, read_digits
from ttapca.errors import (
    CheckpointError,
    LayerNotFoundError,
    LayerOutputError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
    StorageError,
    TrainingError,
)
from ttapca.networks import (
    RotationNetwork,
    Training,
    TrainingOptions,
    add_rotation_head,
    build,
    evaluate,
    load,
    load_rotation,
    train,
    turn,
)
from ttapca.networks.rotation import RotationHead, frozen_statistics
from ttapca.networks.runs import LOG, STATE, WEIGHTS, read_history
from ttapca.networks.training import augment
from ttapca.networks.weight_files import read_safetensors, read_weights, write_safetensors
from ttapca.support.disk import locked

OPTIONS = TrainingOptions(epochs=3, batch_size=64, peak=0.1, padding=1, flip=False, average=0.9)
DESCRIPTION = {
    "architecture": "small-cnn",
    "input_shape": [1, 8, 8],
    "normalisation": {"mean": [0.0], "std": [1.0]},
}
DIGITS, TEST = read_digits("train"), read_digits("test")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network() -> nn.Module:
    return build("small-cnn", input_shape=(1, 8, 8))


def run(folder: Path, options: TrainingOptions = OPTIONS, **changes: Any) -> None:
    told = {"network": network(), "description": DESCRIPTION, **changes}
    train(told.pop("network"), DIGITS, TEST, options, folder, **told)


def weights(folder: Path) -> dict[str, Tensor]:
    return read_weights(folder / WEIGHTS).tensors


def log(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / LOG).read_text().splitlines()))


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Images that are changed and turned ---------------------------------------------------------------


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


def test_turns() -> None:
    images = numbered(40, 2, 3, 3)
    turned, quarters = turn(images, generator())
    assert set(quarters.tolist()) == {0, 1, 2, 3}
    for image, result, number in zip(images, turned, quarters.tolist(), strict=True):
        for _ in range(number):  # by hand: a quarter turn is a transpose and a mirror
            image = image.transpose(1, 2).flip(1)
        assert torch.equal(result, image)


def test_only_squares_can_be_turned() -> None:
    with pytest.raises(ShapeError, match="must be square; found 8 x 6 pixels"):
        turn(numbered(4, 1, 8, 6), generator())


def test_turned_images_leave_no_trace_in_the_statistics() -> None:
    model = build("wrn-10-1").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with frozen_statistics(model):
        model(torch.rand(4, 3, 32, 32))
    assert equal(before, dict(model.state_dict()))
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


# Steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "top"), [("cosine", 20), ("one-cycle", 30)])
def test_learning_rates_rise_then_fall(schedule: Any, top: int) -> None:
    options = TrainingOptions(epochs=100, schedule=schedule, peak=0.5, warmup=20)
    rates = [options.learning_rate(step, 1) for step in range(100)]
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == rates[top] == 0.5
    assert 0 < rates[-1] < 0.001
    assert TrainingOptions(epochs=1, schedule=schedule).learning_rate(0, 1) > 0


def test_one_step_by_hand() -> None:
    """Nesterov's momentum, weight decay on weights only, label smoothing: written out."""
    schedule = {"epochs": 1, "batch_size": 4, "peak": 0.5, "schedule": "cosine", "warmup": 0}
    others = {"weight_decay": 0.1, "label_smoothing": 0.2, "padding": 0, "flip": False}
    options = TrainingOptions(**schedule, **others, channels_last=False)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 2, 2, 1), dtype=np.uint8)
    images = Images(pixels, np.array([0, 1, 2, 0]), ("a", "b", "c"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weight, bias = (value.detach().double().clone() for value in model[1].parameters())
    Training(model, images, images, options).run_epoch()
    x = torch.from_numpy(pixels.reshape(4, 4)).double() / 255
    target = torch.full((4, 3), 0.2 / 3, dtype=torch.float64)
    target[torch.arange(4), torch.tensor([0, 1, 2, 0])] += 0.8
    slope = ((x @ weight.T + bias).softmax(1) - target) / 4  # of the loss, by the logits
    for value, gradient in ((weight, slope.T @ x + 0.1 * weight), (bias, slope.sum(0))):
        value -= 0.5 * (gradient + 0.9 * gradient)  # the first step of Nesterov's momentum
    found = [value.detach().double() for value in model[1].parameters()]
    torch.testing.assert_close(found, [weight, bias], rtol=1e-5, atol=1e-6)


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


def test_one_step_of_adamw_by_hand() -> None:
    """Its first step is the sign of the gradient; the decay does not pass through it."""
    schedule = {"epochs": 1, "batch_size": 4, "peak": 0.01, "schedule": "cosine", "warmup": 0}
    options = TrainingOptions(
        **schedule, optimizer="adamw", weight_decay=0.1, padding=0, flip=False, channels_last=False
    )
    pixels = np.random.default_rng(0).integers(1, 256, (4, 2, 2, 1), dtype=np.uint8)
    images = Images(pixels, np.array([0, 0, 0, 0]), ("a", "b", "c"))  # so no gradient is near 0
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    weight, bias = (value.detach().clone() for value in model[1].parameters())
    Training(model, images, images, options).run_epoch()
    sign = torch.tensor([-1.0, 1.0, 1.0])
    expected = [weight - 0.01 * (sign[:, None] + 0.1 * weight), bias - 0.01 * sign]
    found = [value.detach() for value in model[1].parameters()]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


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


# Runs in a folder ---------------------------------------------------------------------------------


def test_a_run_delivers_what_it_measured(tmp_path: Path) -> None:
    twofold = add_rotation_head(network(), "conv2", generator(), (1, 8, 8))
    described = {**DESCRIPTION, "rotation_split": "conv2"}
    run(tmp_path, network=twofold, description=described)
    rows = log(tmp_path)
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert 0 < float(rows[-1]["rotation_accuracy"]) <= 100
    delivered = evaluate(load(tmp_path / WEIGHTS), TEST)
    assert delivered.accuracy == pytest.approx(float(rows[-1]["test_accuracy"]), abs=1e-3)
    description = read_weights(tmp_path / WEIGHTS).description
    assert description["training"]["finished_epochs"] == 3
    assert description["test_accuracy"] == pytest.approx(delivered.accuracy)
    assert load_rotation(tmp_path / WEIGHTS).split == "conv2"


# Kills itself before a step of that number, if it is not 0.
PROGRAM = """
import os, signal, sys
from ttapca.cli import main
from ttapca.networks import training
last, augment, steps = int(sys.argv.pop(1)), training.augment, []
def step(*given):
    steps.append(given)
    if len(steps) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(*given)
training.augment = step
main()
"""


def command(folder: Path, last: int = 0) -> list[str]:
    """A hundred steps in each epoch."""
    words = f"train digits small-cnn --epochs 4 --batch-size 12 --average 0.99 --to {folder}"
    words += " --rotation-head conv2 --cutout 2"
    return [sys.executable, "-c", PROGRAM, str(last), *words.split()]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path / "whole"), env=ENVIRONMENT, check=True, capture_output=True)
    killed = tmp_path / "killed"
    for done in (1, 2):  # twice: a resumed run can be killed as well
        process = subprocess.run(
            command(killed, last=150), env=ENVIRONMENT, capture_output=True, check=False
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert len(read_history(killed)) == done
    (killed / f".{STATE}.ttapca-unfinished-").write_bytes(b"what a kill while writing leaves")
    result = subprocess.run(
        command(killed), env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    assert f"going on after epoch {done} of 4" in result.stderr
    assert equal(weights(killed), weights(tmp_path / "whole"))
    folders = (tmp_path / "whole", killed)
    assert equal(*(read_safetensors(folder / STATE)[0] for folder in folders))
    for one, two in zip(*map(log, folders), strict=True):
        assert {**one, "seconds": ""} == {**two, "seconds": ""}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / STATE).stat().st_mtime_ns
    (tmp_path / LOG).unlink()  # as if killed between the state and the rest
    (tmp_path / WEIGHTS).unlink()
    run(tmp_path)
    assert (tmp_path / STATE).stat().st_mtime_ns == before
    assert (tmp_path / LOG).exists()
    assert load(tmp_path / WEIGHTS).classes == 10


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first epoch."""

    def stop(record: object) -> None:
        raise KeyboardInterrupt("enough")

    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(KeyboardInterrupt, match="enough"):
        run(folder, on_epoch=stop)
    return folder


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"description": None}, OptionError, "a run with architecture='small-cnn'; found None"),
        ({"description": {"input_shape": [8, 8]}}, OptionError, "`input_shape` must be a list"),
        ({"network": build("wrn-10-1", input_shape=(1, 8, 8))}, TrainingError, "not of this net"),
        (
            {"options": dataclasses.replace(OPTIONS, epochs=5)},
            OptionError,
            "holds a run with epochs=3; found 5. Give the same",
        ),
    ],
)
def test_a_folder_with_another_run(
    half_done: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = (half_done / STATE).read_bytes()
    with pytest.raises(error, match=message):
        run(half_done, **changes)
    assert (half_done / STATE).read_bytes() == before


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(StorageError, match=r"One process at a time"):
        run(tmp_path)


def test_a_damaged_state(half_done: Path, tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes((half_done / STATE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut short"):
        run(tmp_path)
    write_safetensors(tmp_path / STATE, {"a": torch.zeros(1)})
    with pytest.raises(TrainingError, match=r"not the state of a training run"):
        run(tmp_path)


def filled(value: float) -> Any:
    return lambda tensor: torch.full_like(tensor, value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("network/bn1.running_var", filled(torch.inf), "not finite"),
        ("momentum/fc.weight", filled(torch.nan), "not finite"),
        ("network/fc.weight", lambda t: t.half(), "another shape or type"),
        ("torch_generator", lambda t: t[:5], "another shape or type"),
        ("average/fc.weight", lambda t: None, "is missing"),
        ("momentum/unknown", lambda t: torch.zeros(3), "unknown"),
        ("generator", filled(255), "`generator` is no state"),
    ],
)
def test_a_state_that_does_not_fit(
    half_done: Path, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    changed = change(tensors.pop(name, None))
    tensors |= {} if changed is None else {name: changed}
    write_safetensors(tmp_path / STATE, tensors, words)
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match=f"state.safetensors: .*{message}"):
        run(tmp_path, network=model)
    assert equal(before, dict(model.state_dict()))


@pytest.mark.parametrize(
    ("change", "record", "message"),
    [
        ({"history": []}, {}, "`history` must be a list of 1"),
        ({"more": 1}, {}, "no names but options, description, history"),
        ({}, {"epoch": 7}, "the epochs from 1 on"),
        ({}, {"loss": float("nan")}, "not finite"),
    ],
)
def test_a_log_that_makes_no_sense(
    half_done: Path, tmp_path: Path, change: dict[str, Any], record: dict[str, Any], message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    facts = json.loads(words["facts"])
    facts["history"][0] |= record
    words["facts"] = json.dumps({**facts, **change})
    write_safetensors(tmp_path / STATE, tensors, words)
    with pytest.raises(CheckpointError, match=f"state.safetensors.*{message}"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match=f"state.safetensors.*{message}"):
        read_history(tmp_path)
