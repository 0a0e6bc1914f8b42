"""Training on digits: it learns, it survives being killed, and it says what is wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ttapca.datasets import Images, read_digits
from ttapca.errors import (
    CheckpointError,
    NotEnoughDataError,
    OptionError,
    StorageError,
    TrainingError,
)
from ttapca.networks import (
    Training,
    TrainingOptions,
    add_rotation_head,
    build,
    evaluate,
    load,
    load_rotation,
    train,
)
from ttapca.networks.runs import LOG, STATE, WEIGHTS, read_history
from ttapca.networks.weight_files import read_safetensors, read_weights, write_safetensors

OPTIONS = TrainingOptions(epochs=4, batch_size=64, peak=0.1, padding=1, flip=False, average=0.9)
DESCRIPTION = {
    "architecture": "small-cnn",
    "input_shape": [1, 8, 8],
    "normalisation": {"mean": [0.0], "std": [1.0]},
}


def digits(split: str = "train") -> Images:
    return read_digits(split)  # type: ignore[arg-type]


def network() -> nn.Module:
    return build("small-cnn", input_shape=(1, 8, 8))


def run(folder: Path, options: TrainingOptions = OPTIONS, model: nn.Module | None = None) -> None:
    train(model or network(), digits(), digits("test"), options, folder, description=DESCRIPTION)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_weights(folder / WEIGHTS).tensors


def log(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / LOG).read_text().splitlines()))


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_it_learns_and_delivers_what_it_measured(tmp_path: Path) -> None:
    run(tmp_path, dataclasses.replace(OPTIONS, epochs=10))
    rows = log(tmp_path)
    assert [row["epoch"] for row in rows] == [str(number) for number in range(1, 11)]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) / 4
    assert rows[0]["rotation_accuracy"] == ""
    delivered = evaluate(load(tmp_path / WEIGHTS), digits("test"))
    assert delivered.accuracy > 50  # by chance: 10
    assert delivered.accuracy == pytest.approx(float(rows[-1]["test_accuracy"]), abs=1e-3)
    description = read_weights(tmp_path / WEIGHTS).description
    assert description["training"]["finished_epochs"] == 10
    assert description["test_accuracy"] == pytest.approx(delivered.accuracy)


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    run(tmp_path / "c", dataclasses.replace(OPTIONS, seed=1))
    assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


class Dropping(nn.Module):
    """A network of a user, with dropout, which draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.drop = nn.Dropout(0.2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(self.drop(images))
        return logits


def test_dropout_is_repeatable_and_the_callers_random_state_untouched() -> None:
    outcomes = []
    for _ in range(2):
        torch.rand(3)  # a caller may have drawn anything
        before = torch.get_rng_state()
        training = Training(Dropping(), digits(), digits("test"), OPTIONS)
        training.run_epoch()
        outcomes.append(training.delivered())
        assert torch.equal(torch.get_rng_state(), before)
    assert equal(*outcomes)


def command(folder: Path) -> list[str]:
    """Many small steps, so that an epoch lasts long enough to be killed in."""
    words = f"train digits small-cnn --epochs 4 --batch-size 12 --average 0.99 --to {folder}"
    words += " --rotation-head conv2 --cutout 2"
    return [sys.executable, "-c", "from ttapca.cli import main; main()", *words.split()]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path / "whole"), env=ENVIRONMENT, check=True, capture_output=True)
    killed = tmp_path / "killed"
    for _ in range(2):  # twice: a resumed run can be killed as well
        known = len(read_history(killed))
        process = subprocess.Popen(
            command(killed), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(read_history(killed)) <= known:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    done = len(read_history(killed))
    assert 2 <= done < 4
    (killed / f".{STATE}.ttapca-unfinished-").write_bytes(b"what a kill while writing leaves")
    result = subprocess.run(
        command(killed), env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    assert f"going on after epoch {done} of 4" in result.stderr
    assert equal(weights(killed), weights(tmp_path / "whole"))
    whole, resumed = (
        read_safetensors(folder / STATE)[0] for folder in (tmp_path / "whole", killed)
    )
    assert equal(whole, resumed)  # momentum, average and generators as well
    columns = ("loss", "train_accuracy", "rotation_accuracy", "test_accuracy", "learning_rate")
    logs = [log(folder) for folder in (tmp_path / "whole", killed)]
    for one, two in zip(*logs, strict=True):
        assert [one[name] for name in columns] == [two[name] for name in columns]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / STATE).stat().st_mtime_ns
    (tmp_path / LOG).unlink()  # as if killed between the state and the rest
    (tmp_path / WEIGHTS).unlink()
    run(tmp_path)
    assert (tmp_path / STATE).stat().st_mtime_ns == before
    assert (tmp_path / LOG).exists()
    assert load(tmp_path / WEIGHTS).classes == 10


def test_a_folder_with_another_run(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(OptionError, match=r"holds a run with epochs=4; found 5. Give the same"):
        run(tmp_path, dataclasses.replace(OPTIONS, epochs=5))
    with pytest.raises(OptionError, match=r"holds a run with architecture='small-cnn'; found None"):
        train(network(), digits(), digits("test"), OPTIONS, tmp_path)
    with pytest.raises(TrainingError, match=r"not of this network"):
        run(tmp_path, model=build("wrn-10-1", input_shape=(1, 8, 8)))


def test_a_damaged_state(tmp_path: Path) -> None:
    run(tmp_path)
    content = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=r"cut short"):
        run(tmp_path)
    write_safetensors(tmp_path / STATE, {"a": torch.zeros(1)})
    with pytest.raises(TrainingError, match=r"not the state of a training run"):
        run(tmp_path)
    words = {"format": "ttapca.training", "facts": '{"history": [{"epoch": 1}]}'}
    write_safetensors(tmp_path / STATE, {"a": torch.zeros(1)}, words)
    with pytest.raises(CheckpointError, match=r"log in .*: the content must be an object with `op"):
        read_history(tmp_path)


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first epoch."""

    class StopError(Exception):
        pass

    def stop(record: object) -> None:
        raise StopError("enough")

    folder = tmp_path_factory.mktemp("run")
    with pytest.raises(StopError, match="enough"):
        train(
            network(), digits(), digits("test"), OPTIONS, folder,
            description=DESCRIPTION, on_epoch=stop,
        )  # fmt: skip
    return folder


def filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(tensor, value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("network/fc.weight", lambda t: filled(t, torch.nan), "not finite"),
        ("network/bn1.running_var", lambda t: filled(t, torch.inf), "not finite"),
        ("average/fc.weight", lambda t: filled(t, torch.nan), "not finite"),
        ("momentum/fc.weight", lambda t: filled(t, torch.nan), "not finite"),
        ("momentum/fc.weight", lambda t: t[:1], "of another form"),
        ("momentum/fc.weight", lambda t: t.double(), "of another form"),
        ("network/fc.weight", lambda t: t.half(), "of another form"),
        ("average/fc.weight", lambda t: None, "is missing"),
        ("generator", lambda t: None, "is missing"),
        ("generator", lambda t: filled(t, 255), "`generator` is no state"),
        ("torch_generator", lambda t: filled(t, 255), "`torch_generator` is no state"),
        ("torch_generator", lambda t: t[:5], "of another form"),
        ("momentum/unknown", lambda t: torch.zeros(3), "unknown"),
    ],
)
def test_a_state_that_does_not_fit(
    half_done: Path, tmp_path: Path, name: str, change, message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    changed = change(tensors.pop(name, None))
    tensors |= {} if changed is None else {name: changed}
    write_safetensors(tmp_path / STATE, tensors, words)
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TrainingError, match=f"state.safetensors: .*{message}"):
        run(tmp_path, model=model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": []}, "`history` must be a list of 1"),
        ({"history": 3}, "`history` must be a list"),
        ({"options": []}, "`options` must be an object"),
        ({"more": 1}, "no names but options, description, history"),
    ],
)
def test_a_log_that_makes_no_sense(
    half_done: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    facts = {**json.loads(words["facts"]), **change}
    write_safetensors(tmp_path / STATE, tensors, {**words, "facts": json.dumps(facts)})
    with pytest.raises(CheckpointError, match=f"state.safetensors: .*{message}"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"epoch": 7}, "the epochs from 1 on"),
        ({"loss": float("nan")}, "not finite"),
        ({"loss": "x"}, r"`history\[0\].loss` must be a finite number"),
        ({"extra": 1}, r"`history\[0\]` must be an object with no names but"),
    ],
)
def test_a_record_that_makes_no_sense(
    half_done: Path, tmp_path: Path, record: dict[str, object], message: str
) -> None:
    tensors, words = read_safetensors(half_done / STATE)
    facts = json.loads(words["facts"])
    facts["history"][0] |= record
    write_safetensors(tmp_path / STATE, tensors, {**words, "facts": json.dumps(facts)})
    with pytest.raises(CheckpointError, match=f"state.safetensors.*{message}"):
        read_history(tmp_path)


def test_a_description_that_could_not_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`input_shape` must be a list of 3"):
        train(
            network(), digits(), digits("test"), OPTIONS, tmp_path,
            description={"input_shape": [8, 8]},
        )  # fmt: skip


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    from ttapca.support.disk import locked

    with locked(tmp_path), pytest.raises(StorageError, match=r"One process at a time"):
        run(tmp_path)


def test_a_diverging_run_says_so() -> None:
    wild = dataclasses.replace(OPTIONS, peak=1e30, average=0.0)
    training = Training(network(), digits(), digits("test"), wild)
    with pytest.raises(TrainingError, match=r"diverged.*lower peak"):
        training.run_epoch()


def test_too_few_images() -> None:
    with pytest.raises(NotEnoughDataError, match=r"one batch of 64 images; found 10"):
        Training(network(), digits()[:10], digits("test"), OPTIONS)


def test_the_last_batch_that_is_not_full_is_left_out() -> None:
    training = Training(network(), digits()[:130], digits("test"), OPTIONS)
    assert training.steps_an_epoch == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("peak", 0.0),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("label_smoothing", 1.0),
        ("average", 1.0),
        ("padding", -1),
        ("rotation", -1.0),
        ("warmup", -1.0),
    ],
)
def test_options_out_of_range(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"`{name}` is .*found {value}"):
        TrainingOptions(**{name: value})  # type: ignore[arg-type]


def test_a_rotation_head_learns_too(tmp_path: Path) -> None:
    twofold = add_rotation_head(network(), "conv2", torch.Generator().manual_seed(0), (1, 8, 8))
    options = dataclasses.replace(OPTIONS, epochs=8)
    records = train(
        twofold,
        digits(),
        digits("test"),
        options,
        tmp_path,
        description={**DESCRIPTION, "rotation_split": "conv2"},
    )
    assert records[-1].rotation_accuracy is not None
    assert records[-1].rotation_accuracy > 40  # by chance: 25; 58 to 65 for several seeds
    assert records[-1].test_accuracy > 50  # by chance: 10; 95 or 96
    assert evaluate(load(tmp_path / WEIGHTS), digits("test")).accuracy == pytest.approx(
        records[-1].test_accuracy
    )
    assert load_rotation(tmp_path / WEIGHTS).split == "conv2"


def test_memory_layout_changes_no_result_beyond_rounding() -> None:
    records = []
    for layout in (True, False):
        options = dataclasses.replace(OPTIONS, channels_last=layout)
        records.append(Training(network(), digits(), digits("test"), options).run_epoch())
    assert records[0].loss == pytest.approx(records[1].loss, rel=1e-3)


def test_one_step_by_hand() -> None:
    """Nesterov's momentum, weight decay on weights only, label smoothing: written out."""
    options = TrainingOptions(
        epochs=1,
        batch_size=4,
        peak=0.5,
        schedule="cosine",
        warmup=0,
        weight_decay=0.1,
        label_smoothing=0.2,
        padding=0,
        flip=False,
        channels_last=False,
    )
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


def test_a_statistic_that_overflows_under_a_finite_loss() -> None:
    made = network()
    with torch.no_grad():
        made.conv1.weight.fill_(1e20)
    training = Training(made, digits(), digits("test"), dataclasses.replace(OPTIONS, average=0.0))
    with pytest.raises(TrainingError, match="A weight or a statistic is not finite any more"):
        training.run_epoch()
