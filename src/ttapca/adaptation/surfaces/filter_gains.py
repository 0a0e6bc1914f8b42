"""A fitted filter as surfaces: its gains, and the repair and check of inputs before it acts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, InputRangeWarning, TruncationWarning, warn_caller
from ttapca.fitting.attachment import prepare
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.fitting.input_range import InputRange, InputSums, extremes_of, mistake_in
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import GainName, is_closed_form
from ttapca.spectral.image_statistics import SourceOutliers
from ttapca.spectral.source_classes import SourceClasses
from ttapca.spectral.stream import ParameterValues, Stream
from ttapca.support.inputs import samples_in
from ttapca.support.modules import core_of, find_layer

# After this many images their units are known: these do not change in a stream.
MOST_IMAGES = 256


def known_classes(filters: Iterable[FittedFilter]) -> SourceClasses | None:
    """Return the classes of the source, from the first filter that knows them."""
    for each in filters:
        if each.classes_ is not None:
            return each.classes_
    return None


class SpectralGains(Surface):
    """A fitted filter whose gains may change.

    Args:
        fitted: The filter, which knows its layer.
        gain: Which gains; see `ttapca.spectral.gains`.
        strict: See `ttapca.attach`; it may be set until the filter is attached.
        **options: Options of the gain.
    """

    filter: SpectralFilter | None  # once attached; its parameters are those of its gains

    def __init__(
        self, fitted: FittedFilter, gain: GainName, *, strict: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.fitted, self.strict, self.filter = fitted, strict, None
        self.in_closed_form = is_closed_form(gain)  # whether the gains follow from the data
        self._gain: GainName = gain
        self._options = options

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Put the filter at its layer."""
        super().attach(model, stream)
        fitted = self.fitted
        if not self.in_closed_form and fitted.drops_too_much:
            warn_caller(
                f"The filter of {fitted.n_components_:,} components at `{fitted.layer}` "
                f"{fitted.loss_in_words()}, and learned gains cannot bring that back. Fit it "
                "with more components, or choose a method that keeps the rest, such as `wiener`.",
                TruncationWarning,
            )
        layer, attachment = prepare(model, fitted, self._gain, strict=self.strict, **self._options)
        attachment.put_on(layer, switch=self, patches=self.patches)
        self.filter = attachment.filter
        if stream is not None and self.filter.gain is not None:
            self.filter.gain.join(stream)
        learned = list(self.parameters())
        if learned:
            self.stream.keep(f"gains at {fitted.layer}", ParameterValues(learned))
        if fitted.inputs_ is not None:
            # Gradient steps look at the batch as it is.
            follows = self.in_closed_form and not learned
            check = InputCheck(fitted.inputs_, self.stream if follows else None)
            self.patches.hook_input(core_of(model)[1], check)

    @property
    def layer(self) -> str:
        """The dotted path of the filter's layer."""
        return self.fitted.layer

    @property
    def closed_form(self) -> ClosedFormGain | None:
        """The gains that follow from the data, once attached; None if all are learned."""
        gain = None if self.filter is None else self.filter.gain
        return None if gain is None else gain.closed_form


class InputCheck:
    """A hook that compares the inputs of a network with those of the fit.

    A sample is implausible if a value is farther from the middle of the source's range than eight
    times its width. It passes the untouched network, a stream counts it, and there is a warning.
    """

    def __init__(
        self, source: InputRange, stream: Stream | None, constants: Constants = CONSTANTS
    ) -> None:
        self._source, self._stream = source, stream
        # In widths of the range beyond its ends.
        self._most = math.sqrt(constants.largest_ratio) - 1 / 2
        self._seen, self._images = InputSums(), 0
        self._warned = False

    def __call__(self, _core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at some samples."""
        if torch.compiler.is_compiling():
            return
        given = samples_in(args[0] if args else next(iter(kwargs.values()), None))
        whole = isinstance(given, Tensor)  # units are looked for in images of one size
        if given is not None and not isinstance(given, Tensor):
            given = extremes_of(given)
        if given is None or given.dim() < 2 or not given.numel():
            return
        if whole and not self._warned and self._images < MOST_IMAGES and given.dim() == 4:
            self._look_for_units(given[: MOST_IMAGES - self._images])
        batch = None if self._stream is None else self._stream.batch
        if batch is not None and not batch.traced and batch.size == len(given):
            implausible = self._implausible(given.detach())
            if implausible is not None:
                batch.leave_aside(implausible)
                if not self._warned:
                    self._warn_of(given[implausible])

    def _implausible(self, samples: Tensor) -> Tensor | None:
        """Return which samples are implausible; None if none is."""
        source = self._source
        width = float((source.high - source.low).max())
        low, high = (float(each) for each in samples.aminmax())
        inner = float(source.low.max()) - self._most * width <= low
        if inner and high <= float(source.high.min()) + self._most * width:
            return None
        beyond = source.beyond(samples)
        # NaN and infinity are found elsewhere, and cost the whole batch.
        found = (beyond > self._most) & torch.isfinite(beyond)
        return found if bool(found.any()) else None

    def _warn_of(self, samples: Tensor) -> None:
        self._warned = True
        low, high = (float(each) for each in samples.aminmax())
        warn_caller(
            f"Samples with values from {low:.3g} to {high:.3g} are far outside of those that the "
            f"filter was fitted on, with {self._source.in_words()}. They are predicted by the "
            "network as it is, and leave no mark on the stream. Look at what produced them.",
            InputRangeWarning,
        )

    def _look_for_units(self, images: Tensor) -> None:
        self._images += len(images)
        self._seen.add(images[torch.isfinite(images).flatten(1).all(1)])
        seen = self._seen.found()
        mistake = None if seen is None else mistake_in(seen, self._source, self._images)
        if mistake is not None and seen is not None:
            self._warned = True
            warn_caller(
                f"The network is given samples with {seen.in_words()}, where the filter was fitted "
                f"on samples with {self._source.in_words()}: {mistake} Prepare samples as for the "
                "fit.",
                InputRangeWarning,
            )


class OutlierRepair(Surface):
    """Replaces single pixels that went wrong by the median around them, before a filter acts."""

    def __init__(self, fitted: FittedFilter, constants: Constants = CONSTANTS) -> None:
        super().__init__()
        if fitted.outliers_ is None:
            raise AttachError(
                "Outliers are replaced where a filter acts on the model's input images; the filter "
                f"at `{fitted.layer}` knows nothing of outliers. Fit it again, or do without."
            )
        self._fitted = fitted
        self._source = SourceOutliers(fitted.outliers_, constants)

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Act on the input of the layer, before everything that acts on it already."""
        super().attach(model, stream)
        layer = find_layer(model, self._fitted.layer)
        # A wrapper around `forward` would come after the filter, which is a hook of the layer.
        self.patches.hook_input(layer, RepairHook(self), first=True)

    def forward(self, images: Tensor) -> Tensor:
        """Return the images with outliers replaced, stream by stream, and count these."""
        self._fitted.check_shape(tuple(images.shape[1:]))
        if not images.shape[0]:
            return images
        running = self.stream.batch
        if running is not None and running.traced:
            each = running.counted_images()
            return self._source.repaired_alike(images, each) if isinstance(each, int) else images
        if torch.compiler.is_exporting():  # a frozen program repairs nothing
            return images
        batch = self.stream.opened(len(images)) if self.stream.state is not None else None
        if batch is None or batch.rows is None:
            mended, share = self._source.repaired(images)
            if batch is not None and batch.records:
                batch.outliers.setdefault(0, (share, len(images)))
            return mended
        rows = batch.rows.filtered.nonzero()[:, 0]
        if not len(rows):
            return images
        # Those of a stream come one after the other.
        streams, sizes = torch.unique_consecutive(batch.rows.stream[rows], return_counts=True)
        chosen = images[rows]
        mended, shares = self._source.repaired_each(chosen, sizes.tolist())
        if batch.records:
            for number, share, size in zip(streams.tolist(), shares, sizes.tolist(), strict=True):
                batch.outliers[number] = share, size
        return images if mended is chosen else images.index_copy(0, rows, mended)


class RepairHook:
    """A hook that gives a layer repaired images; a class, since methods are not copied as one."""

    def __init__(self, surface: OutlierRepair) -> None:
        self.surface = surface  # `ttapca.detach` finds it here

    def __call__(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the layer, or None if they stay."""
        if not self.surface.enabled:
            return None
        if args:
            return (self.surface(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self.surface(kwargs["input"])}
