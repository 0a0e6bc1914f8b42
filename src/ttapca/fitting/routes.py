"""`fit`, and the routes by which it finds a basis.

Only the part of the network up to the layer is run (except for some batches if the network has
BatchNorm or GroupNorm, see `ttapca.fitting.source_channels`). Five routes lead to the components:

- **folded**, for an affine layer with fewer inputs than outputs: exact, in the space of its input;
- **exact**, for any other layer with up to `EXACT_LIMIT` outputs: one p x p matrix;
- **gram**, past that and up to 4,096 samples or 1 GB of them: exact, one samples x samples matrix;
  the only route that keeps all activations in memory;
- **randomised**, past that: a few passes over the data, until an error bound is met;
- **dct**, only if asked for, for images too large for a basis of vectors: cosines with exact
  variances, not exactly the principal components (see `ttapca.spectral.cosine`).

A further route is one function, its entry in `ROUTES`, and its name in `RouteName`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

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
from ttapca.fitting.fitted_filter import FittedFilter, attach, drops_something
from ttapca.fitting.mirror_agreement import mirror_agreement
from ttapca.spectral.affine import InputPCA, LinearPart, acts_on_input, fold, is_affine
from ttapca.spectral.basis import Basis, Cosine, Dense, Folded
from ttapca.spectral.calibration import (
    Calibration,
    EvenSample,
    calibrate,
    energies_of,
    rest_of,
)
from ttapca.spectral.cosine import CoefficientMoments, fit_channel_dct
from ttapca.spectral.moments import Moments
from ttapca.spectral.outliers import is_image, measure
from ttapca.spectral.pca import PCA, SampleGram, Spectrum, check_n_components, hold
from ttapca.spectral.randomised import randomised_pca
from ttapca.spectral.textures import textures
from ttapca.support.modules import evaluation_mode
from ttapca.support.outputs import OutputKind, Outputs

RouteName = Literal["folded", "exact", "gram", "randomised", "dct"]

# The p x p matrix of the exact route takes 8 p^2 bytes (512 MB here) and its eigendecomposition
# some minutes on a laptop. Larger layers take the gram or the randomised route.
EXACT_LIMIT = 8192

AnyMoments = TypeVar("AnyMoments", Moments, CoefficientMoments)

# Rounding leaves a share of variance of about this size where a basis is complete.
NOTHING_DROPPED = 1e-6

_LESS_MEMORY = (
    "Fit at a layer with fewer inputs or outputs, ask for fewer components, read smaller batches, "
    "or take `route='dct'` for large images."
)


@dataclass(eq=False)
class FitTask:
    """What a route works with; `on_demand` is whether the caller named the route."""

    source: SourceActivations
    shapes: Shapes
    n_components: int | float | None
    generator: torch.Generator | None
    on_demand: bool
    _begun: Iterator[Tensor] | None = None

    def shape(self, *, at_input: bool = False) -> tuple[int, ...]:
        """Return the shape of a sample at one side of the layer."""
        if not at_input:
            return self.shapes.output
        if self.shapes.input is None:
            raise OptionError(f"The input of `{self.source.path}` is not a single tensor.")
        return self.shapes.input

    def read(self, *, at_input: bool = False) -> Iterator[Tensor]:
        """Start a pass over the activations, or continue one that another route gave up."""
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        side: Literal["input", "output"] = "input" if at_input else "output"
        return self.source.batches(side, self.shape(at_input=at_input))

    def accumulate(self, moments: AnyMoments, *, at_input: bool) -> tuple[AnyMoments, EvenSample]:
        """Read all activations once, and keep an even sample of them."""
        sample = EvenSample(math.prod(self.shape(at_input=at_input)))
        for batch in sample.of(self.read(at_input=at_input)):
            moments.update(batch)
        self.source.stage("decomposing")
        return moments, sample

    def give_back(self, held: list[Tensor], rest: Iterator[Tensor]) -> None:
        """Leave a pass that was begun to the next route."""
        self._begun = itertools.chain(held, rest)

    def fitted(
        self,
        route: str,
        basis: Basis,
        found: Spectrum,
        calibration: Calibration,
        error_bound: Tensor | None = None,
    ) -> FittedFilter:
        """Make a filter of what a route found."""
        shape = self.shape(at_input=basis.at_input)
        center = mean = found.mean.cpu()
        if basis.at_input:
            mean = LinearPart(self.source.layer, shape).output_of(center)
        return FittedFilter(
            layer=self.source.path,
            basis=basis,
            shape=shape,
            output_shape=self.shapes.output,
            mean_=mean,
            center_=center,
            singular_values_=found.singular_values.cpu(),
            n_samples_=found.n_samples,
            total_variance_=found.total_variance,
            route=route,
            error_bound_=error_bound,
            energies_=calibration.energies,
            rest_=calibration.rest,
        )

    def with_images(self, fitted: FittedFilter, sample: EvenSample) -> FittedFilter:
        """Measure a sample of the layer's input too, where that is the model's input images."""
        shape = self.shapes.input
        if shape is None or shape != self.source.data_shape or not is_image(shape):
            return fitted
        images = sample.all().view(-1, *shape)
        # Those whose energies were measured, which `calibrate` may have held out of the basis.
        apart, energies = sample.apart(), fitted.energies_
        if energies is not None and apart is not None and len(apart) == len(energies):
            measured = textures(apart.view(-1, *shape))
        else:
            measured = textures(images)
        return dataclasses.replace(
            fitted, outliers_=measure(images), textures_=measured.float().cpu()
        )


@dataclass(frozen=True)
class Route:
    """One way to find a basis.

    Attributes:
        find: Returns None when it turns out that another route has to be taken.
        serves: Whether `fit` tries it by default, for a layer and the shapes there.
    """

    find: Callable[[FitTask], FittedFilter | None]
    serves: Callable[[nn.Module, Shapes], bool]


def _works_on_input(layer: nn.Module, shapes: Shapes) -> bool:
    return acts_on_input(layer, shapes.input, shapes.output)


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
    size = math.prod(task.shapes.output)
    sample, batches = EvenSample(size), task.read()
    held, complete = hold(sample.of(batches), limited=not task.on_demand)
    if not complete:
        task.give_back(held, batches)
        return None
    task.source.stage("decomposing")
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
    at_input = _works_on_input(task.source.layer, task.shapes)
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


# In the order in which they are tried.
ROUTES: dict[str, Route] = {
    "folded": Route(_folded, serves=_works_on_input),
    "exact": Route(_exact, serves=lambda _, shapes: math.prod(shapes.output) <= EXACT_LIMIT),
    "gram": Route(_gram, serves=lambda _layer, _shapes: True),
    "randomised": Route(_randomised, serves=lambda _layer, _shapes: True),
    "dct": Route(_dct, serves=lambda _layer, _shapes: False),
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
            it has a method `stage`, that is told the name of work without batches.
        prepare: Returns what the model takes of a batch: a tensor, a tuple of arguments, or a dict
            of arguments by name; `lambda batch: (batch[0], batch[1])` for two inputs.
        logits: Finds the logits in what the model returns, where that is more than one tensor:
            `lambda output: output.logits`. From them, `fit` learns what classes do to statistics.
        outputs: What the outputs of the model mean: `multiclass`, `binary`, `multilabel` or
            `regression`. By default two or more are the logits of classes. Of a single one nothing
            is learned unless it is said to be `binary`, since it may be a regression.
        route: `folded`, `exact`, `gram`, `randomised` or `dct`, see above; by default one of the
            first four, chosen by the layer and the number of samples.
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
        OutOfMemoryError: The decomposition needs more memory than there is.
        AttachError: The layer carries a filter already.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))
        >>> images = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> fit(model, "0", images, n_components=20)
        FittedFilter(layer='0', 20 components, 50 samples, folded (1, 8, 8) -> (4, 8, 8))
    """
    check_n_components(n_components)
    check_option("route", route, OneOf(["auto", *ROUTES]))
    find_classes = logits if outputs is None else Outputs(outputs, logits).of_classes
    source = SourceActivations(model, layer, data, progress, prepare, find_classes)
    # Tensors made in inference mode could not be used under gradients later.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(model),
        enough_memory(f"Fitting at `{layer}`", _LESS_MEMORY),
    ):
        shapes = source.probe()
        on_demand = route != "auto"
        task = FitTask(source, shapes, n_components, generator, on_demand)
        tried = (
            each
            for name, each in ROUTES.items()
            if name == route or (not on_demand and each.serves(source.layer, shapes))
        )
        fitted = next(found for each in tried if (found := each.find(task)) is not None)
        return dataclasses.replace(
            fitted,
            group_norm_=source.channels.of(nn.GroupNorm),
            layer_norm_=source.channels.of(nn.LayerNorm),
            class_moments_=source.channels.by_class(),
            class_reach_=fitted.reach_of(source.class_means),
            agreement_=_agreement(source, fitted),
            mirror_agreement_=_mirror_agreement(source),
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
