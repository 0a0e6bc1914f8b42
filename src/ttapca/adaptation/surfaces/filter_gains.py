"""The gains of a spectral filter as a surface."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.input_check import InputCheck
from ttapca.errors import TruncationWarning, warn_caller
from ttapca.fitting.attachment import prepare
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import GainName, is_closed_form
from ttapca.spectral.source_classes import SourceClasses
from ttapca.spectral.stream import ParameterValues, Stream
from ttapca.support.modules import core_of


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

    Attributes:
        in_closed_form: Whether the gains follow from the data.
        filter: The filter on the model, once attached; its parameters are those of its gains.
    """

    filter: SpectralFilter | None

    def __init__(
        self, fitted: FittedFilter, gain: GainName, *, strict: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.fitted = fitted
        self.strict = strict
        self.in_closed_form = is_closed_form(gain)
        self.filter = None
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
                "with more components, or choose a method in closed form such as `wiener`, which "
                "keeps what lies outside of the components.",
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
