"""`ttapca fit`: decompose a layer's output on training images, and save the filter."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import numpy as np
import typer
from typer import Option

from ttapca._checks import OneOf, check_option
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import Shards, TensorBatches, is_sharded, to_tensor
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.fitting.fitted_filter import FittedFilter, Storage
    from ttapca.support.outputs import OutputKind

_OTHERS = ("dropped_variance", "agreement", "temperature", "accuracy", "singular_value_error")
# Attributes of a filter by their names in JSON.
MEASURED = {"components": "n_components_", "images": "n_samples_"}
MEASURED |= {name: f"{name}_" for name in _OTHERS}
BATCH_NUMBERS = 2**23  # pixels times channels that are read at once, of large images


def fit(
    to: Annotated[Path, Option(metavar="DIR")],
    images: arguments.ImageOptions,
    network: arguments.NetworkOptions,
    layer: arguments.LayerOption = None,
    components: Annotated[int | None, Option(min=1)] = None,
    route: arguments.RouteOption = "auto",
    outputs: Annotated[str | None, Option(metavar="KIND")] = None,
    held_out: Annotated[int | None, Option(min=1)] = None,
    batch_size: Annotated[int | None, Option(min=1)] = None,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
    dtype: str = "float32",
    force: Annotated[bool, Option("--force")] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Fit a spectral filter on the training images of a data set, and save it to a folder."""
    from ttapca.benchmark.filters import recommended_layer, usual_fit
    from ttapca.fitting.plan import RouteChoice
    from ttapca.fitting.store import check_target, stored_dtype
    from ttapca.support.outputs import Outputs

    # These would be refused anyway, but after minutes.
    stored_dtype(dtype)
    check_target(to, overwrite=force)
    check_option("route", route, OneOf(get_args(RouteChoice)))
    meaning = cast("OutputKind | None", outputs)
    Outputs(meaning)
    source = network.source()
    found = arguments.engine(jobs, engine)
    batches, shape, chosen = _batches(images, batch_size)
    model = source.load()
    start = time.perf_counter()
    with ConsoleReporter() as reporter:
        fitted = usual_fit(
            model,
            layer or recommended_layer(model, shape, reporter),
            batches,
            components,
            route=cast("RouteChoice", route),
            outputs=meaning,
            reporter=reporter,
            engine=found,
            labelled=None if held_out is None else _labelled(images, held_out),
        )
    fitted.save(to, dtype=cast("Storage", dtype), overwrite=force)
    seconds = time.perf_counter() - start
    if as_json:
        facts: dict[str, Any] = {"filter": str(to), "layer": fitted.layer, "route": fitted.route}
        facts |= {name: getattr(fitted, attribute) for name, attribute in MEASURED.items()}
        facts["outputs"] = math.prod(fitted.output_shape)
        facts["explained_variance"] = float(fitted.explained_variance_ratio_.sum())
        facts["visible_shift"] = {count: fitted.visible_shift(count) for count in (1, 100)}
        print_json(facts | {"chosen": chosen, "seconds": seconds})
    else:
        _print(fitted, to, chosen, seconds)


def _batches(
    images: arguments.ImageOptions, size: int | None
) -> tuple[TensorBatches | Shards, tuple[int, ...], str]:
    from ttapca.benchmark.filters import FIT_BATCH

    def batch_size(shape: tuple[int, ...]) -> int:
        return size or max(1, min(FIT_BATCH, BATCH_NUMBERS // math.prod(shape)))

    if is_sharded(images.data):
        shards = images.shards()
        shape = shards.image_shape()
        return shards.batched(batch_size(shape)), shape, str(shards)
    train, chosen = images.read("train")
    shape = tuple(to_tensor(train.images[:1]).shape[1:])
    return TensorBatches(train, batch_size(shape), chosen.rows), shape, str(chosen)


def _labelled(images: arguments.ImageOptions, number: int) -> list[tuple[Any, Any]]:
    sizes = {"size": images.size, "shorter_side": images.shorter_side}
    test = arguments.read_images(images.data, "test", images.folder, **sizes)
    if number > len(test):
        raise OptionError(
            f"--held-out takes samples of the test part, which has {len(test):,}; found {number:,}."
        )
    rows = np.random.default_rng(images.seed).permutation(len(test))[:number]
    parts = np.array_split(rows, -(-number // 100))
    return [(to_tensor(test.images[part]), test.labels[part]) for part in parts]


def _print(fitted: FittedFilter, to: Path, chosen: str, seconds: float) -> None:
    variance = float(fitted.explained_variance_ratio_.sum())
    typer.echo(
        f"{to}  `{fitted.layer}`, {fitted.route}: {fitted.n_components_:,} components of "
        f"{fitted.space_in_words()} hold {100 * variance:.2f} % of the variance of "
        f"{fitted.n_samples_:,} samples; {fitted.accuracy_}  ({seconds:.1f} s)\n"
        f"  samples: {chosen}\n"
        "  sure of a shift if the variance of a band changes by a factor of "
        f"{fitted.visible_shift(100):.2g} in 100 samples, of {fitted.visible_shift(1):.2g} in one\n"
        f"  with learned gains it {fitted.loss_in_words()}"
    )
    if fitted.temperature_ is not None:
        typer.echo(f"  temperature of the network's probabilities: {fitted.temperature_:.2f}")
    if not fitted.basis.principal:
        typer.echo("  for the paper's methods, such as ttapca-relu, fit with --route pca")
    if fitted.drops_too_much:
        typer.echo("  for methods that learn gains, such as ttapca-relu, fit more --components")
