"""The filter of a network where nobody says its layer or its rank; and filters that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import nn

import ttapca
from ttapca import networks
from ttapca.benchmark import paper
from ttapca.datasets import Images, Shards, TensorBatches
from ttapca.engines import Engine
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.fit import plan_fit
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import FitPlan, RouteChoice
from ttapca.support.disk import make_folder, queued
from ttapca.support.outputs import OutputKind
from ttapca.support.progress import Reporter, Silent, Steps

FIT_BATCH = 250  # images


def recommended_layer(
    network: nn.Module, images: Images | tuple[int, ...], reporter: Reporter | None = None
) -> str:
    """Return the layer that `ttapca layers` recommends for images of this size.

    Args:
        network: Any module.
        images: Those that it is to take, or the shape of one: channels, height and width.
        reporter: Told what would be better, if anything.

    Raises:
        OptionError: No layer can carry a filter.
    """
    if isinstance(images, Images):
        height, width, channels = images.images.shape[1:]
        images = (channels, height, width)
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
) -> FittedFilter:
    """Fit a filter with so many components, or with the usual number.

    That is all of them for cosines, which `ttapca.fit` takes of images, which cost next to nothing
    and of which the last show noise; otherwise it is as many as in the paper, or as there are.

    Args:
        network: Any module.
        layer: Dotted path of the layer.
        batches: Source images; read more than once.
        components: How many components; the usual number by default.
        principal: Whether a method is going to use it that is about principal components. So many
            of these are then asked for as in the paper; cosines remain for images that are too
            large or too few.
        route: See `ttapca.fit`.
        outputs: See `ttapca.fit`.
        reporter: Told how it goes.
        engine: Who reads shards; see `ttapca.fit`.

    Raises:
        TtapcaError: As `ttapca.fit` does.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> batches = TensorBatches(read_digits("train"), 250)
        >>> usual_fit(networks.load("digits-small-cnn"), "conv1", batches)
        FittedFilter(layer='conv1', 60 components, 1201 samples, folded (1, 8, 8) -> (16, 8, 8))
    """
    progress = Steps(reporter or Silent(), f"fitting {layer}")

    def fit(count: int | None) -> FittedFilter:
        fitted = ttapca.fit(
            network,
            layer,
            batches,
            count,
            route=route,
            outputs=outputs,
            progress=progress,
            engine=engine,
        )
        progress.finish()
        return fitted

    if components is not None:
        return fit(components)
    images = batches.samples if isinstance(batches, Shards) else len(batches.dataset)
    most = min(paper.COMPONENTS, max(1, images - 1))

    def plan(count: int | None) -> FitPlan:
        return plan_fit(network, layer, batches, count, route=route, outputs=outputs, engine=engine)

    usual = plan(most)
    if usual.cosines_serve and route == "auto" and not principal:
        usual = plan(None)  # as a rank would ask for principal components
    if usual.route == "dct":
        return fit(None)
    try:
        return fit(most)
    except NotEnoughDataError:  # of components, or of images, which the second try says again
        return fit(None)


def kept_filter(
    folder: Path, fit: Callable[[], FittedFilter], reporter: Reporter | None = None
) -> FittedFilter:
    """Load the filter that is kept in a folder; where there is none, fit it now and keep it.

    Of several processes that want it at once, one fits it, and the others wait.

    Args:
        folder: Of the filter. A lock stays beside the folder that it is in; if the fit fails, a new
            folder and its lock are removed.
        fit: Returns the filter.
        reporter: Told that another process is waited for.

    Raises:
        StorageError: Nobody may write there, or the disk is full.
        SavedFilterError: The folder holds something else.
    """

    def waiting(holder: str) -> None:
        if reporter is not None:
            reporter.note(f"another process fits this filter ({holder}); waiting for it to end")

    if not folder.exists():
        with _new_shelf(folder.parent) as lock, queued(lock, waiting):
            if not folder.exists():
                fit().save(folder)
    return ttapca.load(folder)  # also a new one: what is saved in float32 rounds alike next time


@contextmanager
def _new_shelf(shelf: Path) -> Iterator[Path]:
    """Make a folder for filters and yield the place of its lock; a fit that fails leaves neither.

    What was there before stays, and so does a folder that another process has filled meanwhile.
    """
    lock, is_new = shelf.with_name(f"{shelf.name}-lock"), not shelf.exists()
    make_folder(shelf)
    try:
        yield lock
    except BaseException:
        if is_new:
            with suppress(OSError):  # it is not empty
                shelf.rmdir()
                lock.unlink()
        raise
