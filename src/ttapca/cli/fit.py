"""`ttapca fit`: decompose a layer's output on training images, and save the filter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Option

from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter
from ttapca.support.progress import Steps

if TYPE_CHECKING:
    from ttapca.datasets import Choice, Order
    from ttapca.fitting.fitted_filter import FittedFilter, Storage


def fit(
    model: arguments.ModelArgument = None,
    *,
    data: arguments.DataOption,
    to: Annotated[Path, Option(metavar="DIR", help="The folder that the filter goes to.")],
    layer: arguments.LayerOption = None,
    components: Annotated[
        int, Option(min=1, help="How many to keep.")
    ] = arguments.PAPERS_COMPONENTS,
    model_option: arguments.ModelOption = None,
    weights: arguments.WeightsOption = None,
    architecture: arguments.ArchitectureOption = None,
    normalise: arguments.NormalisationOption = None,
    mean: arguments.MeanOption = None,
    std: arguments.StdOption = None,
    folder: arguments.DataFolder = None,
    size: arguments.ImageSize = None,
    limit: arguments.LimitOption = None,
    order: arguments.OrderOption = "auto",
    seed: arguments.SeedOption = 0,
    batch_size: Annotated[int, Option(min=1, help="How many images are read at once.")] = 250,
    dtype: Annotated[
        str, Option(help="Storage: float64, float32, bfloat16 or float16.")
    ] = "float32",
    force: Annotated[
        bool, Option("--force", help="Replace a saved filter that is there already.")
    ] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Fit a spectral filter on the training images of a data set, and save it to a folder."""
    import ttapca
    from ttapca.benchmark.session import recommended_layer
    from ttapca.datasets import TensorBatches, choose
    from ttapca.fitting.store import check_target, stored_dtype

    stored_dtype(dtype)  # what would be refused at the end is refused now
    check_target(to, overwrite=force)
    source = arguments.network_source(
        model, model_option, weights, architecture, normalise, mean, std
    )
    images = arguments.read_images(data, "train", folder, size=size)
    chosen = choose(images.labels, limit, order=cast("Order", order), seed=seed)
    network = source.load()
    start = time.perf_counter()
    batches = TensorBatches(images, batch_size, chosen.rows)
    layer = layer or recommended_layer(network, images)
    with ConsoleReporter() as reporter:
        progress = Steps(reporter, f"fitting {layer}")
        fitted = ttapca.fit(network, layer, batches, components, progress=progress)
    fitted.save(to, dtype=cast("Storage", dtype), overwrite=force)
    _print(fitted, to, chosen, time.perf_counter() - start, as_json)


def _print(fitted: FittedFilter, to: Path, chosen: Choice, seconds: float, as_json: bool) -> None:
    variance = float(fitted.explained_variance_ratio_.sum())
    if as_json:
        facts = {
            "filter": str(to),
            "layer": fitted.layer,
            "route": fitted.route,
            "components": fitted.n_components_,
            "outputs": len(fitted.mean_),
            "explained_variance": variance,
            "dropped_variance": fitted.dropped_variance_,
            "agreement": fitted.agreement_,
            "images": fitted.n_samples_,
            "accuracy": fitted.accuracy_,
            "singular_value_error": fitted.singular_value_error_,
            "chosen": str(chosen),
            "seconds": seconds,
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        f"{to}  `{fitted.layer}`, {fitted.route}: {fitted.n_components_:,} components of "
        f"{len(fitted.mean_):,} outputs hold {100 * variance:.2f} % of the "
        f"variance of {fitted.n_samples_:,} images; {fitted.accuracy_}  ({seconds:.1f} s)\n"
        f"  images: {chosen}\n"
        f"  with learned gains it {fitted.loss_in_words()}"
    )
    if fitted.drops_too_much:
        typer.secho(
            "warning: with learned gains, as those of ttapca-relu, this filter "
            f"{fitted.loss_in_words()}. Fit with more --components for them; methods in closed "
            "form, such as wiener, keep what lies outside.",
            err=True,
            fg=typer.colors.YELLOW,
            bold=True,
        )
