"""Filters by default: the recommended layer, the usual rank; and filters that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

import ttapca
from ttapca import networks
from ttapca.benchmark import paper
from ttapca.datasets import Images, Shards, TensorBatches, to_tensor
from ttapca.engines import Engine
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.fit import plan_fit
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import RouteChoice
from ttapca.support.disk import make_folder, queued
from ttapca.support.outputs import OutputKind
from ttapca.support.progress import Reporter, Steps

FIT_BATCH = 250  # images


def recommended_layer(
    network: nn.Module, images: Images | tuple[int, ...], reporter: Reporter | None = None
) -> str:
    """Return the layer that `ttapca layers` recommends for images of this size.

    Args:
        network: Any module.
        images: Of the size that it is to take; or the shape of one: channels, height and width.
        reporter: Told of a better choice, if there is one.
    """
    if isinstance(images, Images):
        images = tuple(to_tensor(images.images[:1]).shape[1:])
    table = networks.describe_layers(network, images)
    if table.recommended is None:
        raise OptionError("No layer of this network can carry a filter: name one with `layer=`.")
    if table.advice and reporter is not None:
        reporter.note(f"filter at `{table.recommended}`. {table.advice}")
    return table.recommended


def usual_fit(
    network: nn.Module,
    layer: str,
    batches: TensorBatches | Shards,
    components: int | None = None,
    *,
    principal: bool = False,
    route: RouteChoice = "auto",
    outputs: OutputKind | None = None,
    reporter: Reporter | None = None,
    engine: Engine | None = None,
    labelled: Iterable[Any] | None = None,
) -> FittedFilter:
    """Fit a filter with so many components; by default all cosines, else the paper's number."""
    # A `principal` filter, for a method of the paper, has cosines only if images are large or few.
    progress = Steps(reporter or Reporter(), f"fitting {layer}")
    options: dict[str, Any] = {"route": route, "outputs": outputs, "engine": engine}

    def fit(count: int | None) -> FittedFilter:
        given = {"progress": progress, "labelled": labelled, **options}
        fitted = ttapca.fit(network, layer, batches, count, **given)
        progress.finish()
        return fitted

    if components is not None:
        return fit(components)
    images = batches.samples if isinstance(batches, Shards) else len(batches.dataset)
    most = min(paper.COMPONENTS, max(1, images - 1))
    usual = plan_fit(network, layer, batches, most, **options)
    if usual.cosines_serve and route == "auto" and not principal:
        # Without a rank, which would ask for principal components.
        usual = plan_fit(network, layer, batches, None, **options)
    if usual.route == "dct":
        return fit(None)
    try:
        return fit(most)
    except NotEnoughDataError:  # of components, or of images, which the second try says again
        return fit(None)


def kept_filter(
    folder: Path, fit: Callable[[], FittedFilter], reporter: Reporter | None = None
) -> FittedFilter:
    """Load the filter of a folder; if there is none, fit and save it while other processes wait."""

    def waiting(holder: str) -> None:
        text = f"another process fits this filter ({holder}); waiting for it to end"
        (reporter or Reporter()).note(text)

    if not folder.exists():
        parent, is_new = folder.parent, not folder.parent.exists()
        lock = parent.with_name(f"{parent.name}-lock")
        make_folder(parent)
        try:
            with queued(lock, waiting):
                if not folder.exists():
                    fit().save(folder)
        except BaseException:
            if is_new:
                with suppress(OSError):  # another process has filled it meanwhile
                    parent.rmdir()
                    lock.unlink()
            raise
    return ttapca.load(folder)  # also a new one: float32, as saved, rounds alike next time
