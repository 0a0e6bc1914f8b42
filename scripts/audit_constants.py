"""Halve and double every constant of the closed form, and see what it changes.

    python scripts/audit_constants.py NETWORK [--normalise cifar10] --cache DIR [--images 160]
        [--only far,apart] > table

The first line has the errors in percent as they are, and another one for each change the largest
change of any stream, in points, and the change of each. Streams are of all kinds, under conditions
that no table uses, on the last images of the test set (`scripts/tune_chain.py` makes them). What
changes nothing on any network is not needed. With `--only ""` nothing is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import tune_chain
from ttapca.spectral.constants import CONSTANTS, Constants
from tune_chain import Stream

CONDITIONS = ("speckle_noise_5", "gaussian_blur_5", "contrast_4", "impulse_noise_4")
STREAMS = {
    "shuffled": Stream(),
    "sorted": Stream(order="sorted"),
    "few": Stream(order="few"),
    "mixed": Stream(joint="mixed"),
    "changing": Stream(20, joint="changing", images=50),
    "one": Stream(1, images=60),
    "one sorted": Stream(1, order="sorted", images=60),
}


def main() -> None:
    parser = tune_chain.parser(__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(each.name for each in fields()))
    parser.set_defaults(held_out=True, images=160)
    asked = parser.parse_args()
    model = tune_chain.network(asked)
    data = {name: tune_chain.images_of(name, asked) for name in ("clean", *CONDITIONS)}

    def measured(constants: Constants) -> dict[str, float]:
        fitted = tune_chain.fitted_filter(model, asked, constants)
        found = {}
        for name, order in STREAMS.items():
            method = tune_chain.wiener_with(constants, filter=fitted)
            errors = tune_chain.errors(model, data, order, method, 0)
            spoilt = [each for key, each in errors.items() if key not in ("clean", "passes")]
            found |= {name: sum(spoilt) / len(spoilt), f"{name} clean": errors["clean"]}
        return found

    usual = measured(CONSTANTS)
    now = ", ".join(f"{name} {error:.1f}" for name, error in usual.items())
    print(f"{'as it is':40s} {now}", flush=True)
    for name in filter(None, asked.only.split(",")):
        for value in changed(getattr(CONSTANTS, name)):
            found = measured(dataclasses.replace(CONSTANTS, **{name: value}))
            differ = {stream: found[stream] - error for stream, error in usual.items()}
            most = max(map(abs, differ.values()))
            shown = [f"{stream} {each:+.1f}" for stream, each in differ.items() if abs(each) > 0.05]
            print(f"{f'{name} = {value}':40s} {most:5.2f}  {', '.join(shown)}", flush=True)


def fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(Constants)


def changed(now: Any) -> Iterator[Any]:
    """Yield a number halved and doubled, and of a list its ends alone."""
    if isinstance(now, tuple):
        yield now[0], now[-1]
        return
    for factor in (0.5, 2):
        # Of a large share, what is missing to 1 is halved and doubled.
        yield type(now)(1 - (1 - now) / factor if 0.5 <= now <= 1 else now * factor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
