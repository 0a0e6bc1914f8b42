"""Halve and double every constant of the closed form, and see what it changes.

    python scripts/audit_constants.py NETWORK [--normalise cifar10] --cache DIR [--images 200]
        [--only chain,conditions] > table

A line for each change: the largest change of the error of any stream, in points, and the change of
each. Streams are of all kinds, under conditions that no table uses, on the last images of the test
set (`scripts/tune_chain.py` makes them). What changes nothing on any network is not needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import tune_chain
from ttapca import networks
from ttapca.methods import method
from ttapca.spectral import constants

CONDITIONS = ("speckle_noise_5", "gaussian_blur_5", "contrast_4", "impulse_noise_4")
STREAMS = {
    "shuffled": tune_chain.Stream(),
    "sorted": tune_chain.Stream(order="sorted"),
    "few": tune_chain.Stream(order="few"),
    "mixed": tune_chain.Stream(joint="mixed"),
    "changing": tune_chain.Stream(20, joint="changing", images=60),
    "one": tune_chain.Stream(1, images=80),
    "one sorted": tune_chain.Stream(1, order="sorted", images=80),
}
# Numbers at the top of a module that steer what is done, by module. Those of a search or of storage
# (seeds, draws, sizes of parts) are left out.
NAMES = {
    "spectral.calibration": "REACH USUAL RIDGE",
    "spectral.white_noise": "FEW LARGEST_SHARE",
    "spectral.means": "CHANCE FARTHEST_CLASS SMALLEST_REACH SOURCE_SAMPLES FEW",
    "spectral.conditions": (
        "RECENT ENOUGH OFTEN NEWS STRANGE FEWEST FAR VARIED DIRECTIONS APART APART_LATER STEPS "
        "TOGETHER ONE LIKE_SOURCE STRAYS MEMORY"
    ),
    "spectral.appearances": "RIDGE LEAST",
    "spectral.outliers": (
        "MOST_IMAGES DEVIATIONS BEYOND RARE ODD MOST ORDINARY LEAST LOOKED_AT NOISE_VALUES"
    ),
    "spectral.source_classes": "SMALLEST_RATIO",
    "adaptation.surfaces.stream_statistics": "LEAST_ALONE",
}
OPTIONS = {
    "largest_ratio": 64.0,
    "threshold": 0.8,
    "memory": 200.0,
    "center": 1.0,
    "shrink": 1.0,
    "restore": 0.6,
    "states": 16,
}
MIXTURE = ("first", "last", "prior", "alone")
SHARES = ("threshold", "REACH", "RARE", "ODD", "ORDINARY", "LARGEST_SHARE", "last", "plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network")
    parser.add_argument("--normalise")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--home", type=Path, default=Path("~/.cache/ttapca").expanduser())
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--fit", type=int, default=5000)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    asked.held_out, asked.route = True, None
    model = networks.load(asked.network, normalisation=asked.normalise).eval()
    fitted = tune_chain.fitted_filter(model, asked)
    data = {name: tune_chain.images_of(name, asked) for name in ("clean", *CONDITIONS)}

    def measured(options: dict[str, Any]) -> dict[str, float]:
        found = {}
        for name, order in STREAMS.items():
            errors = tune_chain.errors(
                model, data, order, "wiener", 0, {**options, "filter": fitted}
            )
            spoilt = [each for key, each in errors.items() if key not in ("clean", "passes")]
            found[name] = sum(spoilt) / len(spoilt)
            found[f"{name} clean"] = errors["clean"]
        return found

    usual = measured({})
    print(
        "as it is:", ", ".join(f"{name} {error:.1f}" for name, error in usual.items()), flush=True
    )
    for what, options in changes(asked.only.split(",") if asked.only else []):
        try:
            now = measured(options)
        except Exception as error:
            print(f"{what:60s} fails: {type(error).__name__}", flush=True)
            continue
        differ = {name: now[name] - error for name, error in usual.items()}
        shown = ", ".join(
            f"{name} {each:+.1f}" for name, each in differ.items() if abs(each) >= 0.05
        )
        most = max(map(abs, differ.values()))
        print(f"{what:60s} {most:5.2f}  {shown}", flush=True)


def changes(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is changed, with options of the method, while it is changed."""
    for place, names in NAMES.items():
        module = importlib.import_module(f"ttapca.{place}")
        for name in names.split():
            if not only or any(each in f"{place}.{name}" for each in only):
                yield from in_module(module, place, name)
    if not only or "options" in only:
        yield from in_options()
    if not only or "chain" in only:
        yield from in_chain()


def in_options() -> Iterator[tuple[str, dict[str, Any]]]:
    for factor in (0.5, 2):
        for name, now in OPTIONS.items():
            yield f"option {name} x {factor}", {name: changed(name, now, factor)}
        for name in MIXTURE:
            new = changed(name, getattr(method.Mixture(), name), factor)
            yield f"mixture {name} x {factor}", {"statistics": method.Mixture(**{name: new})}


def in_module(module: ModuleType, place: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    now = getattr(module, name)
    for factor in (0.5, 2):
        setattr(module, name, changed(name, now, factor))
        try:
            yield f"{place}.{name} = {now} x {factor}", {}
        finally:
            setattr(module, name, now)


def in_chain() -> Iterator[tuple[str, dict[str, Any]]]:
    before = constants.CONSTANTS
    for each in dataclasses.fields(constants.ChainConstants):
        now = getattr(before, each.name)
        if isinstance(now, tuple):
            wanted = [] if each.name == "prior" else [(now[0], now[-1])]
        else:
            wanted = [changed(each.name, now, factor) for factor in (0.5, 2)]
        for new in wanted:
            tune_chain.use_constants(dataclasses.replace(before, **{each.name: new}))
            yield f"chain.{each.name} = {now} -> {new}", {}
    tune_chain.use_constants(before)


def changed(name: str, now: Any, factor: float) -> Any:
    """Return a number halved or doubled; of a share, what is missing to 1 is, if it is large."""
    if name in SHARES and now >= 0.5:
        return 1 - (1 - now) * (1 / factor)
    new = type(now)(now * factor)
    return min(new, 1.0) if name in ("center", "alone", "first") else new


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
