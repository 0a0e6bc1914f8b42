"""Put a finished training run into the package: float16 weights, a card, the facts as JSON.

    python scripts/pack_checkpoint.py RUN NAME [--data cifar10] [--to src/ttapca/networks/weights]
                                      [--least 90]

Prints the accuracy and the size of what is stored; exits with 1 where they break the rules.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ttapca._checks import Plain, Record, Text, Whole, conform
from ttapca.cli.arguments import cache_root
from ttapca.datasets import Images
from ttapca.datasets import load as load_images
from ttapca.errors import CheckpointError, TrainingError
from ttapca.networks import NORMALISATIONS, Evaluation, evaluate, load
from ttapca.networks.network import INPUT_SHAPE
from ttapca.networks.runs import LOG, WEIGHTS, read_history
from ttapca.networks.weight_files import WeightFile, read_weights, write_weights
from ttapca.support.disk import replace_file

MOST_BYTES = 3_000_000
PACKAGED = Path(__file__).parents[1] / "src" / "ttapca" / "networks" / "weights"

# What a card is made of.
NEEDED = Record(
    {
        "architecture": Text(100),
        "input_shape": INPUT_SHAPE,
        "data": Record({"name": Text(), "training_images": Text(64)}, others=Plain()),
        "training": Record({"epochs": Whole(1), "seed": Whole(-(2**63))}, others=Plain()),
    },
    others=Plain(),
)


def pack(run: Path, name: str, folder: Path, test: Images) -> Evaluation:
    """Store the weights of a finished run in float16, measure what is stored, write its card."""
    done = len(read_history(run))
    weights = read_weights(run / WEIGHTS) if done else WeightFile(run / WEIGHTS, {})
    wanted = weights.description.get("training", {}).get("epochs")
    if not done or done != wanted:
        raise TrainingError(
            f"Only a finished run is packed; {run} has done {done} epochs of {wanted or 'none'}. "
            "Run the same training command again to go on."
        )
    conform(weights.description, NEEDED, f"The description in {run / WEIGHTS}", CheckpointError)
    halved = {
        key: value.to(torch.float16) if value.is_floating_point() else value
        for key, value in weights.tensors.items()
    }
    write_weights(folder / f"{name}.safetensors", halved, weights.description)
    outcome = evaluate(load(folder / f"{name}.safetensors"), test)
    facts = facts_of(name, weights.description, outcome, test)
    replace_file(folder / f"{name}.json", (json.dumps(facts, indent=2) + "\n").encode())
    log = (run / LOG).read_text(encoding="utf-8")
    replace_file(folder / f"{name}.md", card(facts, log).encode())
    return outcome


def command_of(description: Mapping[str, Any]) -> str:
    """The command that trains such a network again."""
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
    if description.get("start"):
        words.append(f"--start {description['start']}")
    if description.get("rotation_split"):
        words.append(f"--rotation-head {description['rotation_split']}")
    return " ".join([*words, "--to DIR"])


def facts_of(
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


def card(facts: dict[str, Any], log: str) -> str:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--to", type=Path, default=PACKAGED)
    parser.add_argument("--least", type=float, default=90.0, help="accuracy in percent")
    options = parser.parse_args()
    test = load_images(options.data, "test", root=cache_root())
    outcome = pack(options.run, options.name, options.to, test)
    path = options.to / f"{options.name}.safetensors"
    size = path.stat().st_size
    print(f"{path}: {outcome.accuracy:.2f} %, {size:,} bytes")
    good = outcome.accuracy >= options.least and size <= MOST_BYTES
    print(f"at least {options.least} % and at most {MOST_BYTES:,} bytes: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
