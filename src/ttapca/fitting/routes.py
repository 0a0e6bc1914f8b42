"""`fit`, and the routes by which it finds a basis.

Only the part of the network up to the layer is run (except for some batches if the network has
BatchNorm or GroupNorm, see `ttapca.fitting.source_channels`). Five routes lead to the components:

- **folded**, for an affine layer with fewer inputs than outputs: exact, in the space of its input;
- **exact**, for any other layer: one p x p matrix;
- **gram**, for few samples: exact, one samples x samples matrix; the only route that keeps all
  activations in memory;
- **randomised**, for many samples of a long layer: a few passes over the data, until an error bound
  is met;
- **dct**, for images too large for a basis of vectors: cosines with exact variances, not exactly
  the principal components (see `ttapca.spectral.cosine`).

`ttapca.fitting.fit_plan` chooses among them. A further route is one function, its entry in
`ROUTES`, its name in `RouteName`, and its cost in `ttapca.fitting.route_costs`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ttapca._checks import OneOf, check_option
from ttapca.errors import OptionError, enough_memory
from ttapca.fitting.activations import (
    ModelInputs,
    Prepare,
    Progress,
    Shapes,
    SourceActivations,
)
from ttapca.fitting.fit_plan import FitPlan, RouteName, plan_of
from ttapca.fitting.fit_task import FitTask
from ttapca.fitting.fitted_filter import FittedFilter, attach, drops_something
from ttapca.fitting.mirror_agreement import mirror_agreement
from ttapca.fitting.route_costs import Problem
from ttapca.spectral.affine import InputPCA, LinearPart, fold, is_affine
from ttapca.spectral.basis import Basis, Cosine, Dense, Folded
from ttapca.spectral.calibration import (
    Calibration,
    EvenSample,
    calibrate,
    energies_of,
    rest_of,
)
from ttapca.spectral.cosine import CoefficientMoments, fit_channel_dct
from ttapca.spectral.few_inputs import InputGram
from ttapca.spectral.moments import Moments
from ttapca.spectral.pca import PCA, SampleGram, check_n_components, hold
from ttapca.spectral.randomised import randomised_pca
from ttapca.support.modules import evaluation_mode
from ttapca.support.outputs import OutputKind, Outputs

# Rounding leaves a share of variance of about this size where a basis is complete.
NOTHING_DROPPED = 1e-6

_LESS_MEMORY = (
    "Fit at a layer with fewer inputs or outputs, ask for fewer components, read smaller batches, "
    "or take `route='dct'` for large images."
)


def _folded(task: FitTask) -> FittedFilter:
    source = task.source
    if task.shapes.input is None or not is_affine(source.layer):
        raise OptionError(
            "Folding needs an affine layer (Conv1d, Conv2d, Conv3d or Linear, without hooks); "
            f"`{source.path}` is a {type(source.layer).__name__}. Leave `route` at auto."
        )
    linear = LinearPart(source.layer, task.shapes.input)
    moments = Moments(linear.input_size, device=source.device)
    moments, sample = task.accumulate(moments, at_input=True)
    pca = fold(moments, linear, task.n_components)
    basis = Folded(*pca.both_ways(linear))
    source.stage("calibrating")

    def basis_of(found: InputPCA) -> Basis:  # `both_ways` changes what it is called on
        return basis if found is pca else Folded(*found.both_ways(linear))

    calibration = calibrate(
        sample,
        pca,
        lambda apart: fold(moments.remove(apart), linear, len(pca.singular_values)),
        basis_of if drops_something(pca) else None,
    )
    return task.with_images(task.fitted("folded", basis, pca, calibration), sample)


def _exact(task: FitTask) -> FittedFilter:
    moments = Moments(math.prod(task.shapes.output), device=task.source.device)
    moments, sample = task.accumulate(moments, at_input=False)
    pca = PCA.from_moments(moments, task.n_components)
    task.source.stage("calibrating")
    calibration = calibrate(
        sample,
        pca,
        lambda apart: PCA.from_moments(moments.remove(apart), len(pca.singular_values)),
        _dense if drops_something(pca) else None,
    )
    return task.fitted("exact", Dense(pca.basis.cpu()), pca, calibration)


def _gram(task: FitTask) -> FittedFilter | None:
    """Decompose few samples; None where they turn out to be many."""
    at_input = task.shapes.folds
    size = math.prod(task.shape(at_input=at_input))
    sample, batches = EvenSample(size), task.read(at_input=at_input)
    held, complete = hold(sample.of(batches), limited=not task.on_demand)
    if not complete:
        if not at_input:  # at the input, what was read is of no use to the randomised route
            task.give_back(held, batches)
        return None
    task.source.stage("decomposing")
    if at_input:
        return _gram_at_input(task, held, sample)
    gram = SampleGram(held, size, device=task.source.device)
    pca = gram.pca(task.n_components)
    task.source.stage("calibrating")
    calibration = calibrate(
        sample,
        pca,  # the samples that `calibrate` holds out are left out by their positions
        lambda _: gram.pca(len(pca.singular_values), leave_out=sample.numbers_apart()),
        _dense if drops_something(pca) else None,
    )
    return task.fitted("gram", Dense(pca.basis.cpu()), pca, calibration)


def _gram_at_input(task: FitTask, held: list[Tensor], sample: EvenSample) -> FittedFilter:
    gram = InputGram(held, LinearPart(task.source.layer, task.shape(at_input=True)))
    pca = gram.pca(task.n_components)
    task.source.stage("calibrating")
    calibration = calibrate(
        sample,
        pca,
        lambda _: gram.pca(len(pca.singular_values), leave_out=sample.numbers_apart()),
        (lambda found: Folded(found.project, found.rebuild)) if drops_something(pca) else None,
    )
    basis = Folded(pca.project, pca.rebuild)
    return task.with_images(task.fitted("gram", basis, pca, calibration), sample)


def _randomised(task: FitTask) -> FittedFilter:
    size = math.prod(task.shapes.output)
    task.source.require_several_passes()
    sample = EvenSample(size)
    pca = randomised_pca(
        lambda: sample.of(task.read()),
        size,
        task.n_components,
        generator=task.generator,
        device=task.source.device,
    )
    task.source.stage("calibrating")
    energies = energies_of(
        sample.all(), pca.mean, pca.explained_variance, lambda centred: centred @ pca.basis
    )
    rest = rest_of(sample.all(), pca.mean, _dense(pca)) if drops_something(pca) else None
    calibration = Calibration(energies, rest)
    basis = Dense(pca.basis.cpu())
    return task.fitted("randomised", basis, pca, calibration, error_bound=pca.error_bound.cpu())


def _dct(task: FitTask) -> FittedFilter:
    at_input = task.shapes.folds
    shape = task.shape(at_input=at_input)
    moments = CoefficientMoments(shape, device=task.source.device)
    moments, sample = task.accumulate(moments, at_input=at_input)
    dct = fit_channel_dct(moments, task.n_components)
    task.source.stage("calibrating")
    basis = Cosine(dct.rotation, dct.order, shape, at_input=at_input)
    quick, mean = basis.prepared(torch.float32), dct.mean.float()
    samples = sample.all()
    energies = energies_of(samples, mean, dct.explained_variance.float(), quick.project)
    rest = rest_of(samples, mean, quick) if drops_something(dct) else None
    fitted = task.fitted("dct", basis, dct, Calibration(energies, rest))
    return task.with_images(fitted, sample) if at_input else fitted


def _dense(pca: PCA) -> Basis:
    return Dense(pca.basis)


ROUTES: dict[RouteName, Callable[[FitTask], FittedFilter | None]] = {
    "folded": _folded,
    "exact": _exact,
    "gram": _gram,
    "randomised": _randomised,
    "dct": _dct,
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
    route: RouteName | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> FittedFilter:
    """Fit the PCA of a layer's output on source data.

    The model runs in evaluation mode and without gradients, and is afterwards as it was: weights,
    buffers, training flags, hooks. The caller's random state is not touched.

    Args:
        model: Any trained module.
        layer: Dotted path of one of its layers, as in `model.named_modules()`.
        data: Source data, usually a loader of training batches: tensors, pairs whose first element
            is one, or dicts with the model's arguments; or a single tensor or array of samples. At
            least 32 samples: fewer do not tell how much a component varies.
        n_components: How many components to keep: a number, a fraction of the variance (a float up
            to 1), or None for all that the data have.
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
        route: `folded`, `exact`, `gram`, `randomised` or `dct`, see above; by default chosen by the
            layer, the number of samples and the memory at hand, see `ttapca.fitting.fit_plan`.
        generator: Draws the start of the randomised route; a fixed seed by default.

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

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
        >>> images = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> fit(model, "0", images, n_components=20)
        FittedFilter(layer='0', 20 components, 50 samples, folded (1, 8, 8) -> (4, 8, 8))
    """
    check_n_components(n_components)
    check_option("route", route, OneOf(["auto", *ROUTES]))
    find_classes = _finder(logits, outputs)
    source = SourceActivations(model, layer, data, progress, prepare, find_classes)
    # Tensors made in inference mode could not be used under gradients later.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(model),
        enough_memory(f"Fitting at `{layer}`", _LESS_MEMORY),
    ):
        shapes = source.probe()
        asked = None if route == "auto" else route
        plan = _plan(source, shapes, n_components, asked)
        source.tell(plan)
        task = FitTask(source, shapes, n_components, generator, on_demand=asked is not None)
        fitted = ROUTES[plan.route](task) or _randomised(task)
        return dataclasses.replace(
            fitted,
            group_norm_=source.channels.of(nn.GroupNorm),
            layer_norm_=source.channels.of(nn.LayerNorm),
            class_moments_=source.channels.by_class(),
            class_reach_=fitted.reach_of(source.class_means),
            agreement_=_agreement(source, fitted),
            mirror_agreement_=_mirror_agreement(source),
        )


def plan_fit(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None = None,
    *,
    prepare: Prepare | None = None,
    logits: Callable[[Any], Tensor] | None = None,
    outputs: OutputKind | None = None,
    route: RouteName | Literal["auto"] = "auto",
) -> FitPlan:
    """Say what `fit` would do with these arguments, without doing it.

    The model runs on a sample or two. An iterator, which can be read once, loses its first batch.

    Raises:
        TtapcaError: As `fit` does before it reads the data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.Flatten())
        >>> plan_fit(model, "0", torch.rand(40, 3, 128, 128), n_components=10).route
        'gram'
    """
    check_n_components(n_components)
    check_option("route", route, OneOf(["auto", *ROUTES]))
    source = SourceActivations(model, layer, data, None, prepare, _finder(logits, outputs))
    with torch.inference_mode(False), torch.no_grad(), evaluation_mode(model):
        asked = None if route == "auto" else route
        return _plan(source, source.probe(), n_components, asked)


def _finder(
    logits: Callable[[Any], Tensor] | None, outputs: OutputKind | None
) -> Callable[[Any], Tensor | None] | None:
    """Return what finds the logits of classes in what a model returns; None for the output."""
    return logits if outputs is None else Outputs(outputs, logits).of_classes


def _plan(
    source: SourceActivations,
    shapes: Shapes,
    n_components: int | float | None,
    route: RouteName | None,
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
    )
    times = None
    if source.wants_plan:
        times = source.times("input" if problem.folds else "output")
    return plan_of(
        problem,
        route,
        network_bytes=source.bytes_to_run(),
        norm_bytes=source.channels.stored_bytes(),
        times=times,
    )


def _agreement(source: SourceActivations, fitted: FittedFilter) -> float | None:
    """Return the share of source predictions that stay the same with the filter at gains of 1.

    Return None where nothing is dropped, and where the model predicts no classes.
    """
    if fitted.dropped_variance_ < NOTHING_DROPPED:
        return None
    source.stage("comparing predictions")
    plain = [_classes(source, inputs) for inputs in source.kept()]
    attachment = attach(source.model, fitted)
    try:
        filtered = [_classes(source, inputs) for inputs in source.kept()]
    finally:
        attachment.detach()
    same = [
        (one == two).flatten().cpu()
        for one, two in zip(plain, filtered, strict=True)
        if one is not None and two is not None
    ]
    return float(torch.cat(same).double().mean()) if same else None


def _mirror_agreement(source: SourceActivations) -> float | None:
    """Return the share of source predictions that stay when images are mirrored."""
    source.stage("mirroring images")
    kept = ((inputs.args, inputs.kwargs) for inputs in source.kept())
    return mirror_agreement(source.logits_of, kept)


def _classes(source: SourceActivations, inputs: ModelInputs) -> Tensor | None:
    """Return the predicted classes, where a model returns logits."""
    logits = source.logits_of(*inputs.args, **inputs.kwargs)
    return None if logits is None else logits.argmax(1)
