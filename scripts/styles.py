"""Measure methods on changes of style, which no filter of the spectrum can undo; half an hour.

    python scripts/styles.py mobilenet_v2 --photos DIR --weights FILE --styles DIR [--methods ...]

Edge drawings, filled silhouettes and cue conflicts of Geirhos et al. (ICLR 2019) in 16 categories,
each of which stands for several of the 1,000 classes: a category has the mean probability of its
classes, as the authors have it. The filter is fitted on ImageNet photographs. What is asked: that a
method makes nothing worse. The images of a style come shuffled, as one stream.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ttapca
from photographs import NETWORKS
from ttapca import networks
from ttapca.benchmark import recommended_layer
from ttapca.datasets import read_image_folder, to_tensor

STYLES = ("edges", "silhouettes", "cue-conflict")
METHODS = ("source", "bn", "wiener", "tent", "roid", "unmix-tns", "neo")
BATCHES = (50, 1)
SINGLE = ("source", "wiener", "unmix-tns", "neo")  # that take one image at a time
SEED = 0


def category_of(logits: Tensor, members: list[list[int]]) -> Tensor:
    """The category with the largest mean probability of its classes."""
    chances = logits.double().softmax(1)
    return torch.stack([chances[:, classes].mean(1) for classes in members], 1).argmax(1)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--photos", type=Path, required=True, help="ImageNet photographs")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--styles", type=Path, required=True, help="folder of the three styles")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    asked = parser.parse_args()
    network = networks.load(asked.weights, **NETWORKS[asked.network])
    network = network.to(memory_format=torch.channels_last)
    photos = read_image_folder(asked.photos, size=224, shorter_side=256)
    batches = [to_tensor(part) for part in np.array_split(photos.images, len(photos) // 25)]
    fitted = ttapca.fit(network, recommended_layer(network, photos), batches)
    categories = json.loads((asked.styles / "categories.json").read_text())
    print("| method | batches of | " + " | ".join(STYLES) + " |\n|---|--:|" + "--:|" * len(STYLES))
    for method in asked.methods:
        options = {"filter": fitted} if method == "wiener" else {}
        for size in BATCHES:
            if size == 1 and method not in SINGLE:
                continue
            errors = []
            for style in STYLES:
                found = read_image_folder(asked.styles / style, size=224)
                members = [categories[name] for name in found.class_names]
                order = np.random.default_rng(SEED).permutation(len(found))
                wrong = 0
                with ttapca.adapt(network, method, forgetting="online", **options) as adapted:
                    for rows in np.split(order, range(size, len(order), size)):
                        predicted = category_of(adapted(to_tensor(found.images[rows])), members)
                        wrong += int((predicted.numpy() != found.labels[rows]).sum())
                errors.append(100 * wrong / len(order))
            shown = " | ".join(f"{each:.1f}" for each in errors)
            print(f"| `{method}` | {size} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
