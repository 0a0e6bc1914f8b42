"""A training run in a folder that survives a crash.

`state.safetensors` has everything that a resumed run needs, and is replaced in one step after every
epoch; then `weights.safetensors`, which `load` reads, and `log.csv` are made from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ttapca._checks import ListOf, Plain, Record, Such, conform, rules_of, shown
from ttapca.datasets import Images
from ttapca.errors import CheckpointError, OptionError, TrainingError
from ttapca.networks.evaluation import Progress
from ttapca.networks.training import EpochRecord, Training, TrainingOptions
from ttapca.networks.weight_files import (
    DESCRIPTION,
    read_safetensors,
    write_safetensors,
    write_weights,
)
from ttapca.support.disk import locked, make_folder, replace_file
from ttapca.support.parsing import parse_json

STATE = "state.safetensors"
WEIGHTS = "weights.safetensors"
LOG = "log.csv"
FORMAT = "ttapca.training"
LARGEST_LOG = 200_000_000  # characters: a million epochs
MOST_EPOCHS = 10**6

_FACTS = Record(
    {
        "options": Record(others=Plain()),
        "description": Record(others=Plain()),
        "history": Such(
            ListOf(Record(rules_of(EpochRecord)), 1, MOST_EPOCHS),
            lambda records: all(each["epoch"] == n for n, each in enumerate(records, 1)),
            "the epochs from 1 on, one after the other",
        ),
    }
)


def train(
    network: nn.Module,
    training_images: Images,
    test_images: Images,
    options: TrainingOptions,
    folder: Path,
    *,
    description: dict[str, Any] | None = None,
    progress: Progress | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> list[EpochRecord]:
    """Train a network in a folder, or go on with the run that the folder holds.

    Args:
        network: Trained in place; a `RotationNetwork` learns both tasks.
        training_images: Labelled images that it learns from.
        test_images: Its accuracy on them is measured after each epoch; nothing is chosen by it.
        options: Of the training.
        folder: Made if it does not exist.
        description: Of the network, for `weights.safetensors`; anything JSON can hold.
        progress: Wraps the batches of each epoch; silent by default.
        on_epoch: Called with each new record.

    Returns:
        The records of all epochs, including those before a crash.

    Example:
        >>> import tempfile
        >>> from ttapca.datasets import read_digits
        >>> from ttapca.networks import build
        >>> digits, folder = read_digits("train"), Path(tempfile.mkdtemp())
        >>> network = build("small-cnn", input_shape=(1, 8, 8))
        >>> options = TrainingOptions(epochs=2, padding=1, flip=False)
        >>> records = train(network, digits, read_digits("test"), options, folder)
        >>> sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        ['log.csv', 'state.safetensors', 'weights.safetensors']
    """
    training = Training(network, training_images, test_images, options)
    conform(description or {}, DESCRIPTION, "The description of a network", OptionError)
    make_folder(folder)
    with locked(folder):
        facts = {"options": dataclasses.asdict(options), "description": description or {}}
        if (folder / STATE).exists():
            _restore(training, folder / STATE, facts)
            _write_results(training, folder, facts)
        while not training.finished:
            try:
                record = training.run_epoch(progress)
            except TrainingError as error:
                raise TrainingError(f"{folder}: {error}") from error
            _write_state(training, folder / STATE, facts)
            _write_results(training, folder, facts)
            if on_epoch:
                on_epoch(record)
    return training.history


def read_history(folder: Path) -> list[EpochRecord]:
    """Return the epochs that a run has done; none if the folder holds no run."""
    path = folder / STATE
    return _read_state(path)[2] if path.exists() else []


def _write_state(training: Training, path: Path, facts: dict[str, Any]) -> None:
    history = [dataclasses.asdict(record) for record in training.history]
    metadata = {"format": FORMAT, "facts": json.dumps({**facts, "history": history})}
    write_safetensors(path, training.tensors(), metadata)


def _write_results(training: Training, folder: Path, facts: dict[str, Any]) -> None:
    last = training.history[-1]
    description = {
        **facts["description"],
        "training": {**facts["options"], "finished_epochs": last.epoch},
        "test_accuracy": last.test_accuracy,
    }
    write_weights(folder / WEIGHTS, training.delivered(), description)
    lines = [",".join(field.name for field in dataclasses.fields(EpochRecord))]
    for record in training.history:
        values = dataclasses.astuple(record)
        lines.append(",".join("" if value is None else f"{value:.6g}" for value in values))
    replace_file(folder / LOG, ("\n".join(lines) + "\n").encode())


def _restore(training: Training, path: Path, facts: dict[str, Any]) -> None:
    tensors, saved, history = _read_state(path)
    for part in ("options", "description"):
        before, now = saved[part], json.loads(json.dumps(facts[part]))  # tuples become lists
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise OptionError(
                    f"{path.parent} holds a run with {name}={shown(before.get(name))}; found "
                    f"{shown(now.get(name))}. Give the same options, or another folder."
                )
    try:
        training.restore(tensors, history)
    except TrainingError as error:
        raise TrainingError(f"{path}: {error}") from error


def _read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[EpochRecord]]:
    """Return the tensors of a saved state, its facts, and the records of its epochs."""
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise TrainingError(f"{path} is not the state of a training run. Choose another folder.")
    where = f"The log in {path}"
    if "facts" not in metadata:
        raise CheckpointError(f"{where} is missing. Start again in a new folder.")
    facts = parse_json(metadata["facts"], where, CheckpointError, largest=LARGEST_LOG)
    conform(facts, _FACTS, where, CheckpointError)
    return tensors, facts, [EpochRecord(**record) for record in facts["history"]]
