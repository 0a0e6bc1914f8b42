"""`fit`: the PCA of one layer's output, from a stream of source data through the user's model.

Only the part of the network up to the layer is run (but for some batches of a network with
GroupNorm, see `ttapca.support.group_norm`), and five routes lead to the components:

- **folded**, for an affine layer with fewer inputs than outputs: exact, in the space of its input;
- **exact**, for any other layer with up to `EXACT_LIMIT` outputs: one p x p matrix;
- **gram**, past that and up to 4,096 samples or 1 GB of them: exact, one samples x samples matrix;
  the only route that keeps all activations in memory;
- **randomised**, past that: a few passes over the data, until an error bound is met;
- **dct**, on demand, for images so large that a basis of vectors is out of reach: cosines, not
  exactly the principal components, with exact variances (see `ttapca.spectral.cosine`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ttapca.errors import (
    LayerOutputError,
    OptionError,
    enough_memory,
)
from ttapca.fitting.activations import Prepare, Progress, Shapes, SourceActivations
from ttapca.fitting.attachment import attach
from ttapca.fitting.fitted_filter import FittedFilter, Route
from ttapca.spectral.affine import LinearPart, Projection, fold, fold_one_way, is_affine
from ttapca.spectral.calibration import EvenSample, calibrate, energies_of
from ttapca.spectral.cosine import CoefficientMoments, fit_channel_dct
from ttapca.spectral.gram import SampleGram, hold
from ttapca.spectral.pca import PCA, Moments, check_n_components
from ttapca.spectral.randomised import RandomisedPCA, randomised_pca
from ttapca.support.modules import evaluation_mode

# The p x p matrix of the exact route takes 8 p^2 bytes (512 MB here) and its eigendecomposition
# some minutes on a laptop; past this the Gram matrix of the samples or the randomised route serve.
EXACT_LIMIT = 8192

# Rounding leaves a share of variance of about this size where a basis is complete.
NOTHING_DROPPED = 1e-6

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
    route: Route | Literal["auto"] = "auto",
    generator: torch.Generator | None = None,
) -> FittedFilter:
    """Fit the PCA of a layer's output on source data.

    The model runs in evaluation mode and without gradients, and is afterwards as it was: weights,
    buffers, training flags, hooks. The caller's random state is not touched.

    Args:
        model: Any trained module.
        layer: Dotted path of one of its layers, as in `model.named_modules()`.
        data: Source data, usually a loader of training batches: tensors, or pairs whose first
            element is one. A single tensor of samples will do as well. At least 32 samples: fewer
            do not tell how much a component varies.
        n_components: How many components to keep: a number, a fraction of the variance (a float up
            to 1), or None for all that the data have.
        progress: Wraps the batches while they are read, for example `tqdm`; silent by default. One
            with a method `stage` is told by name what is done when all are read.
        prepare: Says what the model takes of a batch: a tensor, a tuple of arguments, or a dict of
            arguments by name; `lambda batch: batch["image"]` for batches that are dicts.
        route: `folded`, `exact`, `gram`, `randomised` or `dct`, see above; by default one of the
            first four, chosen by the layer and the number of samples.
        generator: Draws the start of the randomised route; a fixed seed by default.

    Returns:
        The fitted filter. Its `accuracy_` says how exact it is.

    Warns:
        UserWarning: The randomised route did not become as exact as it is meant to.

    Raises:
        LayerNotFoundError: No such layer; near names are offered.
        LayerOutputError: The layer returns no tensor, or is called not exactly once a forward.
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
    if route != "auto" and route not in get_args(Route):
        raise OptionError(f"`route` is auto, {', '.join(get_args(Route))}; found {route!r}.")
    source = SourceActivations(model, layer, data, progress, prepare)
    # A caller in inference mode would make tensors that no gradient can pass.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluation_mode(model),
        enough_memory(f"Fitting at `{layer}`", _LESS_MEMORY),
    ):
        shapes = source.probe()
        chosen = _choose_route(route, source.layer, shapes, layer)
        if chosen == "folded":
            fitted = _fit_folded(source, shapes, n_components)
        elif chosen == "dct":
            fitted = _fit_dct(source, shapes, n_components)
        else:
            fitted = _fit_output(source, shapes, n_components, chosen, generator)
        return dataclasses.replace(
            fitted,
            group_norm_=source.group_norm.statistics(),
            agreement_=_agreement(source, fitted),
        )


def _agreement(source: SourceActivations, fitted: FittedFilter) -> float | None:
    """Share of source predictions that a filter leaves as they are when it drops what it must.

    None where nothing is dropped, and where the model predicts no classes.
    """
    if fitted.dropped_variance_ < NOTHING_DROPPED:
        return None
    source.stage("comparing predictions")
    plain = [_classes(inputs.run(source.model)) for inputs in source.kept()]
    attachment = attach(source.model, fitted)
    try:
        filtered = [_classes(inputs.run(source.model)) for inputs in source.kept()]
    finally:
        attachment.detach()
    same = [
        (one == two).flatten().cpu()
        for one, two in zip(plain, filtered, strict=True)
        if one is not None and two is not None
    ]
    return float(torch.cat(same).double().mean()) if same else None


def _classes(output: Any) -> Tensor | None:
    """The predicted classes, where a model returns logits."""
    if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[1] < 2:
        return None
    return output.argmax(1)


def _choose_route(
    wish: Route | Literal["auto"], layer: nn.Module, shapes: Shapes, path: str
) -> Route | Literal["auto"]:
    """The route, as far as it can be told before the samples were counted."""
    size = math.prod(shapes.output)
    if wish == "folded" and (shapes.input is None or not is_affine(layer)):
        raise OptionError(
            "Folding needs an affine layer (Conv1d, Conv2d, Conv3d or Linear, without hooks); "
            f"`{path}` is a {type(layer).__name__}. Leave `route` at auto."
        )
    if wish != "auto":
        return wish
    if _works_on_input(layer, shapes):
        return "folded"
    return "exact" if size <= EXACT_LIMIT else "auto"


def _works_on_input(layer: nn.Module, shapes: Shapes) -> bool:
    """Whether the layer is affine, and its input the smaller side."""
    smaller = shapes.input is not None and math.prod(shapes.input) < math.prod(shapes.output)
    return smaller and is_affine(layer)


def _fit_folded(
    source: SourceActivations, shapes: Shapes, n_components: int | float | None
) -> FittedFilter:
    if shapes.input is None:
        raise LayerOutputError(f"`{source.path}` takes no single tensor.")
    moments = Moments(math.prod(shapes.input), device=source.device)
    sample = EvenSample(math.prod(shapes.input))
    for batch in sample.of(source.batches("input", shapes.input)):
        moments.update(batch)
    linear = LinearPart(source.layer, shapes.input)
    source.stage("decomposing")
    pca = fold(moments, linear, n_components)
    source.stage("calibrating")

    def without(apart: Tensor) -> Projection:
        return fold_one_way(moments.remove(apart), linear, len(pca.singular_values))

    return FittedFilter(
        layer=source.path,
        route="folded",
        shape=shapes.input,
        output_shape=shapes.output,
        mean_=linear.output_of(pca.mean),
        singular_values_=pca.singular_values,
        project=pca.project,
        n_samples_=pca.n_samples,
        total_variance_=pca.total_variance,
        rebuild=pca.rebuild,
        input_mean_=pca.mean,
        energies_=calibrate(sample, pca, without),
    )


def _fit_output(
    source: SourceActivations,
    shapes: Shapes,
    n_components: int | float | None,
    route: Route | Literal["auto"],
    generator: torch.Generator | None,
) -> FittedFilter:
    sample = EvenSample(math.prod(shapes.output))
    if route == "exact":
        pca, energies = _by_moments(source, shapes, n_components, sample)
    else:
        route, pca, energies = _by_samples(source, shapes, n_components, route, sample, generator)
    bound = pca.error_bound.cpu() if isinstance(pca, RandomisedPCA) else None
    return FittedFilter(
        layer=source.path,
        route=route,
        shape=shapes.output,
        output_shape=shapes.output,
        mean_=pca.mean.cpu(),
        singular_values_=pca.singular_values.cpu(),
        project=pca.basis.cpu(),
        n_samples_=pca.n_samples,
        total_variance_=pca.total_variance,
        error_bound_=bound,
        energies_=energies,
    )


def _by_moments(
    source: SourceActivations,
    shapes: Shapes,
    n_components: int | float | None,
    sample: EvenSample,
) -> tuple[PCA, Tensor]:
    """One p x p matrix."""
    moments = Moments(math.prod(shapes.output), device=source.device)
    for batch in sample.of(source.batches("output", shapes.output)):
        moments.update(batch)
    source.stage("decomposing")
    pca = PCA.from_moments(moments, n_components)
    source.stage("calibrating")

    def without(apart: Tensor) -> PCA:
        return PCA.from_moments(moments.remove(apart), len(pca.singular_values))

    return pca, calibrate(sample, pca, without)


def _by_samples(
    source: SourceActivations,
    shapes: Shapes,
    n_components: int | float | None,
    route: Route | Literal["auto"],
    sample: EvenSample,
    generator: torch.Generator | None,
) -> tuple[Route, PCA, Tensor]:
    """A samples x samples matrix where they are few, otherwise a few passes over them."""
    size = math.prod(shapes.output)

    def read() -> Iterator[Tensor]:
        return sample.of(source.batches("output", shapes.output))

    begun: list[Iterator[Tensor]] = []
    if route != "randomised":
        batches = read()
        held, complete = hold(batches, limited=route == "auto")
        if complete:
            source.stage("decomposing")
            gram = SampleGram(held, size, device=source.device)
            pca = gram.pca(n_components)
            source.stage("calibrating")

            def without(apart: Tensor) -> PCA:
                del apart  # the same samples, by their numbers
                return gram.pca(len(pca.singular_values), leave_out=sample.numbers_apart())

            return "gram", pca, calibrate(sample, pca, without)
        begun = [itertools.chain(held, batches)]  # what was read of the first pass is not lost
        del held  # nor kept any longer
    source.require_several_passes()
    pca = randomised_pca(
        lambda: begun.pop() if begun else read(),
        size,
        n_components,
        generator=generator,
        device=source.device,
    )
    source.stage("calibrating")
    energies = energies_of(
        sample.all(), pca.mean, pca.explained_variance, lambda centred: centred @ pca.basis
    )
    return "randomised", pca, energies


def _fit_dct(
    source: SourceActivations, shapes: Shapes, n_components: int | float | None
) -> FittedFilter:
    """A basis of cosines, in the layer's input where that is smaller and the layer affine."""
    shape = shapes.output
    if shapes.input is not None and _works_on_input(source.layer, shapes):
        shape = shapes.input
    on_input = shape is not shapes.output
    moments, sample = CoefficientMoments(shape, device=source.device), EvenSample(math.prod(shape))
    for batch in sample.of(source.batches("input" if on_input else "output", shape)):
        moments.update(batch)
    source.stage("decomposing")
    dct = fit_channel_dct(moments, n_components)
    source.stage("calibrating")
    fitted = FittedFilter(
        layer=source.path,
        route="dct",
        shape=shape,
        output_shape=shapes.output,
        mean_=LinearPart(source.layer, shape).output_of(dct.mean) if on_input else dct.mean,
        singular_values_=dct.singular_values,
        project=dct.rotation,
        n_samples_=dct.n_samples,
        total_variance_=dct.total_variance,
        input_mean_=dct.mean if on_input else None,
        order_=dct.order,
    )
    spectral = fitted.spectral_filter()
    variances = fitted.explained_variance_.float()
    energies = energies_of(sample.all(), spectral.mean, variances, spectral.project_centred)
    return dataclasses.replace(fitted, energies_=energies)
