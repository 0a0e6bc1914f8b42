"""Measure `wiener` on streams of every kind, under the conditions of the tables or held-out ones.

    python scripts/tune_chain.py NETWORK [--normalise cifar10] [--data cifar10] --cache DIR
        [--held-out] [--images 500] [--streams shuffled,sorted] [--conditions contrast,snow]
        [--set memory=200] [--option order=shuffled] [--method wiener]

NETWORK is a file of weights or the name of a network of the package. `--set` changes a constant of
`ttapca.spectral.constants`, which `wiener` goes by, `--option` an option of the method. DIR keeps
filters and corrupted images. With `--held-out`, conditions are such that no table uses, and images
the last ones of the test set, where tables on fewer than all images take the first: constants are
chosen by these.

A line for each stream: mean error in percent over the corruptions, in brackets the clean error, and
forward passes for a batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ttapca
from held_out import SEED
from ttapca import networks
from ttapca.benchmark.streams import dirichlet_stretches
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import Images, load, to_tensor
from ttapca.methods.method import Method, Mixture, registration
from ttapca.methods.wiener import Wiener
from ttapca.spectral import image_statistics, source_classes
from ttapca.spectral.constants import CONSTANTS, Constants

REPORTED = ("gaussian_noise_5", "defocus_blur_5", "snow_5", "contrast_5", "jpeg_compression_5")
HELD_OUT = ("speckle_noise_5", "gaussian_blur_5", "spatter_5", "saturate_5", "contrast_4")
ALL = tuple(
    f"{name}_5"
    for name in (
        *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
        *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
        *("elastic_transform", "pixelate", "jpeg_compression"),
    )
)

# Constants by which `fit` measures; it takes them from their modules.
MEASURED = ("stray_share", "pair_middle", "ridge")


@dataclasses.dataclass(frozen=True)
class Stream:
    """How a stream comes.

    Attributes:
        batch: Images in a batch.
        order: `shuffled`, `sorted`, `dirichlet`, `few` (three classes a batch in no order), or the
            mean length of a run.
        forgetting: As for `ttapca.adapt`.
        joint: Whether the conditions come in one stream: `mixed` in every batch, or `changing`.
        images: At most so many of a condition.
    """

    batch: int = 100
    order: str = "shuffled"
    forgetting: str = "online"
    joint: str = ""
    images: int = 10**9


SINGLE = 300
STREAMS = {
    "shuffled": Stream(),
    "sorted": Stream(order="sorted"),
    "dirichlet": Stream(order="dirichlet"),
    "few": Stream(order="few"),
    "runs 5": Stream(order="5"),
    "mixed": Stream(joint="mixed"),
    "mixed sorted": Stream(order="sorted", joint="mixed"),
    "changing": Stream(20, joint="changing", images=100),
    "episodic": Stream(forgetting="episodic"),
    "episodic sorted": Stream(order="sorted", forgetting="episodic"),
    "shuffled 16": Stream(16),
    "sorted 16": Stream(16, order="sorted"),
    "one": Stream(1, images=SINGLE),
    "one sorted": Stream(1, order="sorted", images=SINGLE),
    "one runs 2": Stream(1, order="2", images=SINGLE),
    "one runs 5": Stream(1, order="5", images=SINGLE),
    "one runs 20": Stream(1, order="20", images=SINGLE),
    "one episodic": Stream(1, forgetting="episodic", images=SINGLE),
}


def main() -> None:
    asked = asked_for()
    changes = dict(each.split("=") for each in asked.set)
    constants = dataclasses.replace(
        CONSTANTS, **{name: value(text) for name, text in changes.items()}
    )
    options = {name: value(text) for name, text in (each.split("=") for each in asked.option)}
    model = network(asked)
    if issubclass(registration(asked.method).method, Wiener):
        options["filter"] = fitted_filter(model, asked, constants)
    if asked.method == "wiener":
        method: Method = wiener_with(constants, **options)
    else:
        method = registration(asked.method).make(**options)
    names = (
        asked.conditions.split(",")
        if asked.conditions
        else list(HELD_OUT if asked.held_out else REPORTED)
    )
    data = {
        name: images_of(name, asked) for name in ["clean", *(ALL if names == ["all"] else names)]
    }
    for name in asked.streams.split(","):
        show(model, data, name, asked, method)


def asked_for() -> argparse.Namespace:
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--streams", default=",".join(STREAMS))
    found.add_argument("--conditions")
    found.add_argument("--seeds", type=int, default=1, help="orders of images and classes")
    found.add_argument("--set", action="append", default=[])
    found.add_argument("--option", action="append", default=[])
    found.add_argument("--method", default="wiener")
    found.add_argument("--each", action="store_true", help="show every condition")
    return found.parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what network and data to measure."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("network")
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("~/.cache/ttapca").expanduser())
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--fit", type=int, default=5000, help="training images of the filter")
    parser.add_argument("--route")
    return parser


def show(
    model: torch.nn.Module,
    data: dict[str, Images],
    name: str,
    asked: argparse.Namespace,
    method: Method,
) -> None:
    """Measure one stream, and print a line."""
    begun = time.perf_counter()
    found = [errors(model, data, STREAMS[name], method, seed) for seed in range(asked.seeds)]
    mean = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
    spoilt = [each for key, each in mean.items() if key not in ("clean", "passes")] or [np.nan]
    each = " ".join(f"{key[:8]} {number:.1f}" for key, number in mean.items()) if asked.each else ""
    print(
        f"{name:16s} {np.mean(spoilt):5.1f} ({mean['clean']:4.1f}) {mean['passes']:.2f} passes"
        f" {time.perf_counter() - begun:4.0f} s {each}",
        flush=True,
    )


def value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def network(asked: argparse.Namespace) -> torch.nn.Module:
    return networks.load(asked.network, normalisation=asked.normalise).eval()


def wiener_with(constants: Constants, **options: Any) -> Wiener:
    """Return `wiener` with other constants, which are defaults of its options, too."""

    def defaults(kind: type[Any]) -> dict[str, Any]:
        names = {each.name for each in dataclasses.fields(kind)}
        return {name: each for name, each in vars(constants).items() if name in names}

    changed = type("Changed", (Wiener,), {"constants": constants})
    mixture = Mixture(**defaults(Mixture))
    found: Wiener = changed(**{"statistics": mixture, **defaults(Wiener), **options})
    return found


def fitted_filter(
    model: torch.nn.Module, asked: argparse.Namespace, constants: Constants = CONSTANTS
) -> ttapca.FittedFilter:
    """Fit on training images, or read what was fitted before."""
    route, changed = asked.route or "default", ""
    for name in MEASURED:
        if getattr(constants, name) != getattr(CONSTANTS, name):
            changed += f"-{name}-{getattr(constants, name)}"
    path = asked.cache / f"filter-{Path(asked.network).stem}-{asked.fit}-{route}{changed}"
    if not path.exists():
        train = load(asked.data, "train", root=asked.home)[: asked.fit]
        loader = [
            to_tensor(np.asarray(train[first : first + 200].images))
            for first in range(0, len(train), 200)
        ]
        options = {"route": asked.route} if asked.route else {}
        image_statistics.CONSTANTS = source_classes.CONSTANTS = constants
        try:
            ttapca.fit(model, first_layer(model), loader, **options).save(path)
        finally:
            image_statistics.CONSTANTS = source_classes.CONSTANTS = CONSTANTS
    return ttapca.load(path)


def first_layer(model: torch.nn.Module) -> str:
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    return next(path for path, each in model.named_modules() if isinstance(each, kinds))


def images_of(condition: str, asked: argparse.Namespace) -> Images:
    """Return images in a condition, from the cache if they are there."""
    split = "test"
    clean = load(asked.data, split, root=asked.home)
    first = len(clean) - asked.images if asked.held_out else 0
    clean = clean[first : first + asked.images]
    if condition == "clean":
        return clean
    path = asked.cache / f"{asked.data}-{split}-{asked.images}-{condition}.npy"
    if not path.exists():
        name, _, severity = condition.rpartition("_")
        seed, textures = SEED if asked.held_out else 0, asked.home / "frost"
        indices = range(first, first + len(clean))
        spoilt = corrupt_any_size(
            np.asarray(clean.images), name, int(severity), seed, indices=indices, textures=textures
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, spoilt)
    return Images(np.load(path), clean.labels, clean.class_names)


@torch.no_grad()
def errors(
    model: torch.nn.Module,
    data: dict[str, Images],
    order: Stream,
    method: Method,
    seed: int,
) -> dict[str, float]:
    """Return the error in percent for each condition, and the forward passes for a batch."""
    calls = [0]
    handle = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    wrong: dict[str, list[Tensor]] = {name: [] for name in data}
    batches = 0
    with ttapca.adapt(model, method, forgetting=order.forgetting) as adapted:
        for rows in streams(data, order, seed):
            adapted.reset()
            for first in range(0, len(rows), order.batch):
                some = rows[first : first + order.batch]
                pixels = to_tensor(
                    np.stack([np.asarray(data[name].images[row]) for name, row in some])
                )
                labels = torch.as_tensor([int(data[name].labels[row]) for name, row in some])
                batches += 1
                missed = adapted(pixels).argmax(1) != labels
                for (name, _), each in zip(some, missed, strict=True):
                    wrong[name].append(each)
    handle.remove()
    found = {
        name: 100 * float(torch.stack(each).double().mean()) for name, each in wrong.items() if each
    }
    return found | {"passes": calls[0] / batches}


def streams(data: dict[str, Images], order: Stream, seed: int) -> Iterator[list[tuple[str, int]]]:
    """Yield streams, each the condition and the number of every image."""
    rows = []
    for name in data:
        random = np.random.default_rng(seed)
        labels = np.asarray(data[name].labels)
        rows.append([(name, int(number)) for number in ordered(labels, order, random)])
    if order.joint == "changing":  # clean, spoilt, clean, another one, ...
        clean, *others = rows
        rows = [[row for some in others for row in (*clean, *some)] + clean]
    elif order.joint:
        together = [row for some in rows for row in some]
        random = np.random.default_rng(seed)
        if order.order == "sorted":
            places = random.permutation(len(together))
            classes = np.array([int(data[name].labels[row]) for name, row in together])
            places = places[np.argsort(classes[places], kind="stable")]
        else:
            places = random.permutation(len(together))
        rows = [[together[place] for place in places]]
    yield from rows


def ordered(labels: np.ndarray, order: Stream, random: np.random.Generator) -> np.ndarray:
    """Return the numbers of images in the order in which they come."""
    chosen = random.permutation(len(labels))[: order.images]
    classes = np.unique(labels)
    pools = {int(k): list(chosen[labels[chosen] == k]) for k in classes}
    if order.order == "shuffled":
        return chosen
    if order.order == "sorted":
        return np.concatenate([pools[int(k)] for k in random.permutation(classes)])
    if order.order == "dirichlet":
        return chosen[np.concatenate(dirichlet_stretches(labels[chosen], 0.1, random))]
    found: list[int] = []
    if order.order == "few":
        while sum(map(len, pools.values())):
            left = [k for k, own in pools.items() if own]
            some = random.choice(left, min(3, len(left)), replace=False)
            together = [row for k in some for row in pools[int(k)][: order.batch // 3]]
            for k in some:
                pools[int(k)] = pools[int(k)][order.batch // 3 :]
            found += list(random.permutation(np.array(together, dtype=int)))
        return np.array(found)
    length = float(order.order)
    while sum(map(len, pools.values())):
        left = [k for k, own in pools.items() if own]
        own = pools[int(random.choice(left))]
        for _ in range(min(len(own), random.geometric(1 / length))):
            found.append(own.pop())
    return np.array(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
