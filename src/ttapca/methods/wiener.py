"""`wiener`, `match`, `two-sided`: spectral gains in closed form; `ttapca-closed` learns on top."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from ttapca._checks import Count, NotNegative, Number, Positive, Share, Whole
from ttapca.adaptation.chain_passes import ChainPasses, Order, RunCounts
from ttapca.adaptation.optimisation import GradientSteps, Logits, Predictor, Run, adam, mean_entropy
from ttapca.adaptation.surfaces import OutlierRepair, SpectralGains, StreamStatistics, Surface
from ttapca.adaptation.surfaces.filter_gains import known_classes
from ttapca.errors import LayerOutputError, OptionError, ShapeError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.method import (
    PROBABILITIES,
    Assembly,
    Method,
    Mixture,
    Statistics,
    needed_filter,
    register,
    statistics_surfaces,
)
from ttapca.spectral.closed_form import WIENER
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.gains import GainName
from ttapca.spectral.source_classes import SourceClasses
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_state import StreamState
from ttapca.support.inputs import mirror_back, mirror_images
from ttapca.support.outputs import OutputKind

# Share of source predictions that must stay when images are mirrored. Measured: 0.84 to 1 on
# CIFAR-10 and CIFAR-100, seen in training or not; 0.3 on digits.
LEAST_MIRROR_AGREEMENT = 0.7

OURS: Mapping[str, Any] = {"paper": "this library; docs/closed-form.md", "needs": "data"}


@register(
    "two-sided",
    summary="Spectral filter in closed form, exponents by choice; no gradient",
    restore=0.5,
    **OURS,
)
@register(
    "match",
    summary="Spectral filter in closed form, to the source variances; no gradient",
    shrink=0.5,
    restore=0.5,
    **OURS,
)
@register("wiener", **OURS)
@dataclass(frozen=True, kw_only=True)
class Wiener(Method):
    """Spectral filter in closed form, the safe choice; no gradient.

    There is one forward pass: with lambda_i^2 the variance of component i in the source, and v_i
    that in the batch or stream, the gains are

        g_i = (lambda_i^2 / v_i)^shrink  if v_i is larger,   (lambda_i^2 / v_i)^restore  if smaller

    as surely as a shift is seen (docs/closed-form.md), and BatchNorm mixes the statistics of the
    batch with those of the source.

    Attributes:
        filter: A fitted filter, or several, one per layer.
        shrink: Exponent if the test data have more variance than the source.
        restore: Exponent if they have less.
        largest_ratio: The largest ratio of variances that is believed.
        threshold: Share of source batches whose gains are exactly 1 (0.8 by default); 0 trusts
            every batch.
        memory: After this many samples, an image of a stream counts 1 / e.
        center: Which share of a sure change of the mean is removed, from 0 to 1. A class has a mean
            of its own; a change is sure only beyond the distance of classes.
        statistics: What normalisation layers normalise with; see `GradientMethod`.
        order: How images come. `auto` learns from the predictions whether they have an order, and
            goes by it: how long classes stay is a prior on the outputs, and the part that the
            classes of a batch explain is taken out of its statistics. By default if statistics are
            `mixed` and the filter can tell whether two images have one class: without that, a
            network that collapses looks like a stream of one class. `video`: they surely have an
            order, as frames do. `shuffled`: they have none, or it means nothing.
        outliers: Whether to replace single pixels that have gone wrong before filtering, in batches
            that have more of them than the source. By default if a filter acts on the model's
            input images.
        views: With 2, the mirrored images are predicted as well if a shift is sure, and logits
            are averaged; for twice the time.
        mirror: True for images that mean the same when mirrored, whatever the filter says. By
            default `views=2` needs a filter that saw on source images that predictions stay.
        states: How many conditions of images are told apart at most, such as noise and fog in one
            batch. Each has gains and statistics of its own; images are told apart by the first
            filter. With 1, all images share one state.
    """

    needs_filter: ClassVar[bool] = True
    gain: ClassVar[GainName] = "two-sided"
    constants: ClassVar[Constants] = CONSTANTS

    filter: FittedFilter | Sequence[FittedFilter] | None = field(default=None, kw_only=False)
    shrink: NotNegative = WIENER["shrink"]
    restore: NotNegative = WIENER["restore"]
    largest_ratio: Annotated[float, Number(above=1)] = CONSTANTS.largest_ratio
    threshold: Annotated[float, Number(0, below=1)] | None = None
    memory: Positive = CONSTANTS.memory
    center: Share = 1.0
    statistics: Statistics = "mixed"
    order: Order | None = None
    outliers: bool | None = None
    views: Annotated[int, Whole(1, 2)] = 1
    mirror: bool | None = None
    states: Count = CONSTANTS.states

    def __post_init__(self) -> None:
        """Check the options."""
        _ = self._filters
        super().__post_init__()
        if self.order in ("auto", "video") and self._classes is None:
            raise OptionError(
                f'`order="{self.order}"` needs a filter that knows what classes do to the network; '
                "this one was saved by an older ttapca, or its model has no normalisation layers "
                "or returns no logits. Fit it again, with `logits=` if the model returns more than "
                "one tensor."
            )
        if self.outliers and self._image_filter is None:
            self.refuse(
                "outliers",
                "no filter acts on the model's input images and was fitted by "
                "a ttapca that measures outliers",
            )
        if self.views == 1:
            self.refuse("mirror", "with `views=1`, no image is mirrored")
        else:
            self._check_mirror()

    def _check_mirror(self) -> None:
        """Raise unless images mean the same when mirrored, by the user or by the filter."""
        if self.mirror:
            return
        rule = "`views=2` is for images that mean the same when mirrored"
        way_out = "Leave `views` out, or insist with `mirror=True`."
        if self.mirror is False:
            raise OptionError(f"{rule}; found `mirror=False`. Leave both out.")
        known = (one.mirror_agreement_ for one in self._filters)
        share = next((found for found in known if found is not None), None)
        if share is None:
            raise OptionError(
                f"{rule}. Whether they do was not measured: the filter was saved by an older "
                "ttapca, or its model takes no images or returns no logits. Fit it again, with "
                f"`logits=` if the model returns more than one tensor. {way_out}"
            )
        if share < LEAST_MIRROR_AGREEMENT:
            raise OptionError(
                f"{rule}; found that {100 * share:.0f} % of the network's predictions on source "
                f"images stay, and at least {100 * LEAST_MIRROR_AGREEMENT:.0f} % must. Digits and "
                f"letters are such images. {way_out}"
            )

    @property
    def looks_at_classes(self) -> bool:
        """Whether the order of images is looked at, by choice or by default."""
        if self.order is not None or self._classes is None:
            return self.order in ("auto", "video")
        return self._classes.pairs is not None and self._mixes

    @property
    def _counts_classes(self) -> bool:
        """Whether the order of images only says for how many they count."""
        # That is so if the source had too few images to tell a run from a network that collapses.
        few = self._classes is not None and self._classes.pairs is None
        return few and self.order is None and self._mixes and not self.learns

    @property
    def _mixes(self) -> bool:
        known = isinstance(self.statistics, Mixture | str)
        return known and self.statistics not in ("source", "batch")

    def for_outputs(self, kind: OutputKind | None) -> Method:
        """Leave classes aside if there are none that exclude each other."""
        if super().for_outputs(kind) is not self or kind not in ("multilabel", "regression"):
            return self
        if self.order not in (None, "shuffled"):
            raise OptionError(
                f'`order="{self.order}"` looks at classes that exclude each other; found '
                f'`outputs="{kind}"`, which has none. Leave `order` out.'
            )
        looks = self.looks_at_classes or self._counts_classes
        return dataclasses.replace(self, order="shuffled") if looks else self

    @functools.cached_property
    def _filters(self) -> list[FittedFilter]:
        if isinstance(self.filter, (list, tuple)) and self.filter:
            return [needed_filter(one) for one in self.filter]
        return [needed_filter(self.filter)]

    @functools.cached_property
    def _classes(self) -> SourceClasses | None:
        return known_classes(self._filters)

    @functools.cached_property
    def _image_filter(self) -> FittedFilter | None:
        """The filter that sees the images themselves, and knows their outliers."""
        return next((one for one in self._filters if one.outliers_ is not None), None)

    def assemble(self) -> Assembly:
        """Return gains and statistics that follow the stream."""
        names = ("shrink", "restore", "largest_ratio", "center")
        options = {name: getattr(self, name) for name in names}
        constants, measured = self.constants, self._filters[0].resemblance_
        options["threshold"] = constants.threshold if self.threshold is None else self.threshold
        if measured is not None:  # in place of what the constants suppose
            constants = measured.told(constants)
        # The first filter tells conditions apart, and the others go by what it found.
        gains = [
            SpectralGains(
                one,
                self.gain,
                **options,
                constants=constants,
                states=1 if number else self.states,
            )
            for number, one in enumerate(self._filters)
        ]
        classes = self._classes if self.looks_at_classes else None
        statistics = statistics_surfaces(
            self.statistics, gains, classes=classes, constants=constants
        )
        surfaces: list[Surface] = [*statistics, *gains]
        if self._image_filter is not None and self.outliers is not False:
            # Attached last, though it acts first: a folded filter wants a layer without hooks.
            surfaces.append(OutlierRepair(self._image_filter, constants))
        predictor: Predictor | None = None
        if self._classes is not None and self._counts_classes:
            predictor = RunCounts(self._classes, constants)
        if classes is not None:
            following = (each for each in statistics if isinstance(each, StreamStatistics))
            predictor = ChainPasses(
                classes,
                next(following, None),
                required=self.order is not None,
                order=self.order or "auto",
                constants=constants,
            )
        if self.views == 2:
            predictor = MirroredView(predictor or Predictor())
        return Assembly(surfaces, predictor, self.memory)


@register("ttapca-closed", **OURS)
@dataclass(frozen=True, kw_only=True)
class PulledWiener(Wiener):
    """Spectral filter from the closed form on, learned by entropy and pulled back.

    A factor f_i on each gain takes steps on the mean entropy plus pull times mean_i (log f_i)^2,
    added up over the filters.

    Attributes:
        pull: How strongly the factors are pulled back to the closed form.
        steps: Gradient steps on each batch.
        lr: Learning rate.
        logits: From `before` or `after` the update.
    """

    learns: ClassVar[bool] = True
    outputs = PROBABILITIES
    gain: ClassVar[GainName] = "pulled"

    pull: NotNegative = 1.0
    steps: Count = 1
    lr: Positive = 0.01
    logits: Logits = "after"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.order not in (None, "shuffled"):
            self.refuse("order", "gradient steps look at the batch as it is")
        if self.views > 1:
            self.refuse("views", "gradient steps look at the batch as it is")

    @property
    def looks_at_classes(self) -> bool:
        """Gradient steps look at the batch as it is."""
        return False

    def assemble(self) -> Assembly:
        """Return the same, and a predictor of a factor on each gain."""
        return dataclasses.replace(super().assemble(), predictor=PulledSteps(self))


class PulledSteps(GradientSteps):
    """Lowers the entropy, and stays near the closed form; moves logarithms of factors."""

    def __init__(self, options: PulledWiener) -> None:
        super().__init__(
            mean_entropy, optimizer=adam(options.lr), steps=options.steps, logits=options.logits
        )
        self.pull = options.pull

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Return entropy plus weighted distance."""
        del run, inputs, options
        away = sum(parameter.square().mean() for parameter in self.descent.parameters)
        return self.objective(logits) + self.pull * away


class MirroredView(Predictor):
    """Gives another predictor the mean of the logits for images and mirrored images.

    Every pass of that predictor, which takes no gradient steps, becomes two. The second one, over
    the mirrored images, reads the stream and does not count: gains are those of the images
    themselves, statistics those of the mirrored batch and of the same past. If no shift is sure,
    there is only the first pass, and the logits are those of the other predictor, bit for bit.
    """

    def __init__(self, inner: Predictor) -> None:
        super().__init__()
        self.inner = inner
        self.reads = inner.reads

    @property
    def kind(self) -> str:
        """The kind of the other predictor: a second look leaves nothing in a stream."""
        return self.inner.kind

    def join(self, stream: Stream) -> None:
        """Pass on the stream, and remember it: it tells of a shift."""
        self.stream = stream
        self.inner.join(stream)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch."""
        if mirror_images(inputs, options) is None:
            found = [
                tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                for value in (*inputs, *options.values())
            ]
            raise ShapeError(
                "A mirrored view needs images: a floating-point tensor of shape (batch, channels, "
                f"height, width); found {found}. Adapt with `views=1`."
            )

        def both(*inputs: Any, **options: Any) -> Tensor:
            return self._mean(run, inputs, options)

        return self.inner.predict(both, *inputs, **options)

    def _mean(self, run: Run, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        logits, batch = run(*inputs, **options), self.stream.batch
        mirrored = mirror_images(inputs, options)
        if mirrored is None or (batch is not None and (batch.left_out or not batch.shift.any())):
            return logits
        args, kwargs = mirrored
        if batch is not None:
            batch.looking = True
        seen = run(*args, **kwargs)
        if batch is not None:
            batch.looking = False
        back = mirror_back(seen) if isinstance(seen, Tensor) else None
        if back is None or back.shape != logits.shape:
            found = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
            raise LayerOutputError(
                "A mirrored view needs logits of shape (batch, classes), or (batch, classes, "
                f"height, width); found {found}. Say where they are with `logits=`, or adapt with "
                "`views=1`."
            )
        # Means of probabilities did neither better nor worse, and not every output is one.
        return (logits + back) / 2

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return the other predictor's facts about a stream."""
        return self.inner.facts_in(state)
