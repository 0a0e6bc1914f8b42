"""Poison streams of clean images with a few samples that are no photographs, and see what stays.

    python scripts/poison.py [--network cifar10-resnet20] [--data cifar10] [--filter FOLDER]
        [--method wiener] [--batches 1 20] [--only black,white] [--seeds 1]

A stream sees 100 clean images, then 1 or 50 hostile samples, then 100 clean images again. A line
for each poison: the error on the first 50 clean images after it and on the next 50, over that of a
stream without poison, in points; and how many of the hostile samples were called implausible.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import ttapca
from ttapca import networks
from ttapca.datasets import load, to_tensor

BEFORE, AFTER = 100, 50
FIT_IMAGES = 5000


def striped(like: Tensor) -> Tensor:
    """Bright stripes whose width differs from sample to sample."""
    columns = torch.arange(like.shape[-1])
    rows = [(columns // (1 + number % 7)) % 2 for number in range(len(like))]
    return torch.stack(rows).float()[:, None, None, :].expand_as(like).clone()


def checkered(like: Tensor) -> Tensor:
    """A checkerboard of single pixels."""
    rows, columns = torch.arange(like.shape[-2])[:, None], torch.arange(like.shape[-1])
    return ((rows + columns) % 2).float().expand_as(like).clone()


def one_channel(like: Tensor) -> Tensor:
    """The first channel is dead."""
    found = like.clone()
    found[:, 0] = 0
    return found


# Each makes hostile samples of clean ones.
POISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "black": torch.zeros_like,
    "white": torch.ones_like,
    "checkerboard": checkered,
    "stripes": striped,
    "negative": lambda x: 1 - x,
    "one channel dead": one_channel,
    "random pixels": lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)),
    "x 5": lambda x: 5 * x,
    "x 30": lambda x: 30 * x,
    "x 255": lambda x: 255 * x,
    "x 1e3": lambda x: 1e3 * x,
    "x 1e20": lambda x: 1e20 * x,
    "- 1e4": lambda x: x - 1e4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="cifar10-resnet20")
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--home", type=Path, default=Path("~/.cache/ttapca").expanduser())
    parser.add_argument("--filter", type=Path)
    parser.add_argument("--method", default="wiener")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 50])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only")
    asked = parser.parse_args()
    model = networks.load(asked.network, normalisation=asked.normalise).eval()
    options = {"filter": fitted_filter(model, asked)}
    test = load(asked.data, "test", root=asked.home)
    images, labels = to_tensor(np.asarray(test.images)), torch.as_tensor(np.asarray(test.labels))
    names = asked.only.split(",") if asked.only else list(POISONS)
    for batch in asked.batches:
        for count in asked.counts:
            for name in names:
                found = [
                    after_poison(model, images, labels, name, count, batch, seed, asked, options)
                    for seed in range(asked.seeds)
                ]
                near, far, noticed = np.mean(found, 0)
                print(
                    f"batches of {batch:3d}, {count:2d} x {name:18s} first {AFTER} {near:+6.1f}, "
                    f"next {AFTER} {far:+6.1f}, implausible {noticed:.0f}",
                    flush=True,
                )


def fitted_filter(model: torch.nn.Module, asked: argparse.Namespace) -> ttapca.FittedFilter:
    """Read the filter, or fit one at the first convolution."""
    if asked.filter is not None and asked.filter.exists():
        return ttapca.load(asked.filter)
    train = load(asked.data, "train", root=asked.home)[:FIT_IMAGES]
    batches = [
        to_tensor(np.asarray(train[first : first + 200].images))
        for first in range(0, len(train), 200)
    ]
    layer = next(path for path, each in model.named_modules() if isinstance(each, torch.nn.Conv2d))
    fitted = ttapca.fit(model, layer, batches)
    if asked.filter is not None:
        fitted.save(asked.filter)
    return fitted


def after_poison(
    model: torch.nn.Module,
    images: Tensor,
    labels: Tensor,
    name: str,
    count: int,
    batch: int,
    seed: int,
    asked: argparse.Namespace,
    options: dict[str, object],
) -> tuple[float, float, float]:
    """Return by how many points errors rise, early and later, and how many were implausible."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(images), generator=generator)
    before, hostile, after = rows.split([BEFORE, count, len(rows) - BEFORE - count])
    after = after[: 2 * AFTER]
    poison = POISONS[name](images[hostile])
    noticed = 0
    with ttapca.adapt(model, asked.method, forgetting="online", **options) as adapted:
        for each in (images[before], poison):
            for some in each.split(batch):
                adapted(some)
        noticed = getattr(adapted.health, "implausible", 0)
        poisoned = wrong(adapted, images[after], labels[after], batch)
        adapted.reset()
        for some in images[before].split(batch):
            adapted(some)
        without = wrong(adapted, images[after], labels[after], batch)
    rise = 100 * (poisoned.double() - without.double())
    return float(rise[:AFTER].mean()), float(rise[AFTER:].mean()), float(noticed)


def wrong(adapted: ttapca.Adapter, images: Tensor, labels: Tensor, batch: int) -> Tensor:
    """Return which predictions of a stream are wrong."""
    found = torch.cat([adapted(some).argmax(1) for some in images.split(batch)])
    return found != labels


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
