"""What adapting costs over plain inference and over the official TENT, as a user gets it.

The defaults come first: `ttapca.adapt(model, "wiener", filter=fitted, forgetting="online")`, with
all components. Photographs are test images of CIFAR-10, as they are and corrupted, one condition
after the other. Each condition is a fresh stream, and every call is given other images. Every
method takes its turn in every round, on its own copy of the network. `resnet20` has the weights
that ship with the package; those of `wrn-28-10` are random, which changes no time. A file of
weights is a network of others, for CIFAR-10; without BatchNorm, methods that are about it are left
out.

    python benchmarks/inference.py [--network resnet20] [--batches 200 16 1] [--rounds 8]
        [--root ~/.cache/ttapca]
    python benchmarks/inference.py --network FILE --normalise half
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import measuring
import ttapca
from common import CORRUPTIONS, SEVERITY
from measuring import Goal, Result, Spread, Table, ratio
from ttapca import datasets, networks
from ttapca.corruptions import corrupt

SHIPPED = "cifar10-resnet20"
FIT_IMAGES = 10_000
CACHE = Path("~/.cache/ttapca").expanduser()  # where `ttapca data get cifar10` puts it
NAMED = ("resnet20", "wrn-28-10")
ROUTES = {"pca": None, "cosines": "dct"}
CONDITIONS = ("clean", *CORRUPTIONS)
# Over plain inference with the defaults, on shifted photographs, by the size of a batch.
LIMITS = {200: 1.25, 16: 1.5, 1: 2.0}
Step = Callable[[Tensor], object]

TRAINING_MODE = "BatchNorm in training mode"
TENT = "tent, official"
TENT_AFTER = "tent, official, with a forward pass after"

# name: method, options of `adapt`, and the filter; None where the library is not asked. What is
# compared stands side by side: the speed of a shared machine drifts within a minute.
METHODS: dict[str, tuple[str, dict[str, Any], str] | None] = {
    "plain": None,
    "wiener": ("wiener", {"forgetting": "online"}, "pca"),
    "wiener, cosines": ("wiener", {"forgetting": "online"}, "cosines"),
    "wiener, source statistics": (
        "wiener",
        {"forgetting": "online", "statistics": "source"},
        "cosines",
    ),
    "bn": ("bn", {"forgetting": "online"}, "pca"),
    TRAINING_MODE: None,
    TENT: None,
    TENT_AFTER: None,
    "ttapca-relu, episodic": ("ttapca-relu", {"forgetting": "episodic"}, "pca"),
    "ttapca-relu, online": ("ttapca-relu", {"forgetting": "online"}, "pca"),
}


def without_running_statistics(model: nn.Module) -> nn.Module:
    """Let BatchNorm know the batch alone, as the official codes do."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return model


class OfficialTent:
    """TENT as its authors wrote it: BatchNorm in training mode, one Adam step on the entropy."""

    def __init__(self, model: nn.Module, *, after: bool) -> None:
        self.model = without_running_statistics(model.train().requires_grad_(False))
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for module in norms:
            module.requires_grad_(True)
        parameters = [each for module in norms for each in (module.weight, module.bias)]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)
        self.after = after

    def __call__(self, batch: Tensor) -> Tensor:
        """Adapt, and predict."""
        logits = self.model(batch)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean(0)
        entropy.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.after:
            return logits
        with torch.no_grad():
            return self.model(batch)


class Plain:
    """The network alone, in the mode it is in."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: Tensor) -> Tensor:
        """Predict."""
        with torch.no_grad():
            return self.model(batch)


def build(network: str, normalise: str | None = None) -> nn.Module:
    """The network, with the weights that ship with the package if there are any, or of a file."""
    if network in NAMED:
        return (networks.load(SHIPPED) if network == "resnet20" else networks.build(network)).eval()
    return networks.load(network, normalisation=normalise).eval()


def save_filters(network: nn.Module, root: Path, folder: Path) -> None:
    """A filter of principal components and one of cosines, on disk for the other processes."""
    train = datasets.load("cifar10", "train", root=root)[:FIT_IMAGES]
    for name, route in ROUTES.items():
        batches = datasets.TensorBatches(train, 250)
        ttapca.fit(network, "conv1", batches, **({"route": route} if route else {})).save(
            folder / name
        )


def photographs(root: Path, count: int) -> dict[str, Tensor]:
    """So many test images in every condition, or all there are."""
    test = datasets.load("cifar10", "test", root=root)[:count]
    clean = np.ascontiguousarray(test.images)
    found = {name: corrupt(clean, name, SEVERITY) for name in CORRUPTIONS}
    return {name: datasets.to_tensor(each) for name, each in ({"clean": clean} | found).items()}


class Feed:
    """Gives a method other images at each call; from the beginning where there are no more."""

    def __init__(self, take: Step, images: Tensor, batch: int) -> None:
        self._take = take
        whole = [part for part in images.split(batch) if len(part) == batch]
        self._batches = itertools.cycle(whole)

    def __call__(self) -> object:
        """Predict the next batch."""
        return self._take(next(self._batches))


def step(name: str, network: nn.Module, filter_of: Callable[[str], ttapca.FittedFilter]) -> Step:
    """What one method does with a batch."""
    model = copy.deepcopy(network)
    if name == "plain":
        return Plain(model)
    if name == TRAINING_MODE:
        return Plain(without_running_statistics(model.train()))
    if name in (TENT, TENT_AFTER):
        return OfficialTent(model, after=name == TENT_AFTER)
    method, options, form = METHODS[name]
    fitted = filter_of(form) if ttapca.METHODS[method].method.needs_filter else None
    return ttapca.adapt(model, method, filter=fitted, **options)


def memory_of(
    name: str, network: str, normalise: str | None, folder: Path, batch: int
) -> tuple[float, None]:
    """One step on shipped photographs, in a process of its own."""
    take = step(name, build(network, normalise), lambda form: ttapca.load(folder / form))
    clean = np.ascontiguousarray(datasets.load("cifar10-500")[:batch].images)
    samples = datasets.to_tensor(corrupt(clean, CORRUPTIONS[0], SEVERITY))
    return measuring.timed(lambda: take(samples))[0], None


def rounds_for(network: str, model: nn.Module, batch: int, rounds: int) -> dict[str, int]:
    """How often each method takes its turn in each condition.

    Small batches are quick. A step of the large network takes a quarter of a minute, and a minute
    with a gradient: only what the goals speak of takes part, and gradients a third as often.
    """
    about_batch_norm = ("bn", TRAINING_MODE, TENT, TENT_AFTER)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    methods = [name for name in METHODS if has_batch_norm or name not in about_batch_norm]
    if batch < 200:
        return dict.fromkeys(methods, (10 if batch == 1 else 3) * rounds)
    if network != "wrn-28-10":
        return dict.fromkeys(methods, rounds)
    often = dict.fromkeys(("plain", "wiener", "wiener, cosines", "bn", TRAINING_MODE), rounds)
    return often | dict.fromkeys((TENT_AFTER, "ttapca-relu, episodic"), max(1, rounds // 3))


def resets(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds that forgetting takes; ten at a time, for the clock."""
    adapters = {name: take for name, take in steps.items() if isinstance(take, ttapca.Adapter)}

    def ten(adapter: ttapca.Adapter) -> None:
        for _ in range(10):
            adapter.reset()

    seconds = measuring.interleaved(
        {name: lambda each=each: ten(each) for name, each in adapters.items()}, rounds
    )
    return {name: [value / 10 for value in values] for name, values in seconds.items()}


def measured(
    options: argparse.Namespace,
    batch: int,
    folder: Path,
    network: nn.Module,
    images: dict[str, Tensor],
) -> dict:
    """Seconds of every round by condition and method, and peak memory by method."""
    filters = {path.name: ttapca.load(path) for path in folder.iterdir()}
    rounds = rounds_for(options.network, network, batch, options.rounds)
    steps = {name: step(name, network, filters.__getitem__) for name in rounds}
    seconds = {}
    for condition, some in images.items():
        for take in steps.values():
            if isinstance(take, ttapca.Adapter):
                take.reset()
        seconds[condition] = measuring.interleaved(
            {name: Feed(take, some, batch) for name, take in steps.items()},
            rounds,
            settle=options.network != "wrn-28-10",  # a step of the large one is long enough
        )
        print(f"  measured: batches of {batch}, {condition}", flush=True)
    memory = (
        {}
        if batch < 200 or options.no_memory
        else {
            name: measuring.in_own_process(
                memory_of, name, options.network, options.normalise, folder, batch
            ).peak_gb
            for name in rounds
        }
    )
    return {"seconds": seconds, "memory": memory, "resets": resets(steps, 9)}


def shifted(found: dict, name: str) -> list[float]:
    """Seconds of a method in all rounds on photographs that have shifted."""
    return [each for condition in CORRUPTIONS for each in found["seconds"][condition][name]]


def over(found: dict, ours: str, theirs: str) -> Spread:
    """Ours over theirs on photographs that have shifted, as long as both take part."""
    each = [found["seconds"][condition] for condition in CORRUPTIONS]
    pairs = [pair for one in each for pair in zip(one[ours], one[theirs], strict=False)]
    return ratio(*zip(*pairs, strict=True))


def table(batch: int, found: dict) -> Table:
    rows = []
    clean = found["seconds"]["clean"]
    for name in clean:
        reset = found["resets"].get(name)
        moved = Spread.of(shifted(found, name))
        share = Spread.of(reset).median / moved.median if reset else None
        memory = found["memory"].get(name)
        rows.append(
            [
                name,
                Spread.of(clean[name]).show(1000, 1),
                ratio(clean[name], clean["plain"]).show(),
                moved.show(1000, 1),
                over(found, name, "plain").show(),
                "" if share is None else f"{100 * share:.2f} %",
                "" if memory is None else f"{memory:.2f}",
            ]
        )
    columns = ["method", "clean, ms a batch", "over plain", "shifted, ms a batch", "over plain"]
    columns += ["reset, share of a step", "peak GB"]
    return Table(f"Batches of {batch}", columns, rows)


def goals(network: str, found: dict[int, dict]) -> list[Goal]:
    """What is asked for, as far as it was measured."""
    out: list[Goal] = []
    wide = network == "wrn-28-10"
    for batch, each in found.items():
        for name in ("wiener", "wiener, cosines"):
            if batch in LIMITS and not wide:
                spread = over(each, name, "plain")
                what = f"{network}: {name}, the defaults over plain, shifted, batches of {batch}"
                out.append(Goal(what, spread.median, spread.show(), LIMITS[batch]))
        share = max(
            Spread.of(reset).median / Spread.of(shifted(each, name)).median
            for name, reset in each["resets"].items()
        )
        what = f"{network}: reset, share of a step, worst method, batches of {batch}"
        out.append(Goal(what, 100 * share, f"{100 * share:.2f} %", 1, unit=" %"))
    if TENT_AFTER in found[max(found)]["seconds"]["clean"]:
        spread = over(found[max(found)], "ttapca-relu, episodic", TENT_AFTER)
        what = f"{network}: ttapca, one step, over tent with re-forward"
        out.append(Goal(what, spread.median, spread.show(digits=3), 1.02 if wide else 1.35))
    return out


def run(options: argparse.Namespace) -> Result:
    network = build(options.network, options.normalise)
    name = Path(options.network).stem
    # Every turn begins with a call that does not count.
    images = photographs(options.root, 2 * options.rounds * max(options.batches))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_filters(network, options.root, folder)
        found = {
            batch: measured(options, batch, folder, network, images) for batch in options.batches
        }
    weights = "the weights of a file"
    if options.network in NAMED:
        weights = "the weights that ship with the package"
        if options.network != "resnet20":
            weights = "random weights, a third as many rounds with gradients"
    text = (
        f"{name} with {weights}, filters of all components at `conv1`, fitted on "
        f"{FIT_IMAGES:,} training images of CIFAR-10; {options.rounds} rounds for each of "
        f"{', '.join(CONDITIONS)} (three times as many for batches below 200, ten times for "
        f"single images), severity {SEVERITY}, {torch.get_num_threads()} threads; median and "
        "quartiles."
    )
    return Result(
        title=f"Inference: {name}",
        text=text,
        tables=[table(batch, each) for batch, each in found.items()],
        goals=goals(name, found),
        numbers={str(batch): each for batch, each in found.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet20", help="or wrn-28-10, or a file of weights")
    parser.add_argument("--normalise", help="of a file of weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[200, 16, 1])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--root", type=Path, default=CACHE, help="folder that holds CIFAR-10")
    parser.add_argument("--no-memory", action="store_true", help="skip the peaks of memory")
    network = Path(parser.parse_known_args()[0].network).stem
    measuring.command(f"inference-{network}", run, parser)


if __name__ == "__main__":
    main()
