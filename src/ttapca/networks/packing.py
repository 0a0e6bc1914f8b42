"""From a finished run to a network that ships: half-precision weights and a card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import conform
from ttapca.datasets import Images
from ttapca.errors import CheckpointError, TrainingError
from ttapca.networks.descriptions import PACKED
from ttapca.networks.evaluation import Evaluation, Progress, evaluate
from ttapca.networks.loading import load
from ttapca.networks.network import NORMALISATIONS
from ttapca.networks.runs import LOG, WEIGHTS, read_history
from ttapca.networks.weight_files import SAFETENSORS, Weights, read_weights, write_weights
from ttapca.support.disk import make_folder, replace_file


@dataclass(frozen=True)
class Packed:
    """What was written.

    Attributes:
        weights: The safetensors file.
        card: The card, in Markdown.
        facts: The same facts as JSON.
        evaluation: Of the packed weights, on the test images.
    """

    weights: Path
    card: Path
    facts: Path
    evaluation: Evaluation


def pack(
    run: Path, name: str, folder: Path, test: Images, progress: Progress | None = None
) -> Packed:
    """Store the weights of a finished run in float16, measure what is stored, and write its card.

    Args:
        run: The folder of the run.
        name: What `load` shall know the network by.
        folder: Where the files go: `NAME.safetensors`, `NAME.md`, `NAME.json`.
        test: Test images, which the card's numbers come from.
        progress: Wraps the batches of the evaluation.

    Raises:
        TrainingError: The run is not finished.
        CheckpointError: Its files are damaged, or do not say what the card needs.

    Example:
        >>> pack(Path("nowhere"), "mine", Path("."), None)
        Traceback (most recent call last):
        ttapca.errors.TrainingError: Only a finished run is packed; nowhere has done 0 epochs...
    """
    done = len(read_history(run))
    weights = read_weights(run / WEIGHTS) if done else Weights({})
    wanted = weights.description.get("training", {}).get("epochs")
    if not done or done != wanted:
        raise TrainingError(
            f"Only a finished run is packed; {run} has done {done} epochs of {wanted or 'none'}. "
            "Run the same training command again to go on."
        )
    conform(weights.description, PACKED, f"The description in {run / WEIGHTS}", CheckpointError)
    make_folder(folder)
    path = folder / f"{name}{SAFETENSORS}"
    write_weights(path, _halved(weights.tensors), weights.description)
    outcome = evaluate(load(path), test, progress=progress)
    facts = _facts(name, weights.description, outcome, test)
    replace_file(folder / f"{name}.json", (json.dumps(facts, indent=2) + "\n").encode())
    log = (run / LOG).read_text(encoding="utf-8")
    replace_file(folder / f"{name}.md", _card(facts, log).encode())
    return Packed(path, folder / f"{name}.md", folder / f"{name}.json", outcome)


def command_of(description: Mapping[str, Any]) -> str:
    """The command that trains such a network again.

    Example:
        >>> command_of({"data": {"name": "digits"}, "architecture": "small-cnn",
        ...             "training": {"epochs": 3, "flip": False}})
        'ttapca train digits small-cnn --epochs 3 --no-flip --to DIR'
    """
    named = {dataclasses.astuple(value): name for name, value in NORMALISATIONS.items()}
    words = ["ttapca train", description["data"]["name"], description["architecture"]]
    for option, value in description["training"].items():
        flag = option.replace("_", "-")
        if option == "finished_epochs":
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {value}")
    given = description.get("normalisation", {"mean": (), "std": ()})
    name = named.get((tuple(given["mean"]), tuple(given["std"])))
    if name is not None:  # others are those of the training images
        words.append(f"--normalise {name}")
    if description.get("rotation_split"):
        words.append(f"--rotation-head {description['rotation_split']}")
    return " ".join([*words, "--to DIR"])


def _halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _facts(
    name: str, description: dict[str, Any], outcome: Evaluation, test: Images
) -> dict[str, Any]:
    by_class = zip(test.class_names, outcome.accuracy_of_class, strict=True)
    return {
        "name": name,
        **description,
        "command": command_of(description),
        "test_images": outcome.images,
        "accuracy": round(outcome.accuracy, 2),
        "calibration_error": round(outcome.calibration_error, 2),
        "accuracy_of_class": {
            label: None if value is None else round(value, 2) for label, value in by_class
        },
    }


def _card(facts: dict[str, Any], log: str) -> str:
    classes = "\n".join(
        f"| {label} | {value} |" for label, value in facts["accuracy_of_class"].items()
    )
    head = ""
    if facts.get("rotation_split"):
        head = (
            f"\nIt has a rotation head after `{facts['rotation_split']}` for test-time training: "
            "`ttapca.networks.load_rotation` gives both.\n"
        )
    return f"""\
# {facts["name"]}

A `{facts["architecture"]}` trained on `{facts["data"]["name"]}` with ttapca.
{head}
| | |
|---|---|
| test accuracy | {facts["accuracy"]} % of {facts["test_images"]:,} images |
| expected calibration error (15 bins) | {facts["calibration_error"]} % |
| images | {"x".join(map(str, facts["input_shape"]))}, in [0, 1]; normalisation is in the network |
| stored as | float16; the numbers above are of what is stored |
| seed | {facts["training"]["seed"]} |
| SHA-256 of the training images | `{facts["data"]["training_images"]}` |

    {facts["command"]}

## Intended use

Experiments with test-time adaptation: a known network to adapt, and a check that an installation
works. It knows the classes below and nothing else; it is no classifier for photographs of any
other kind or size, and it was chosen for its size, not for its accuracy. The test images played no
part in the training: no epoch and no option was chosen by them.

## Accuracy of each class [%]

| class | accuracy |
|---|---|
{classes}

## Log

```
{log}```
"""
