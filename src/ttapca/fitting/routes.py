"""`fit`: from a model, a layer and source data to a fitted filter.

Only the part of the network up to the layer is run, but for some of the samples, which show what
normalisation layers and classes do (`ttapca.fitting.source_channels`, and which ones
`ttapca.fitting.measuring_rule`). `ttapca.fitting.fit_plan` chooses one of five routes to the
components. Three need sums over the samples (`ttapca.fitting.summed_routes`), so that several
processes can read the data (`ttapca.fitting.gathering`); two need the samples themselves
(`ttapca.fitting.sample_routes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.engines import Engine
from ttapca.errors import enough_memory
from ttapca.fitting.activations import Prepare, Progress, Shapes, SourceActivations
from ttapca.fitting.fit_plan import FitPlan, RouteChoice, RouteName, plan_of
from ttapca.fitting.fit_task import FitTask
from ttapca.fitting.fitted_filter import FittedFilter, attach
from ttapca.fitting.gathering import Gathering, gathering_of
from ttapca.fitting.mirror_agreement import mirror_agreement
from ttapca.fitting.model_inputs import ModelInputs
from ttapca.fitting.route_costs import Problem
from ttapca.fitting.sample_routes import by_gram, randomised
from ttapca.fitting.source_channels import SourceChannels
from ttapca.fitting.summed_routes import SUMMED
from ttapca.spectral.pca import check_n_components
from ttapca.support.modules import LayerPaths, check_model, evaluation_mode
from ttapca.support.outputs import OutputKind, Outputs

# Rounding leaves a share of variance of about this size where a basis is complete.
NOTHING_DROPPED = 1e-6

_LESS_MEMORY = (
    "Fit at a layer with fewer inputs or outputs, ask for fewer components, read smaller batches, "
    "or take `route='dct'` for large images."
)


ROUTES: tuple[RouteName, ...] = get_args(RouteName)
SAMPLED: dict[RouteName, Callable[[FitTask], FittedFilter]] = {
    "gram": by_gram,
    "randomised": randomised,
}


def fit(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None = None,
    *,
    progress: Progress | None = None,
    prepare: Prepare | None = None,
    logits: Callable[[Any], Tensor] | None = None,
    outputs: OutputKind | None = None,
    route: RouteChoice = "auto",
    generator: torch.Generator | None = None,
    engine: Engine | str | None = None,
) -> FittedFilter:
    """Fit the components of a layer on source data: principal components, or cosines of images.

    The model runs in evaluation mode and without gradients, and is afterwards as it was: weights,
    buffers, training flags, hooks. The caller's random state is not touched.

    In a job of several ranks (an initialised `torch.distributed` process group), every rank calls
    `fit` with data of its own, and all get the filter of all data; `engine=SerialEngine()` fits in
    one rank alone.

    Args:
        model: Any trained module.
        layer: Dotted path of one of its layers, as in `model.named_modules()`. What wrappers put in
            front of it, such as `module.`, can be left out; the filter has the path without it.
        data: Source data, usually a loader of training batches: tensors, pairs whose first element
            is one, or dicts with the model's arguments; or a single tensor or array of samples; or
            data in parts, `ttapca.datasets.Shards`. At least 32 samples: fewer do not tell how much
            a component varies.
        n_components: How many components to keep: a number, a fraction of the variance (a float up
            to 1), or None for all that the data have. A number or a fraction asks for a rank, so
            that components are principal ones, if images are not too large or too few for them.
        progress: Wraps the batches while they are read, for example `tqdm`; silent by default. If
            it has a method `plan`, that is given the `FitPlan` before the work begins; if it has a
            method `stage`, that is told the name of work without batches.
        prepare: Returns what the model takes of a batch: a tensor, a tuple of arguments, or a dict
            of arguments by name; `lambda batch: (batch[0], batch[1])` for two inputs.
        logits: Finds the logits in what the model returns, where that is more than one tensor:
            `lambda output: output.logits`. From them, `fit` learns what classes do to statistics.
        outputs: What the outputs of the model mean: `multiclass`, `binary`, `multilabel` or
            `regression`. By default two or more are the logits of classes. Of a single one nothing
            is learned unless it is said to be `binary`, since it may be a regression.
        route: By default, cosines if the filter acts on the model's input images, with all
            components, and these have more than 1,024 numbers; else principal components. `pca`
            asks for these anywhere, and `dct` for cosines. Which of `folded`, `exact`, `gram` and
            `randomised` finds principal components follows from the layer, the number of samples
            and the memory at hand, unless you name one; see `ttapca.fitting.fit_plan`.
        generator: Draws the start of the randomised route; a fixed seed by default.
        engine: Who reads data in parts, the result being the same: `joblib:4` for four processes of
            this machine, or an `Engine`; by default this process. See `ttapca.engines`.

    Returns:
        The fitted filter. Its `accuracy_` says how exact it is.

    Warns:
        UserWarning: The randomised route did not become as accurate as it should.

    Raises:
        LayerNotFoundError: No such layer; near names are offered.
        LayerOutputError: The layer returns no tensor, or is not called exactly once in a pass.
        NonFiniteError: A batch leads to NaN or infinity; its number is named.
        NotEnoughDataError: Too few samples, or fewer components in the data than asked for.
        OptionError: An option makes no sense, or a batch holds no tensor for the model.
        InputTypeError: The model cannot be called on the data.
        ShapeError: The model does not take samples of their shape.
        OutOfMemoryError: The fit needs more memory than there is, which is said before it begins.
        AttachError: The layer carries a filter already.
        EngineError: Workers died whenever they read a part, or another rank failed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
        >>> images = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> fit(model, "0", images, n_components=20)
        FittedFilter(layer='0', 20 components, 50 samples, folded (1, 8, 8) -> (4, 8, 8))
    """
    check_n_components(n_components)
    check_option("route", route, OneOf(get_args(RouteChoice)))
    find_classes = _finder(logits, outputs)
    with (
        _gathering(model, data, engine) as gathering,
        enough_memory(f"Fitting at `{layer}`", _LESS_MEMORY),
    ):
        source = gathering.each(
            lambda: SourceActivations(model, layer, data, progress, prepare, find_classes)
        )
        shapes, plan = _planned(source, gathering, n_components, route)
        source.tell(plan)
        task = FitTask(source, shapes, n_components, generator, on_demand=route == plan.route)
        if plan.route not in SUMMED:
            return _completed(task, SAMPLED[plan.route](task))
        summed = SUMMED[plan.route]
        reading = gathering.each(lambda: summed.reading(task))
        collected = gathering.collected(source, reading, plan)

        def find() -> FittedFilter:
            if collected is None:
                raise RuntimeError("Only the process that has what was collected finds the filter.")
            collected.check_samples()
            task.collected = collected
            source.stage("decomposing")
            return _completed(task, summed.find(task))

        return gathering.shared(find)


def _completed(task: FitTask, fitted: FittedFilter) -> FittedFilter:
    """Return a filter with all that was measured beside its basis."""
    source, collected = task.source, task.collected
    channels = SourceChannels(source.model, source.find_logits, collected.channels)
    canonical = LayerPaths(source.model).canonical
    classes = channels.by_class()
    kept = [inputs.mapped(lambda x: x.to(source.device)) for inputs in collected.kept.all()]
    found = dataclasses.replace(
        fitted,
        layer=canonical(fitted.layer),
        group_norm_={canonical(path): each for path, each in channels.of(nn.GroupNorm).items()},
        layer_norm_={canonical(path): each for path, each in channels.of(nn.LayerNorm).items()},
        classes_=None if classes is None else classes.renamed(canonical),
        class_reach_=fitted.reach_of(collected.class_means),
        agreement_=_agreement(source, fitted, kept),
        mirror_agreement_=_mirror_agreement(source, kept),
        inputs_=collected.inputs.found(),
    )
    return dataclasses.replace(found, fingerprint_=found.fingerprint_of(source.model))


def plan_fit(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None = None,
    *,
    prepare: Prepare | None = None,
    logits: Callable[[Any], Tensor] | None = None,
    outputs: OutputKind | None = None,
    route: RouteChoice = "auto",
    engine: Engine | str | None = None,
) -> FitPlan:
    """Say what `fit` would do with these arguments, which are those of `fit`, without doing it.

    The model runs on a sample or two. An iterator, which can be read once, loses its first batch.

    Returns:
        The plan: the route, memory and size on disk.

    Raises:
        TtapcaError: As `fit` does before it reads the data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.Flatten())
        >>> plan_fit(model, "0", torch.rand(40, 3, 128, 128), n_components=10).route
        'gram'
    """
    check_n_components(n_components)
    check_option("route", route, OneOf(get_args(RouteChoice)))
    find_classes = _finder(logits, outputs)
    with _gathering(model, data, engine) as gathering:
        source = gathering.each(
            lambda: SourceActivations(model, layer, data, None, prepare, find_classes)
        )
        return _planned(source, gathering, n_components, route)[1]


@contextmanager
def _gathering(model: nn.Module, data: Any, engine: Engine | str | None) -> Iterator[Gathering]:
    """Say who reads the data, and put the model in the state in which it is run, for a while."""
    check_model(model)
    # Tensors made in inference mode could not be used under gradients later.
    with (
        closing(gathering_of(data, engine)) as gathering,
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(model),
    ):
        yield gathering


def _planned(
    source: SourceActivations,
    gathering: Gathering,
    n_components: int | float | None,
    route: RouteChoice,
) -> tuple[Shapes, FitPlan]:
    """Look at the first batch, and choose the route."""
    shapes = gathering.each(source.probe)
    gathering.settle(source)
    return shapes, gathering.plan(
        lambda asked: _plan(source, shapes, n_components, asked, gathering),
        route,
    )


def _finder(
    logits: Callable[[Any], Tensor] | None, outputs: OutputKind | None
) -> Callable[[Any], Tensor | None] | None:
    """Return what finds the logits of classes in what a model returns; None for the output."""
    return logits if outputs is None else Outputs(outputs, logits).of_classes


def _plan(
    source: SourceActivations,
    shapes: Shapes,
    n_components: int | float | None,
    route: RouteChoice,
    gathering: Gathering,
) -> FitPlan:
    """Choose the route, or refuse it if it needs more memory than there is."""
    problem = Problem(
        shapes.input,
        shapes.output,
        shapes.folds,
        n_components,
        source.samples,
        min(source.batch_size, source.cost.together),
        source.classes,
        source.data_shape,
    )
    return plan_of(
        problem,
        route,
        network_bytes=source.bytes_to_run(),
        norm_bytes=source.measuring_rule().stored_bytes(source.model),
        spread=gathering.spread,
    )


def _agreement(
    source: SourceActivations, fitted: FittedFilter, kept: list[ModelInputs]
) -> float | None:
    """Return the share of source predictions that stay the same with the filter at gains of 1.

    Return None where nothing is dropped, and where the model predicts no classes.
    """
    if fitted.dropped_variance_ < NOTHING_DROPPED:
        return None
    source.stage("comparing predictions")
    plain = [_classes(source, inputs) for inputs in kept]
    attachment = attach(source.model, fitted)
    try:
        filtered = [_classes(source, inputs) for inputs in kept]
    finally:
        attachment.detach()
    same = [
        (one == two).flatten().cpu()
        for one, two in zip(plain, filtered, strict=True)
        if one is not None and two is not None
    ]
    return float(torch.cat(same).double().mean()) if same else None


def _mirror_agreement(source: SourceActivations, kept: list[ModelInputs]) -> float | None:
    """Return the share of source predictions that stay when images are mirrored."""
    source.stage("mirroring images")
    return mirror_agreement(source.logits_of, ((each.args, each.kwargs) for each in kept))


def _classes(source: SourceActivations, inputs: ModelInputs) -> Tensor | None:
    """Return the predicted classes, where a model returns logits."""
    logits = source.logits_of(*inputs.args, **inputs.kwargs)
    return None if logits is None else logits.argmax(1)
