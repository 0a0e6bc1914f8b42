"""Measure how well errors are estimated without labels, over conditions; minutes a network.

    python scripts/expected_error.py WEIGHTS --normalise cifar10 --data cifar10 --root DIR

A filter is fitted on 10,000 training images, and the temperature on the last 1,000 test images. The
first images of the test part come as a stream for each condition, in batches of 200; estimates are
those of `health` at its end, with the default memory of 200 images, and the truth is the error of
the last 200 images. Beside it: the mean confidence (after the same temperature), and ATC (Garg et
al., ICLR 2022, https://arxiv.org/abs/2201.04234), the share of images that are less confident than
a threshold which gives the error of the held-out ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import ttapca
from ttapca import datasets, networks
from ttapca.benchmark import recommended_layer
from ttapca.corruptions import EXTRA, STANDARD, corrupt
from ttapca.datasets import to_tensor

SEVERITIES, FITTED, HELD_OUT, BATCH, SEED = (1, 3, 5), 10_000, 1_000, 200, 0


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, the mean one for equal values."""
    return np.array([(values < each).sum() + ((values == each).sum() - 1) / 2 for each in values])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("--normalise", help="for files of weights")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--root", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--images", type=int, default=600, help="of each condition")
    asked = parser.parse_args()
    network = networks.load(asked.weights, normalisation=asked.normalise)
    train, test = (datasets.load(asked.data, part, root=asked.root) for part in ("train", "test"))
    last = test[len(test) - HELD_OUT :]
    held_out = [
        (to_tensor(last.images[row : row + BATCH]), last.labels[row : row + BATCH])
        for row in range(0, HELD_OUT, BATCH)
    ]
    source = list(to_tensor(train.images[:FITTED]).split(BATCH))
    fitted = ttapca.fit(network, recommended_layer(network, train), source, labelled=held_out)
    with torch.no_grad():
        clean = torch.cat([network(batch) for batch, _ in held_out])
    wrong = float((clean.argmax(1) != torch.as_tensor(last.labels)).double().mean())
    threshold = float(clean.softmax(1).amax(1).quantile(wrong))
    found: dict[str, list[tuple[float, float, bool]]] = {}
    conditions = [("clean", 0)] + [
        (name, each) for name in (*STANDARD, *EXTRA) for each in SEVERITIES
    ]
    images, labels = test.images[: asked.images], torch.as_tensor(test.labels[: asked.images])
    for name, severity in conditions:
        pixels = images if name == "clean" else corrupt(images, name, severity, seed=SEED)
        batches = to_tensor(pixels).split(BATCH)
        with torch.no_grad():
            plain = network(batches[-1])
        options = {"filter": fitted, "forgetting": "online", "compare": True}
        with ttapca.adapt(network, "wiener", **options) as adapted:
            for batch in batches:
                logits = adapted(batch)
            health = adapted.health
        estimates = (health.expected_error, health.expected_error_untouched)
        for which, own, said in zip(
            ("adapted", "untouched"), (logits, plain), estimates, strict=True
        ):
            assert said is not None
            truth = float((own.argmax(1) != labels[-len(own) :]).double().mean())
            confidence = (own / fitted.temperature_).softmax(1).amax(1).mean().item()
            below = (own.softmax(1).amax(1) < threshold).double().mean().item()
            inside = said.low <= truth <= said.high
            found.setdefault(f"{which}, ours", []).append((said.share, truth, inside))
            found.setdefault(f"{which}, mean confidence", []).append((1 - confidence, truth, False))
            found.setdefault(f"{which}, ATC", []).append((below, truth, False))
    print(f"{asked.weights}: temperature {fitted.temperature_:.2f}, {len(conditions)} conditions")
    print("| estimate | mean difference | bias | rank correlation | in the interval |")
    print("|---|--:|--:|--:|--:|")
    for name, rows in found.items():
        share, truth, inside = (np.array(each) for each in zip(*rows, strict=True))
        rho = np.corrcoef(ranks(share), ranks(truth))[0, 1]
        away, held = 100 * (share - truth), f"{100 * inside.mean():.0f} %" * name.endswith("ours")
        print(f"| {name} | {np.abs(away).mean():.1f} | {away.mean():+.1f} | {rho:.2f} | {held} |")


if __name__ == "__main__":
    main()
