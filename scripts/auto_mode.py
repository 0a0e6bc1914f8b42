"""Measure the mode `auto` on streams where adapting gains, does nothing, or does harm.

    python scripts/auto_mode.py WEIGHTS --normalise cifar10 --root DIR --recorded FOLDER

The outputs of both networks are recorded once for each stream (ten seconds with one thread), and
the rule of `ttapca.adaptation.auto_mode` is run on them: errors over the whole stream of the
untouched network, of the adapted one, and of the one that `auto` answers with. A filter is fitted
on 10,000 training images, and the temperature on the last 1,000 test images. Orders are shuffled,
sorted by class (200 images of each), runs of 50 images of a class, and two conditions in turn, 500
images each. Recordings hold no images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ttapca
from other_content import changes
from ttapca import datasets, networks
from ttapca.adaptation.auto_mode import judged
from ttapca.benchmark import recommended_layer
from ttapca.corruptions import EXTRA, STANDARD, corrupt
from ttapca.datasets import to_tensor

FITTED, HELD_OUT, SEED = 10_000, 1_000, 0
ORDERS = ("shuffled", "sorted", "runs of 50", "in turn")
MILD = (
    "gaussian_noise", "defocus_blur", "motion_blur", "snow", "brightness", "elastic_transform",
    "pixelate", "jpeg_compression",
)  # fmt: skip
# With runs, which take more passes, a part of the conditions.
RUNS = (
    "gaussian_noise", "glass_blur", "defocus_blur", "snow", "contrast", "pixelate",
    "jpeg_compression",
)  # fmt: skip
PAIRS = (("clean", "gaussian_noise 5"), ("fog 5", "upside down"), ("inverted", "contrast 5"))


def conditions(pixels: np.ndarray) -> dict[str, Callable[[], Tensor]]:
    """The images under each condition, made when they are asked for."""
    found: dict[str, Callable[[], Tensor]] = {"clean": lambda: to_tensor(pixels)}
    for name, images in changes(to_tensor(pixels)).items():
        found[name] = lambda images=images: images
    for severity, names in ((5, (*STANDARD, *EXTRA)), (2, MILD)):
        for name in names:
            found[f"{name} {severity}"] = lambda name=name, severity=severity: to_tensor(
                corrupt(pixels, name, severity, seed=SEED)
            )
    return found


def places(order: str, labels: np.ndarray) -> np.ndarray:
    """The places of the images in a stream of this order."""
    rng, classes = np.random.default_rng(SEED), int(labels.max()) + 1
    if order in ("shuffled", "in turn"):
        return np.arange(len(labels))
    if order == "sorted":
        return np.concatenate([np.flatnonzero(labels == each) for each in rng.permutation(classes)])
    runs: list[np.ndarray] = []
    for each in range(classes):
        own = np.flatnonzero(labels == each)
        runs += [own[first : first + 50] for first in range(0, len(own), 50)]
    return np.concatenate([runs[number] for number in rng.permutation(len(runs))])


def streams(pixels: np.ndarray, order: str) -> dict[str, Callable[[], Tensor]]:
    """The conditions of one order."""
    found = conditions(pixels)
    if order == "in turn":
        return {
            f"{one} / {two}": lambda one=one, two=two: torch.cat(
                [
                    part[number % 2]
                    for number, part in enumerate(
                        zip(found[one]().split(500), found[two]().split(500), strict=True)
                    )
                ]
            )
            for one, two in PAIRS
        }
    if order == "shuffled":
        return found
    chosen = {"clean", *changes(torch.zeros(1, 3, 32, 32)), *(f"{each} 5" for each in RUNS)}
    return {name: make for name, make in found.items() if name in chosen}


def record(asked: argparse.Namespace) -> None:
    """Record both networks' logits on the streams that have no file yet."""
    torch.set_num_threads(1)
    network = networks.load(asked.weights, normalisation=asked.normalise)
    train, test = (datasets.load(asked.data, part, root=asked.root) for part in ("train", "test"))
    last = test[len(test) - HELD_OUT :]
    held_out = [(to_tensor(last.images), last.labels)]
    source = list(to_tensor(train.images[:FITTED]).split(200))
    layer = recommended_layer(network, train)
    fitted = ttapca.fit(network, layer, source, labelled=held_out)
    options = {"filter": fitted, "forgetting": "online"}
    pixels, labels = (part[: asked.images] for part in (test.images, np.array(test.labels)))
    for order in asked.orders.split(","):
        at = places(order, labels)
        for name, make in streams(pixels, order).items():
            if asked.conditions and name not in asked.conditions.split(","):
                continue
            file = asked.recorded / f"{order}~{name.replace('/', 'then')}.npz".replace(" ", "_")
            if file.exists():
                continue
            found: list[list[Tensor]] = [[], []]
            with ttapca.adapt(network, "wiener", **options) as adapted:
                for batch in make()[torch.as_tensor(at)].split(asked.batch):
                    found[0].append(adapted(batch))
                    with adapted.disabled(), torch.no_grad():
                        found[1].append(network(batch))
            one, two = (torch.cat(each).numpy() for each in found)
            np.savez(file, a=one, u=two, y=labels[at], T=fitted.temperature_)


def served(file: Path, batch: int = 50) -> tuple[list[float], list[int]]:
    """Errors of the untouched, the adapted and the chosen network, and where `auto` switched."""
    found = np.load(file)
    adapted, untouched = (torch.from_numpy(found[each]) for each in "au")
    truth, state, chosen, switches = torch.from_numpy(found["y"]), None, [], []
    for first in range(0, len(truth), batch):
        part = slice(first, first + batch)
        before = 0 if state is None else state.switches
        state = judged(state, adapted[part], untouched[part], float(found["T"]))
        chosen.append((adapted if state.adapting else untouched)[part])
        if state.switches > before:
            switches.append(first + batch)
    every = (untouched, adapted, torch.cat(chosen))
    return [float(100 * (each.argmax(1) != truth).double().mean()) for each in every], switches


def main() -> None:
    """Record what is missing, and print a table for each order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--normalise", help="for files of weights")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--root", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--recorded", type=Path, required=True, help="folder of recordings")
    parser.add_argument("--images", type=int, default=2000, help="of each stream")
    parser.add_argument("--batch", type=int, default=50, help="images of a request")
    parser.add_argument("--conditions", help="some of them, with commas between; no spaces after")
    parser.add_argument("--orders", default=",".join(ORDERS), help="with commas between")
    parser.add_argument("--only-rule", action="store_true", help="use what is recorded")
    asked = parser.parse_args()
    asked.recorded.mkdir(parents=True, exist_ok=True)
    if not asked.only_rule:
        record(asked)
    for order in asked.orders.split(","):
        print(f"\n| {order} | untouched | adapted | auto | switches after |")
        print("|---|--:|--:|--:|---|")
        rows = []
        for file in sorted(asked.recorded.glob(f"{order.replace(' ', '_')}~*.npz")):
            errors, switches = served(file, asked.batch)
            rows.append(errors)
            name = file.stem.partition("~")[2].replace("_", " ")
            told = " | ".join(f"{each:.1f}" for each in errors)
            print(f"| {name} | {told} | {', '.join(map(str, switches))} |")
        if rows:
            untouched, adapted, auto = np.array(rows).T
            means = " | ".join(f"{each.mean():.1f}" for each in (untouched, adapted, auto))
            print(f"| mean | {means} | |")
            lost = np.maximum(np.array([adapted, auto]) - untouched, 0)
            told = " | ".join(f"{each.mean():.1f}, {(each > 0.5).sum()}" for each in lost)
            print(f"| lost to the untouched on average, streams with over 0.5 | | {told} | |")


if __name__ == "__main__":
    main()
