"""`fit`: from a model, a layer and source data to a fitted filter.

`ttapca.fitting.plan` chooses one of the five routes of `ttapca.fitting.routes`, and a reader of
`ttapca.fitting.readers` reads the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.engines import Engine
from ttapca.errors import FewIndependentWarning, HeavyTailsWarning, enough_memory, warn_caller
from ttapca.fitting.activations import ModelInputs, Prepare, Progress, SourceActivations
from ttapca.fitting.attachment import attach
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.plan import FitPlan, Problem, RouteChoice, plan_of
from ttapca.fitting.readers import DataReader, reader_of
from ttapca.fitting.routes import SAMPLED, SUMMED, FitTask, summed_config
from ttapca.fitting.source_statistics import FEWEST_SAMPLES, SourceStatistics
from ttapca.fitting.temperature import measured_temperature
from ttapca.spectral.pca import check_n_components
from ttapca.support.inputs import mirror_back, mirror_images
from ttapca.support.modules import LayerPaths, check_model, evaluation_mode
from ttapca.support.outputs import OutputKind, Outputs

# Rounding leaves a share of variance of about this size if a basis is complete.
NOTHING_DROPPED = 1e-6

# Share of samples that make the variance. Measured: images 0.57 to 0.72, log-mels 0.58 to 0.83,
# roots of mel powers 0.32; mel powers 0.03 to 0.08.
FEWEST_MAKE_VARIANCE = 0.125

_LESS_MEMORY = (
    "Fit at a layer with fewer inputs or outputs, ask for fewer components, read smaller batches, "
    "or take `route='dct'` for large images."
)


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
    groups: Sequence[Hashable] | None = None,
    labelled: Iterable[Any] | None = None,
) -> FittedFilter:
    """Fit the components of a layer on source data: principal components, or cosines of images.

    The model runs in evaluation mode and without gradients, and is afterwards as it was: weights,
    buffers, training flags, hooks. The caller's random state is not touched. In a job of several
    ranks (`torch.distributed`), every rank calls `fit` with data of its own, and all get the filter
    of all data; `engine=SerialEngine()` fits in one rank alone.

    Args:
        model: Any trained module.
        layer: Dotted path of one of its layers; prefixes of wrappers can be left out.
        data: A loader of training batches (tensors, pairs that start with one, or dicts with the
            model's arguments), one tensor or array, or `ttapca.datasets.Shards`; 32 samples or
            more.
        n_components: A number of them, a fraction of the variance (a float up to 1), or None: all.
        progress: Wraps the batches while they are read, for example `tqdm`. Its methods `plan` and
            `stage`, if it has such, are told the `FitPlan` and the name of work without batches.
        prepare: Returns what the model takes of a batch: a tensor, a tuple of arguments, or a dict
            of arguments by name.
        logits: Finds the logits in what the model returns, such as `lambda output: output.logits`.
        outputs: `multiclass` (the default for two or more), `binary`, `multilabel`, `regression`.
        route: `auto`, `pca`, `dct` (cosines) or one of `folded`, `exact`, `gram` and `randomised`;
            see `ttapca.fitting.plan`.
        generator: Draws the start of the randomised route; a fixed seed by default.
        engine: Reads data in parts, with the same result: `joblib:4` or an `Engine`.
        groups: Each sample's group in order, such as its drive: samples of one group are alike.
        labelled: Batches of samples and labels that the network was not trained on; with them,
            `health.expected_error` says how often it is wrong.

    Warns:
        UserWarning: The randomised route did not become as accurate as it should.
        FewIndependentWarning: The samples resemble each other so much that they count for few.
        HeavyTailsWarning: The variance comes from few samples, as that of powers does.

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
    asked = (progress, prepare, logits, outputs, route, engine, groups)
    with _planned(model, layer, data, n_components, *asked) as (reader, source, plan):
        temperature = None
        if labelled is not None:  # first, since it is refused within seconds
            temperature = measured_temperature(model, labelled, Outputs(outputs, logits))
        source.tell("plan", plan)
        task = FitTask(source, n_components, generator, route == plan.route, groups)
        if plan.route in SAMPLED:
            return _completed(task, SAMPLED[plan.route](task), temperature)

        def find(statistics: SourceStatistics) -> FittedFilter:
            statistics.check_samples()
            task.statistics = statistics
            source.tell("stage", "decomposing")
            return _completed(task, SUMMED[plan.route](task), temperature)

        config = reader.each(partial(summed_config, task, plan.route))
        return reader.read(source, config, plan, find)


def _completed(task: FitTask, fitted: FittedFilter, temperature: float | None) -> FittedFilter:
    source, statistics, sums = task.source, task.statistics, task.statistics.channels
    canonical = LayerPaths(source.model).canonical
    classes = source.channels.by_class(sums)
    groups, tokens = (
        {canonical(path): each for path, each in source.channels.of(kind, sums).items()}
        for kind in (nn.GroupNorm, nn.LayerNorm)
    )
    kept = [inputs.mapped(lambda x: x.to(source.device)) for inputs in statistics.kept.all()]
    agreement = _agreement(source, fitted, kept)
    found = dataclasses.replace(
        fitted,
        layer=canonical(fitted.layer),
        group_norm_=groups,
        layer_norm_=tokens,
        classes_=None if classes is None else classes.renamed(canonical),
        class_reach_=fitted.reach_of(task.class_sums()),
        agreement_=agreement,
        mirror_agreement_=_mirror_agreement(source, kept),
        temperature_=temperature,
        inputs_=statistics.inputs.found(),
    )
    _warn_of_few(found)
    _warn_of_tails(found)
    return dataclasses.replace(found, fingerprint_=found.fingerprint_of(source.model))


def _warn_of_few(fitted: FittedFilter) -> None:
    found = fitted.resemblance_
    if found is None or found.between is None or found.independent >= FEWEST_SAMPLES:
        return
    warn_caller(
        f"The {fitted.n_samples_:,} samples resemble each other, as frames of a video do: they "
        f"count for about {found.independent:.0f} independent ones, and a filter wants at least "
        f"{FEWEST_SAMPLES}. So it will notice strong shifts only. Fit on data of more scenes, "
        "drives or speakers, and name these with `groups=`.",
        FewIndependentWarning,
    )


def _warn_of_tails(fitted: FittedFilter) -> None:
    """Warn if few samples make the variance: then a usual one, or a batch, has quite another."""
    if fitted.energies_ is None:
        return
    energies = fitted.energies_.double()
    energies = energies[:, energies.sum(0) > 0]
    # The mean of a band is as sure as that of so many samples of one energy.
    counting = energies.sum(0).square() / energies.square().sum(0)
    if not counting.numel() or counting.median() >= FEWEST_MAKE_VARIANCE * len(energies):
        return
    warn_caller(
        f"The variance should come from at least {100 * FEWEST_MAKE_VARIANCE:g} % of the samples; "
        f"found that about {100 * float(counting.median()) / len(energies):.1f} % make it. Powers, "
        "amounts and counts are like that (a loud recording has a hundred times the power of a "
        "quiet one), and so are data with a few broken samples. Filter after the logarithm, such "
        "as log-mels instead of mel powers, or take the broken samples out.",
        HeavyTailsWarning,
    )


def plan_fit(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None = None,
    **options: Any,
) -> FitPlan:
    """Return the plan of `fit` with these arguments; an iterator loses its first batch."""
    with _planned(model, layer, data, n_components, **options) as (*_, plan):
        return plan


@contextmanager
def _planned(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None,
    progress: Progress | None = None,
    prepare: Prepare | None = None,
    logits: Callable[[Any], Tensor] | None = None,
    outputs: OutputKind | None = None,
    route: RouteChoice = "auto",
    engine: Engine | str | None = None,
    groups: Sequence[Hashable] | None = None,
) -> Iterator[tuple[DataReader, SourceActivations, FitPlan]]:
    """Check options, look at the first batch and choose the route; the model is as it is run."""
    check_n_components(n_components)
    check_option("route", route, OneOf(get_args(RouteChoice)))
    find_classes = logits if outputs is None else Outputs(outputs, logits).of_classes
    check_model(model)
    # Tensors made in inference mode could not be used under gradients later.
    with (
        closing(reader_of(data, engine, groups)) as reader,
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(model),
        enough_memory(f"Fitting at `{layer}`", _LESS_MEMORY),
    ):
        source = reader.each(
            partial(SourceActivations, model, layer, data, progress, prepare, find_classes)
        )
        reader.each(source.probe)
        reader.settle(source)
        problem = Problem(
            source.shapes.input,
            source.shapes.output,
            source.shapes.folds,
            n_components,
            source.samples,
            min(source.batch_size, source.cost.together),
            source.classes,
            source.data_shape,
        )
        memory = source.cost.bytes_for(source.batch_size)
        plan = partial(plan_of, problem, network_bytes=memory, parallelism=reader.parallelism)
        yield reader, source, reader.plan(plan, route)


def _agreement(
    source: SourceActivations, fitted: FittedFilter, kept: list[ModelInputs]
) -> float | None:
    """Return the share of source predictions that stay with the filter at gains of 1, if known."""
    if fitted.dropped_variance_ < NOTHING_DROPPED:
        return None
    source.tell("stage", "comparing predictions")
    plain = list(map(source.logits_of, kept))
    attachment = attach(source.model, fitted)
    try:
        filtered = list(map(source.logits_of, kept))
    finally:
        attachment.detach()
    same = [
        (one.argmax(1) == two.argmax(1)).flatten().cpu()
        for one, two in zip(plain, filtered, strict=True)
        if one is not None and two is not None
    ]
    return float(torch.cat(same).double().mean()) if same else None


def _mirror_agreement(source: SourceActivations, kept: list[ModelInputs]) -> float | None:
    """Return the share of predicted classes that stay when images are mirrored, from 0 to 1."""
    source.tell("stage", "mirroring images")
    weights = agreeing = 0.0
    for inputs in kept:
        mirrored = mirror_images(inputs.args, inputs.kwargs)
        plain = source.logits_of(inputs)
        if mirrored is None or plain is None:
            return None
        seen = source.logits_of(ModelInputs(*mirrored))
        back = None if seen is None else mirror_back(seen)
        if back is None or back.shape != plain.shape:
            return None
        # If the network hesitates between classes, any change may tip it.
        probability, classes = plain.double().softmax(1).max(1)
        weights += float(probability.sum())
        agreeing += float(probability[classes == back.argmax(1)].sum())
    share = agreeing / weights if weights else torch.nan
    return share if 0.0 <= share <= 1.0 else None  # a network may return NaN
