"""`fit`: the PCA of one layer's output, from a stream of source data through the user's model.

Only the part of the network up to the layer is run, nothing of size (samples x p) ever exists, and
four routes lead to the components:

- **folded**, for an affine layer with fewer inputs than outputs: exact, in the space of its input;
- **exact**, for any other layer with up to `EXACT_LIMIT` outputs: one p x p matrix;
- **randomised**, past that: two passes over the data, with an error bound;
- **dct**, on demand, for images so large that a basis of vectors is out of reach: cosines, not
  exactly the principal components, with exact variances (see `ttapca.structured`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ttapca.attachment import carries_filter
from ttapca.calibration import EvenSample, calibrate, energies_of
from ttapca.catching import stopped_at
from ttapca.errors import (
    AttachError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.fitted import FittedFilter, Route
from ttapca.folding import LinearPart, fold, is_affine
from ttapca.modules import device_and_dtype, evaluation_mode, find_layer
from ttapca.pca import PCA, Moments, check_n_components
from ttapca.randomised import randomised_pca
from ttapca.structured import CoefficientMoments, fit_channel_dct

Progress = Callable[[Iterable[Any]], Iterable[Any]]

# The p x p matrix of the exact route takes 8 p^2 bytes (512 MB here) and its eigendecomposition
# some minutes on a laptop; past this the randomised route takes over.
EXACT_LIMIT = 8192

# A tensor given as data is cut into batches of this many samples.
TENSOR_BATCH = 256


def fit(
    model: nn.Module,
    layer: str,
    data: Iterable[Any] | Tensor,
    n_components: int | float | None = None,
    *,
    progress: Progress | None = None,
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
            element is one. A single tensor of samples will do as well.
        n_components: How many components to keep: a number, a fraction of the variance (a float up
            to 1), or None for all that the data have.
        progress: Wraps the batches while they are read, for example `tqdm`; silent by default.
        route: `folded`, `exact`, `randomised` or `dct`, see above; by default one of the first
            three, chosen by the layer.
        generator: Draws the start of the randomised route; a fixed seed by default.

    Returns:
        The fitted filter.

    Raises:
        LayerNotFoundError: No such layer; near names are offered.
        LayerOutputError: The layer returns no tensor, or is called not exactly once a forward.
        NonFiniteError: A batch leads to NaN or infinity; its number is named.
        NotEnoughDataError: Too few samples, or fewer components in the data than asked for.
        OptionError: An option makes no sense.
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
    source = _Source(model, layer, data, progress)
    # A caller in inference mode would make tensors that no gradient can pass.
    with torch.inference_mode(False), torch.no_grad(), evaluation_mode(model):
        shapes = source.probe()
        chosen = _choose_route(route, source.layer, shapes, layer)
        if chosen == "folded":
            return _fit_folded(source, shapes, n_components)
        if chosen == "dct":
            return _fit_dct(source, shapes, n_components)
        return _fit_output(source, shapes, n_components, chosen, generator)


@dataclass(frozen=True)
class _Shapes:
    """Of one sample of a layer's input and output; the input may be no single tensor."""

    input: tuple[int, ...] | None
    output: tuple[int, ...]


class _Source:
    """Batches of source data, and what they become at the layer."""

    def __init__(
        self, model: nn.Module, path: str, data: Iterable[Any] | Tensor, progress: Progress | None
    ) -> None:
        self.model = model
        self.path = path
        self.layer = find_layer(model, path)
        if carries_filter(self.layer):
            raise AttachError(
                f"A filter is fitted on the untouched model; `{path}` already carries a filter. "
                "Call `detach()` on what put it there first."
            )
        if progress is not None and not callable(progress):
            raise OptionError(
                "`progress` is a function that wraps an iterable, for example `tqdm`; found "
                f"{progress!r}."
            )
        self.device = device_and_dtype(self.layer, model)[0]
        self._one_shot = isinstance(data, Iterator)
        self._data: Iterable[Any] = (
            torch.split(data, TENSOR_BATCH) if isinstance(data, Tensor) else data
        )
        self._progress = progress or (lambda batches: batches)
        self._first: tuple[Any, Iterator[Any]] | None = None

    def probe(self) -> _Shapes:
        """Run a sample or two through the whole model to see what the layer takes and gives."""
        iterator = iter(self._data)
        try:
            first = next(iterator)
        except StopIteration:
            raise NotEnoughDataError("Fitting needs data; found none.") from None
        if self._one_shot:
            self._first = (first, iterator)  # the batch must be read again, but cannot be
        calls: list[_Shapes] = []

        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            del module
            if not isinstance(output, Tensor) or output.dim() < 2:
                raise LayerOutputError(
                    "A filter goes after a layer that returns one tensor of shape (batch, ...); "
                    f"`{self.path}` returned {_describe(output)}. Choose another layer."
                )
            taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
            calls.append(_Shapes(taken, tuple(output.shape[1:])))

        handle = self.layer.register_forward_hook(record)
        try:
            self.model(_inputs_of(first, 0).to(self.device)[:2])
        finally:
            handle.remove()
        if len(calls) != 1:
            times = "never called" if not calls else f"called {len(calls)} times"
            raise LayerOutputError(
                f"A filter goes after a layer that is called once in a forward pass; `{self.path}` "
                f"is {times}. Choose another layer, or give each call a module of its own."
            )
        return calls[0]

    def batches(self, at: Literal["input", "output"], shape: tuple[int, ...]) -> Iterator[Tensor]:
        """What every batch becomes at the layer, shape (batch, *shape)."""
        for number, batch in enumerate(self._progress(self._read())):
            samples = _inputs_of(batch, number).to(self.device)
            activation = self._run_to_layer(samples, at)
            if tuple(activation.shape[1:]) != shape:
                raise ShapeError(
                    f"All batches must give samples of one shape at `{self.path}`; batch {number} "
                    f"gave {tuple(activation.shape[1:])}, the first one {shape}."
                )
            if not torch.isfinite(activation).all():
                finite = not samples.is_floating_point() or bool(torch.isfinite(samples).all())
                place = f"the {at} of `{self.path}`" if finite else "the data"
                raise NonFiniteError(
                    f"Fitting needs finite numbers; found NaN or infinity in {place} at batch "
                    f"{number} (counting from 0). Remove that batch or mend it."
                )
            yield activation

    def require_several_passes(self) -> None:
        """Raise unless the data can be read more than once."""
        if self._one_shot:
            raise OptionError(
                f"The output of `{self.path}` is decomposed by the randomised route, which reads "
                "the data twice; found an iterator, which can be read once. Pass a loader or a "
                "list."
            )

    def _read(self) -> Iterator[Any]:
        if self._first is None:
            yield from self._data
        else:
            first, rest = self._first
            yield first
            yield from rest

    def _run_to_layer(self, samples: Tensor, at: Literal["input", "output"]) -> Tensor:
        with stopped_at(self.layer, before=at == "input") as seen:
            self.model(samples)
        if not seen:
            raise LayerOutputError(f"`{self.path}` was not called in the forward pass of a batch.")
        activation: Tensor = seen[0]
        return activation


def _choose_route(
    wish: Route | Literal["auto"], layer: nn.Module, shapes: _Shapes, path: str
) -> Route:
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
    return "exact" if size <= EXACT_LIMIT else "randomised"


def _works_on_input(layer: nn.Module, shapes: _Shapes) -> bool:
    """Whether the layer is affine, and its input the smaller side."""
    smaller = shapes.input is not None and math.prod(shapes.input) < math.prod(shapes.output)
    return smaller and is_affine(layer)


def _fit_folded(source: _Source, shapes: _Shapes, n_components: int | float | None) -> FittedFilter:
    if shapes.input is None:
        raise LayerOutputError(f"`{source.path}` takes no single tensor.")
    moments = Moments(math.prod(shapes.input), device=source.device)
    sample = EvenSample(math.prod(shapes.input))
    for batch in sample.of(source.batches("input", shapes.input)):
        moments.update(batch)
    linear = LinearPart(source.layer, shapes.input)
    pca = fold(moments, linear, n_components)
    again = functools.partial(fold, linear=linear, n_components=len(pca.singular_values))
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
        energies_=calibrate(sample, moments, pca, again),
    )


def _fit_output(
    source: _Source,
    shapes: _Shapes,
    n_components: int | float | None,
    route: Route,
    generator: torch.Generator | None,
) -> FittedFilter:
    size = math.prod(shapes.output)
    bound = None
    sample = EvenSample(size)
    if route == "exact":
        moments = Moments(size, device=source.device)
        for batch in sample.of(source.batches("output", shapes.output)):
            moments.update(batch)
        pca = PCA.from_moments(moments, n_components)
        again = functools.partial(PCA.from_moments, n_components=len(pca.singular_values))
        energies = calibrate(sample, moments, pca, again)
    else:
        source.require_several_passes()
        pca = randomised_pca(
            lambda: sample.of(source.batches("output", shapes.output)),
            size,
            n_components,
            generator=generator,
            device=source.device,
        )
        bound = pca.error_bound.cpu()
        energies = energies_of(
            sample.all(), pca.mean, pca.explained_variance, lambda centred: centred @ pca.basis
        )
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


def _fit_dct(source: _Source, shapes: _Shapes, n_components: int | float | None) -> FittedFilter:
    """A basis of cosines, in the layer's input where that is smaller and the layer affine."""
    shape = shapes.output
    if shapes.input is not None and _works_on_input(source.layer, shapes):
        shape = shapes.input
    on_input = shape is not shapes.output
    moments, sample = CoefficientMoments(shape, device=source.device), EvenSample(math.prod(shape))
    for batch in sample.of(source.batches("input" if on_input else "output", shape)):
        moments.update(batch)
    dct = fit_channel_dct(moments, n_components)
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


def _inputs_of(batch: Any, number: int) -> Tensor:
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return batch
    raise OptionError(
        "Data must yield tensors, or pairs whose first element is a tensor; batch "
        f"{number} (counting from 0) is {_describe(batch)}."
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
