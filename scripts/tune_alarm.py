"""Choose the constants of `ShiftAlarm` on images that neither network nor filter has seen.

    python scripts/tune_alarm.py WEIGHTS FILTER --to scripts/results/alarm.json
        --data FOLDER --home DIR [--normalise cifar10]

FOLDER holds a `test` split that the network was not trained on. Clean streams, shuffled and sorted
by class, say how often the alarm is false. Streams of held-out conditions (the four extra
corruptions, and others at severities 1 to 4) say how many images pass until it is told. Everything
follows from the band energies and predictions of single images, which are computed once; so the
network predicts as it is, without adaptation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ttapca
from held_out import EXTRA
from held_out import STANDARD as OTHERS
from ttapca import networks
from ttapca.adaptation.shift_alarm import ShiftAlarm, skew_of
from ttapca.corruptions import corrupt
from ttapca.datasets import load, to_tensor
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.closed_form_rule import independent_images
from ttapca.spectral.constants import CONSTANTS

WEAK = [(name, severity) for name in (*OTHERS, *EXTRA) for severity in (1, 2)]
STRONG = [(name, 4) for name in OTHERS] + [(name, 5) for name in EXTRA]
SHIFTED = 300  # images a condition
REPEATED = 3  # times in another order
SEEDS = range(10)
BATCHES = (1, 200)
BLOCK_IMAGES = (16, 32, 64, 128)
BLOCKS = (1, 2, 3)
BEGINS = (0.002, 0.005, 0.01)

Seen = tuple[Tensor, Tensor]  # band energies and probabilities of every image


class Looker:
    """Computes what the alarm sees of images."""

    def __init__(self, weights: Path, fitted: ttapca.FittedFilter, normalise: str | None) -> None:
        network = networks.load(weights, normalisation=normalise).eval()
        self.adapted = ttapca.adapt(network, "wiener", filter=fitted, on_shift=print)
        (self.surface,) = (
            each for each in self.adapted.surfaces if isinstance(each, ttapca.SpectralGains)
        )
        assert fitted.classes_ is not None
        self.shares = fitted.classes_.shares
        self._normalise = network.normalise

    @property
    def gain(self) -> ClosedFormGain:
        """The gains that judge energies."""
        assert self.surface.closed_form is not None
        return self.surface.closed_form

    @torch.no_grad()
    def look(self, pixels: Any) -> Seen:
        """Band energies and probabilities of every image."""
        spectral = self.surface.filter
        assert spectral is not None
        energies, probabilities = [], []
        for part in to_tensor(np.ascontiguousarray(pixels)).split(200):
            away = self._normalise(part).flatten(1) - spectral.mean
            components = spectral.basis.project(away).square() / self.gain.variances
            energies.append(self.gain.by_band(components))
            with self.adapted.disabled():
                probabilities.append(self.adapted(part).softmax(1).double())
        return torch.cat(energies), torch.cat(probabilities)


def p_values(
    looker: Looker, seen: Seen, order: Any, batch: int, images: int, *, worst: bool = False
) -> list[Any]:
    """The p-value of every block, and the number of images up to its end.

    With `worst`, all images are taken for those of one class, as in a stream that starts shifted.
    """
    energies, probabilities = (each[torch.as_tensor(order)] for each in seen)
    found, counts, total, size = [], torch.zeros(probabilities.shape[1]), 0.0, 0
    parts = zip(energies.split(batch), probabilities.split(batch), strict=True)
    for number, (some, predicted) in enumerate(parts):
        counts = counts * math.exp(-len(some) / CONSTANTS.recent) + predicted.sum(0)
        total, size = total + some.sum(0), size + len(some)
        if size >= images:
            skew = 1.0 if worst else skew_of(counts, looker.shares)
            independent = independent_images(float(size), skew)
            evidence = looker.gain.evidence(torch.as_tensor(total / size), size, independent)
            found.append((evidence.p_value, min((number + 1) * batch, len(order))))
            total, size = 0.0, 0
    return found


def changes(alarm: ShiftAlarm, blocks: list[Any]) -> list[int]:
    """After how many images a shift begins, ends, begins, ..."""
    state, found = (False, 0), []
    for p_value, images in blocks:
        before, state = state[0], alarm.next(*state, p_value)
        if state[0] != before:
            found.append(images)
    return found


def orders(labels: Any, seed: int) -> dict[str, Any]:
    """Clean images in any order, and sorted by class with the classes in any order."""
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(labels))
    rank = generator.permutation(labels.max() + 1)
    by_class = shuffled[np.argsort(rank[labels[shuffled]], kind="stable")]
    return {"shuffled": shuffled, "sorted": by_class}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("filter", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--home", type=Path, required=True, help="where data and frost lie")
    asked = parser.parse_args()
    looker = Looker(asked.weights, ttapca.load(asked.filter), asked.normalise)
    test = load(asked.data, "test", root=asked.home)
    clean = looker.look(test.images)
    pixels = np.ascontiguousarray(test.images[:SHIFTED])
    shifts = {
        (name, severity): looker.look(
            corrupt(pixels, name, severity, textures=asked.home / "frost")
        )
        for name, severity in (*WEAK, *STRONG)
    }
    rows = []
    for batch, images in itertools.product(BATCHES, BLOCK_IMAGES):
        if images < batch and images != BLOCK_IMAGES[0]:
            continue  # blocks are single batches, whatever their least size
        quiet: dict[str, list[Any]] = {"shuffled": [], "sorted": []}
        for seed in SEEDS:
            for kind, order in orders(np.asarray(test.labels), seed).items():
                quiet[kind].append(p_values(looker, clean, order, batch, images))
        generator = np.random.default_rng(0)
        long = np.concatenate([generator.permutation(SHIFTED) for _ in range(REPEATED)])
        loud = {key: p_values(looker, seen, long, batch, images) for key, seen in shifts.items()}
        unsure = {
            key: p_values(looker, seen, long, batch, images, worst=True)
            for key, seen in shifts.items()
        }
        for blocks, begins in itertools.product(BLOCKS, BEGINS):
            alarm = ShiftAlarm(print, begins=begins, blocks=blocks, images=images)
            row: dict[str, Any] = {"batch": batch, "images": images, "blocks": blocks}
            row["begins"] = begins
            for kind, streams in quiet.items():
                false = sum((len(changes(alarm, each)) + 1) // 2 for each in streams)
                row[f"false alarms, {kind}"] = false
            row["clean images of each order"] = len(SEEDS) * len(test.labels)
            for kind, keys in (("weak", WEAK), ("strong", STRONG)):
                told = [changes(alarm, loud[key]) for key in keys]
                row[f"{kind} shifts told"] = f"{sum(map(bool, told))} of {len(keys)}"
                row[f"{kind}, median images"] = float(np.median([t[0] for t in told if t] or [0]))
                worst = sum(bool(changes(alarm, unsure[key])) for key in keys)
                row[f"{kind}, told from the start"] = f"{worst} of {len(keys)}"
                row[f"{kind}, told again"] = sum(max(0, len(each) - 1) for each in told)
            rows.append(row)
            print(row, flush=True)
    asked.to.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
